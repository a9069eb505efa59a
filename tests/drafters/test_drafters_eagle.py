"""EAGLE heads as they are published: their guesses against the formulas, and whole texts against the target's own."""

import json
from pathlib import Path

import pytest
import torch
from head_drafts import GREEDY, LAYERS, TEXT, features_of, loaded, reference, row
from safetensors.torch import save_file
from tiny_engine import PROMPTS, decode, tokens
from tiny_heads import CONFIG, HIDDEN, publish, random_weights
from tiny_models import VOCAB

from specdec_cli import drafters
from specdec_cli.engine.build import another_drafter
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.drafts import read_draft
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.lm.files import hub
from specdec_cli.lm.heads.published import read_published
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.recipe import resolve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

VARIANTS = [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}]


FORMS = [("eagle", {}), ("official", {}), ("specforge", {}), ("modelopt", {})]
FORMS += [("speculators", variant) for variant in VARIANTS]


@pytest.mark.in_turn(1)
@pytest.mark.parametrize(("form", "variant"), FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_draw_from_what_the_formulas_say(lm, form, variant, temperature: float, tmp_path: Path) -> None:
    is_third = form != "eagle"
    weights = random_weights(is_third, seed=3, **variant)
    layers = (1, 2, 2) if form == "official" else LAYERS  # of a configuration that names none: 1, 6 // 2 - 1, 6 - 4
    drafter = loaded(lm, publish(tmp_path / "head", weights, form, layers, **variant))
    assert drafter.taps == (layers if is_third else ("final",))
    states = features_of(lm, TEXT, drafter.taps)
    expected = reference(weights, lm, borrows=form in ("specforge", "modelopt"), **variant)
    ids = expected._ids(torch.arange(40)) if is_third else torch.arange(VOCAB)
    known, params = 0, SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    # A prompt; all accepted with the bonus token; partly accepted; all refused; again without anything new.
    for end in (9, 14, 16, 17, 17):
        features = states[known : end - 1] if known < end - 1 else None
        guess = drafter.propose([row(TEXT[:end], features, params=params)])[0]
        known = end - 1
        drafted = torch.tensor(guess.drafted.tokens)
        assert len(drafted) == 4
        after = torch.tensor(TEXT[1:end])
        forced = drafted.expand(len(after), -1)
        logits, _ = expected.draft(states[: end - 1], after, 4, forced)
        if temperature == 0:
            assert ids[logits[-1].argmax(-1)].tolist() == drafted.tolist()
            assert guess.q is None
        else:
            q = torch.zeros(4, VOCAB)
            q[:, ids] = logits[-1].softmax(-1)
            assert torch.allclose(guess.q, q, atol=2e-5)


@pytest.mark.parametrize("tree", ["3,2,1", "dynamic:10"])
def test_a_trees_nodes_follow_their_paths(lm, tree: str, tmp_path: Path) -> None:
    weights = random_weights(True, seed=4)
    drafter = loaded(lm, publish(tmp_path / "head", weights, "speculators"))
    states, expected = features_of(lm, TEXT, LAYERS), reference(weights, lm)
    ids = expected._ids(torch.arange(40))
    for begin, end in ((0, 8), (8, 12)):
        more = {"tree": TreeShape.parse(tree)}
        drafted = drafter.propose([row(TEXT[: end + 1], states[begin:end], **more)])[0].drafted
        assert len(drafted) > 4
        for node in range(len(drafted)):
            path = torch.tensor(drafted.tokens_to(node))
            logits, _ = expected.draft(states[:end], torch.tensor(TEXT[1 : end + 1]), len(path), path.expand(end, -1))
            siblings = [drafted.tokens[one] for one in drafted.children(drafted.parents[node])]
            best = ids[logits[-1, -1].topk(len(siblings)).indices].tolist()
            assert siblings == best, "siblings are the likeliest after their own path"


def trained(lm, text, k: int, is_third: bool, steps: int = 80):
    """Weights fitted to one text with k unrolled steps, by the reference."""
    weights = random_weights(is_third, drafted=VOCAB, seed=8)
    if not is_third:  # nothing is normalized before the target's output layer
        weights = {name: value if "norm" in name else 0.1 * value for name, value in weights.items()}
    expected = reference({name: value.requires_grad_() for name, value in weights.items()}, lm)
    taps = LAYERS if is_third else ("final",)
    states = features_of(lm, text, taps)
    count = len(text) - 1 - k
    forced = torch.tensor([text[s + 2 : s + 2 + k] for s in range(count)])
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        logits, _ = expected.draft(states[:count], torch.tensor(text[1 : count + 1]), k, forced)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), forced.flatten())
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("form", ["eagle", "speculators"])
def test_an_overfitted_head_is_always_right(lm, form: str, tmp_path: Path) -> None:
    k, num = 3, 32
    params = SamplingParams(max_new_tokens=num)
    prompt = PROMPTS[1]
    text = [*prompt, *tokens(decode(lm, None, 0, [prompt], params=SamplingParams(max_new_tokens=num + k + 2)))[0]]
    drafter = loaded(lm, publish(tmp_path / "head", trained(lm, text, k, form != "eagle"), form))
    [found] = decode(lm, drafter, k, [prompt], params=params)
    assert found.token_ids == text[len(prompt) : len(prompt) + num]
    stats = found.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens, "acceptance length is k + 1"


def test_features_one_position_off_are_caught(lm, tmp_path: Path) -> None:
    weights = random_weights(True, seed=3)
    drafter = loaded(lm, publish(tmp_path / "head", weights, "speculators"))
    states, expected = features_of(lm, TEXT, LAYERS), reference(weights, lm)
    guess = drafter.propose([row(TEXT[:20], states[1:20])])[0]
    logits, _ = expected.draft(
        states[:19], torch.tensor(TEXT[1:20]), 4, torch.tensor(guess.drafted.tokens).expand(19, -1)
    )
    ids = expected._ids(torch.arange(40))
    assert ids[logits[-1].argmax(-1)].tolist() != list(guess.drafted.tokens)


def test_an_engine_is_given_a_head_by_its_folder(lm, tmp_path: Path) -> None:
    folder = publish(tmp_path / "head", random_weights(True, seed=2), "official")
    engine = Engine.load(lm.name, None, kv_cache_bytes=1 << 20, check=False)
    drafter = another_drafter(engine, {"model": str(folder)})
    assert drafter.taps == (1, 2, 2)


BAD = {
    "a missing tensor": (lambda c, w: w.pop("fc.weight"), "lacks the tensor `fc.weight`"),
    "a wrong shape": (lambda c, w: w.update({"norm.weight": torch.ones(7)}), r"`norm.weight` .* has the shape \[7\]"),
    "a stranger": (lambda c, w: w.update({"parallel_draft_heads.0": torch.ones(7)}), "`parallel_draft_heads.0`"),
    "another width": (lambda c, w: c.update(target_hidden_size=64), "states of width 64, and .* has 32"),
    "another vocabulary": (lambda c, w: c["transformer_layer_config"].update(vocab_size=500), "made for 500 tokens"),
    "another depth": (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids=[2, 9, 30]), "layer `8`, and .* has 6"),
    "no numbers": (lambda c, w: w["fc.weight"].fill_(torch.nan), "`fc.weight` .* not finite"),
    "ids beyond": (lambda c, w: w["d2t"].fill_(90), "does not have, .* `d2t`"),
    "another kind": (lambda c, w: c.update(speculators_model_type="xpress"), "kind `xpress`|hidden states"),
    "no layer": (lambda c, w: c.pop("transformer_layer_config"), "no `transformer_layer_config`"),
    "no list": (lambda c, w: c.update(eagle_aux_hidden_state_layer_ids="low"), "no list of layers"),
    "strange layers": (lambda c, w: c["transformer_layer_config"].update(model_type="mamba2"), "`mamba2` layers"),
    "an activation": (lambda c, w: c["transformer_layer_config"].update(hidden_act="nope"), "activation `nope`"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_sentence(lm, case: str, tmp_path: Path) -> None:
    spoil, said = BAD[case]
    weights = random_weights(True, seed=2)
    folder = publish(tmp_path / "head", weights, "speculators")
    config = json.loads((folder / "config.json").read_text())
    spoil(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UsageError, match=said):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


@pytest.mark.parametrize(("content", "said"), [
    (None, "has no `config.json`"),
    ('{"a": ', r"config\.json` cannot be read: Expecting value"),
    (json.dumps({**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "rope_theta": "x"}), "is not valid"),
])  # fmt: skip
def test_a_broken_configuration_is_one_sentence(lm, content: str | None, said: str, tmp_path: Path) -> None:
    folder = publish(tmp_path / "head", random_weights(True, seed=2), "speculators")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(RunError, match=said):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


def test_settings_of_a_model_have_no_meaning(lm, tmp_path: Path) -> None:
    folder = publish(tmp_path / "head", random_weights(True), "speculators")
    with pytest.raises(UsageError, match=r"`draft\.compute` has no meaning"):
        read_draft({"model": str(folder)}, ModelPlan(lm.name), LoadSettings(draft=ModelSettings(compute="native")))
    with pytest.raises(UsageError, match=r"`draft\.quantize` has no meaning"):
        read_draft({"model": str(folder)}, ModelPlan(lm.name), LoadSettings(draft=ModelSettings(quantize="int8")))
    with pytest.raises(UsageError, match="joined by dashes"):
        drafters.create("eagle3", {"model": str(folder), "layers": "1,2"})


def test_layers_may_be_named(lm, tmp_path: Path) -> None:
    folder = publish(tmp_path / "head", random_weights(True, taps=2), "official")
    assert loaded(lm, folder, layers="0-4").taps == (0, 4)
    with pytest.raises(SpecdecError, match=rf"`fc.weight` .* \[{HIDDEN}, {2 * HIDDEN}\]"):
        loaded(lm, folder)


def test_a_trace_foretells_the_engines_counts(lm, tmp_path: Path) -> None:
    text = [*PROMPTS[1], *tokens(decode(lm, None, 0, [PROMPTS[1]], params=SamplingParams(max_new_tokens=20)))[0]]
    drafter = loaded(lm, publish(tmp_path / "head", trained(lm, text, 2, True, 15), "speculators"))
    requests = [Request(PromptRow(i, ""), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    engine = Engine(lm, drafter, None, EngineOptions(max_num_seqs=4))
    trace = trace_target(engine, requests)
    trace.drafts["head"] = trace_draft(trace, drafter, 4, target=lm)
    for one in replay(trace, "head", "greedy", 4):
        counts = [found.speculative for found in decode(lm, drafter, one.k, params=GREEDY)]
        assert one.num_steps.sum() == sum(each.num_steps for each in counts)
        assert one.acceptance_length().median > 1


def test_doctor_says_what_the_folder_holds(lm, tmp_path: Path) -> None:
    def found(**keys):
        folder = publish(tmp_path / f"head-{len(keys)}", random_weights(True), "speculators", **keys)
        recipe = resolve(sets=[f"target.model={lm.name}", f"draft.model={folder}"]).recipe
        return preflight(recipe, look())

    pair = found()
    assert (
        pair.head
        == "EAGLE-3 head, speculators 0.9.0 format: reads the outputs of layers 1, 2, 3; drafts 40 of 97 tokens"
    )
    assert (pair.draft, pair.draft_method, pair.taps, pair.errors) == (None, "eagle3", (1, 2, 3), [])
    [problem] = found(target_hidden_size=64).errors
    assert "reads hidden states of width 64" in problem.message


def test_a_head_on_the_hub_is_fetched_with_its_weights(lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = publish(tmp_path / "head", random_weights(True), "official"), []

    def fetch(_, allow_patterns, **__):
        asked.append(set(allow_patterns))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    fields = {"model": "someone/a-head"}
    weights = {"*.safetensors", "pytorch_model.bin"}
    assert read_draft(fields, ModelPlan(lm.name), LoadSettings(), has_weights=False).published is not None
    assert not any(patterns & weights for patterns in asked), "doctor reads configurations alone"
    assert read_draft(fields, ModelPlan(lm.name), LoadSettings()).published is not None
    assert weights <= asked[-1]


def test_49_12_the_size_of_a_drafts_vocabulary_comes_from_its_map(tmp_path: Path) -> None:
    folder = publish(tmp_path / "head", random_weights(True), "specforge")
    content = json.loads((folder / "config.json").read_text())
    size = content.pop("draft_vocab_size")
    assert size != content["vocab_size"]
    (folder / "config.json").write_text(json.dumps(content))
    assert read_published(str(folder)).draft_vocab_size == size


@pytest.mark.parametrize("num_layers", [1, 3])
def test_49_12_a_shallow_target_is_named_as_the_reason(tmp_path: Path, num_layers: int) -> None:
    folder = publish(tmp_path / "head", random_weights(True), "specforge")
    content = json.loads((folder / "config.json").read_text())
    content = {name: value for name, value in content.items() if "layer_ids" not in name and name != "eagle_config"}
    (folder / "config.json").write_text(json.dumps(content))
    config = read_published(str(folder))
    with pytest.raises(UsageError, match=f"need a target of 4 layers: this one has {num_layers}"):
        config.given({}, lambda: num_layers)
    assert config.given({"layers": "0-1-2"}, lambda: num_layers).taps == (0, 1, 2)
