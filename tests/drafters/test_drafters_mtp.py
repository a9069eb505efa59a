"""MTP modules in a target's checkpoint: their guesses against the formulas, and whole texts against the target's."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from head_drafts import GREEDY, TEXT, features_of, row
from safetensors.torch import load_file, save_file
from shortened import mostly_slow
from tiny_engine import PROMPTS, decode, letter_tokenizer, preempted, tokens
from tiny_models import VOCAB, make_tiny
from tiny_mtp import HIDDEN, TARGETS, Reference, make_target, write_modules
from typed import not_none

from specdec_cli import drafters
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.heads import stacks
from specdec_cli.lm.heads.compiled_stack import CompiledStack
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_module import HeadModule
from specdec_cli.lm.heads.mtp import MtpHead
from specdec_cli.lm.heads.mtp_files import read_mtp
from specdec_cli.lm.heads.transformers_layer import TransformersLayer
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.audit.chisquare import chi_square, enumerate_joint
from specdec_cli.measure.machine.machine import look
from specdec_cli.measure.machine.preflight import preflight
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.recipe import resolve
from specdec_cli.report.doctor import _mtp_words
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

WAYS = [(kind, 1) for kind in TARGETS] + [("llama", 2), ("llama", 3), ("qwen", 2), ("deepseek", 2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """A loaded target of a kind with so many modules, and these."""
    made = {}

    def get(kind: str, num: int = 1):
        if (kind, num) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{num}")
            modules = make_target(kind, folder, num)
            letter_tokenizer().save_pretrained(folder)
            made[kind, num] = load_lm(str(folder), block_size=4, max_num_seqs=4), modules
        return made[kind, num]

    return get


def loaded(lm, **options):
    drafter = drafters.create("mtp", options)
    lm.tap(drafter.taps)
    drafter.load(Resources(lambda _: lm, None, VOCAB, lm))
    return drafter


def reference(lm, kind: str, modules, **options) -> Reference:
    return Reference(kind, modules, lm.embed(list(range(VOCAB))), lm.head(torch.eye(HIDDEN)).T.clone(), **options)


def expected(formulas: Reference, states, end: int, path) -> torch.Tensor:
    """Logits of each token of a path drafted after the first `end` tokens of the text."""
    return formulas.draft(states[None, : end - 1], torch.tensor([TEXT[:end]]), torch.tensor([list(path)]))[0]


def test_nothing_is_printed_while_modules_load(pair, capsys: pytest.CaptureFixture[str]) -> None:
    lm, _ = pair("llama")
    capsys.readouterr()
    loaded(lm)
    assert capsys.readouterr() == ("", "")


@pytest.mark.in_turn(4, every=7)
@pytest.mark.parametrize(
    ("kind", "num", "recycle"),
    [(*way, recycle) for way in WAYS for recycle in ("post-norm", "pre-norm")],
)
def test_rounds_draw_from_what_the_formulas_say(pair, kind: str, num: int, recycle: str) -> None:
    lm, modules = pair(kind, num)
    drafter = loaded(lm, recycle=recycle)
    states = features_of(lm, TEXT, drafter.taps)
    formulas = reference(lm, kind, modules, recycles_normed=recycle == "post-norm")
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    known = 0
    # A prompt; all accepted with the bonus token; partly accepted; all refused; again without anything new.
    for end in (9, 14, 16, 17, 17):
        features = states[known : end - 1, None][:, 0] if known < end - 1 else None
        guess = drafter.propose([row(TEXT[:end], features, params=params)])[0]
        known = end - 1
        assert len(guess.drafted) == 4
        logits = expected(formulas, states[:, 0], end, guess.drafted.tokens)
        assert torch.allclose(guess.q, logits.softmax(-1), atol=3e-5)
    drafter.release(0)


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_short_prompt_has_no_slots_for_later_modules(pair, num: int, length: int) -> None:
    lm, modules = pair("llama", num)
    drafter, formulas = loaded(lm), reference(lm, "llama", modules)
    states, known = features_of(lm, TEXT, drafter.taps), 0
    for end in (length, length + 1, length + 5):
        drafted = drafter.propose([row(TEXT[:end], states[known : end - 1])])[0].drafted
        known = end - 1
        logits = expected(formulas, states[:, 0], end, drafted.tokens)
        assert logits.argmax(-1).tolist() == list(drafted.tokens)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_sequence_begins_with_what_another_left(pair, num: int) -> None:
    lm, modules = pair("llama", num)
    drafter, formulas = loaded(lm), reference(lm, "llama", modules)
    states = features_of(lm, TEXT, drafter.taps)
    drafter.adopt(1, TEXT[:30], "a")
    drafter.propose([replace(row(TEXT[:30], states[:29]), handle=1)])
    drafter.release(1)
    for end in range(18, 26):  # the next module needs a token more for the same slots
        known = drafter.adopt(0, TEXT[:end], "a")
        assert known == (end - max(num - 1, 1) - 1) // 4 * 4
        for more in (0, 1, 4):
            drafted = drafter.propose([row(TEXT[: end + more], states[known : end + more - 1])])[0].drafted
            known = end + more - 1
            logits = expected(formulas, states[:, 0], end + more, drafted.tokens)
            assert logits.argmax(-1).tolist() == list(drafted.tokens)
        drafter.release(0)
    assert drafter.adopt(0, TEXT[:30], "b") == 0
    assert drafter.adopt(2, [*TEXT[1:20]], "a") == 0
    for handle in (0, 2):
        drafter.release(handle)
    for module in drafter._sequences.modules:
        module.cache.check()
        assert module.cache.pool.num_free == module.cache.num_blocks


@pytest.mark.parametrize("kind", ["llama", "mimo", "qwen"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fast_layers_give_what_plain_ones_give(pair, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In compiled code where our own decoder knows the layer, else with packed products, as a model's are."""
    lm = load_lm(pair(kind, 1)[0].name, block_size=4, max_num_seqs=4, dtype=dtype, check=False)
    fast = loaded(lm)
    layer = fast._sequences.modules[0].head._layer
    assert isinstance(layer, TransformersLayer if kind == "qwen" else CompiledStack)
    monkeypatch.setattr(stacks, "compiled_family", lambda *_: None)
    monkeypatch.setattr(stacks, "multiplies", lambda *_: False)
    monkeypatch.setattr(stacks, "kind_for", lambda *_: "plain")
    plain = loaded(lm)
    assert isinstance(plain._sequences.modules[0].head._layer, TransformersLayer)
    assert fast.sizes == plain.sizes
    states = features_of(lm, TEXT, plain.taps)
    asked = row(TEXT, states[:-1], k=1, params=SamplingParams(temperature=1.0, seed=5))
    first, second = (one.propose([asked])[0].q for one in (fast, plain))
    assert torch.allclose(first, second, atol=1e-4 if dtype == "float32" else 0.05)


def test_a_sampled_trace_foretells_the_engines_counts(pair) -> None:
    lm, _ = pair("llama", 2)
    drafter, params = loaded(lm), SamplingParams(max_new_tokens=16, temperature=0.7, seed=3)
    each = [replace(params, index=i) for i in range(len(PROMPTS))]
    requests = [Request(PromptRow(i, ""), *its) for i, its in enumerate(zip(PROMPTS, each, strict=True))]
    trace = trace_target(Engine(lm, drafter, None, EngineOptions(max_num_seqs=4)), requests)
    trace.drafts["mtp"] = trace_draft(trace, drafter, 3, target=lm)
    for one in replay(trace, "mtp", "gumbel", 3):
        counts = [found.speculative for found in decode(lm, drafter, one.k, PROMPTS, each, verify="gumbel")]
        assert one.num_accepted_tokens.sum() == sum(its.num_accepted_tokens for its in counts)
        assert one.num_steps.sum() == sum(its.num_steps for its in counts)


@pytest.mark.parametrize("num", [2, 3])
def test_prefix_caching_changes_no_guess(pair, num: int) -> None:
    lm, _ = pair("llama", num)
    params = SamplingParams(max_new_tokens=12)
    prompts = [[*TEXT[:20], 5, 7], [*TEXT[:20], 9], TEXT[:14]]
    plain = decode(lm, loaded(lm), 4, prompts, params)
    engine = Engine(lm, loaded(lm), None, EngineOptions(max_num_seqs=4, prefix_caching=True))
    for _ in range(2):
        found = engine.generate([list(prompt) for prompt in prompts], params)
        assert tokens(found) == tokens(plain)
        drafted = [one.speculative.num_accepted_tokens for one in found]
        assert drafted == [one.speculative.num_accepted_tokens for one in plain]


@pytest.mark.parametrize("tree", ["3,2,1", "dynamic:10"])
@pytest.mark.parametrize(("kind", "num"), [("deepseek", 1), ("glm", 1), ("llama", 2), ("llama", 3)])
def test_a_trees_nodes_follow_their_paths(pair, kind: str, num: int, tree: str) -> None:
    lm, modules = pair(kind, num)
    drafter, formulas = loaded(lm), reference(lm, kind, modules)
    states = features_of(lm, TEXT, drafter.taps)
    for begin, end in ((0, 8), (8, 12)):
        more = {"tree": TreeShape.parse(tree)}
        drafted = drafter.propose([row(TEXT[: end + 1], states[begin:end], **more)])[0].drafted
        assert len(drafted) > 4
        for node in range(len(drafted)):
            logits = expected(formulas, states[:, 0], end + 1, drafted.tokens_to(node))[-1]
            siblings = [drafted.tokens[one] for one in drafted.children(drafted.parents[node])]
            best = logits.topk(len(siblings)).indices.tolist()
            assert siblings == best, "siblings are the likeliest after their own path"


@pytest.mark.in_turn(0)
@pytest.mark.parametrize(("kind", "num", "tree"), [
    ("deepseek", 1, None), ("deepseek", 1, "2,2,1"), ("glm", 1, "dynamic:8"), ("qwen", 1, None), ("mimo", 1, "2,2,1"),
    ("llama", 2, None), ("llama", 3, "2,2,1"),
])  # fmt: skip
@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], [1.0]))
def test_whole_texts_are_the_targets(pair, kind: str, num: int, tree, temperature: float) -> None:
    lm, _ = pair(kind, num)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3)
    verify = "auto" if temperature == 0 else "gumbel"
    found = decode(lm, loaded(lm), 4, params=params, tree=tree, verify=verify)
    assert tokens(found) == tokens(decode(lm, None, 0, params=params, verify=verify))
    assert sum(one.speculative.num_draft_tokens for one in found) > 0


def test_cached_prefixes_leave_the_text_as_it_is(pair) -> None:
    for num in (1, 2):
        lm, _ = pair("llama", num)
        plain = tokens(decode(lm, None, 0, [PROMPTS[3]] * 3))
        drafter = loaded(lm)
        for _ in range(2):
            assert tokens(decode(lm, drafter, 3, [PROMPTS[3]] * 3, prefix_caching=True)) == plain


@pytest.mark.parametrize(("num", "tree"), [(1, None), (2, "2,2,1")])
def test_preempted_sequences_go_on(pair, num: int, tree: str | None) -> None:
    lm, _ = pair("llama", num)
    tight = load_lm(lm.name, max_num_seqs=4, block_size=4, num_blocks=24, check=False)
    options = EngineOptions(num_speculative_tokens=4, tree=tree, max_num_seqs=4, prefix_caching=True)
    prompts = [*PROMPTS, TEXT[30:45]]
    found, num_preemptions = preempted(Engine(tight, loaded(tight), None, options), GREEDY, prompts)
    assert num_preemptions > 0
    assert tokens(found) == tokens(decode(lm, None, 0, prompts, GREEDY))


@pytest.mark.in_turn(0)
@pytest.mark.parametrize("tree", [None, "2,2"])
def test_samples_follow_the_targets_distribution(pair, tree: str | None) -> None:
    lm, _ = pair("llama")
    near = load_lm(lm.name, block_size=4, max_num_seqs=64, check=False)
    params = SamplingParams(temperature=1.0, top_k=3, max_new_tokens=3)

    def p(text: tuple[int, ...]) -> npt.NDArray[np.floating[Any]]:
        best = near.score([Row(-1, list(text), 1)])[0].topk(3)
        near.release(-1)
        return torch.zeros(VOCAB).index_copy(0, best.indices, best.values.softmax(-1)).numpy()

    joint = enumerate_joint(p, PROMPTS[0], 2)
    asked = [replace(params, seed=i) for i in range(600)]
    found = decode(near, loaded(near), 2, [PROMPTS[0]] * 600, asked, tree=tree, max_num_seqs=64)
    counts = Counter(tuple(one.token_ids[:2]) for one in found)
    assert chi_square(counts, joint).p_value > 1e-6
    turned = {cell: joint[other] for cell, other in zip(joint, reversed(joint), strict=True)}
    assert chi_square(counts, turned).p_value < 1e-6, "another distribution is noticed"


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize(
    ("kind", "num", "temperature"),
    [("deepseek", 1, 0.0), ("llama", 2, 0.0), ("deepseek", 1, 1.0), ("llama", 2, 1.0)],
)
def test_a_trace_foretells_the_engines_counts(pair, kind: str, num: int, temperature: float) -> None:
    lm, _ = pair(kind, num)
    drafter, verify = loaded(lm), "gumbel" if temperature else "greedy"
    each = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=2, index=i) for i in range(len(PROMPTS))]
    requests = [Request(PromptRow(i, ""), *both) for i, both in enumerate(zip(PROMPTS, each, strict=True))]
    trace = trace_target(Engine(lm, drafter, None, EngineOptions(max_num_seqs=4)), requests)
    trace.drafts["mtp"] = trace_draft(trace, drafter, 3, target=lm)
    for one in replay(trace, "mtp", verify, 3):
        found = decode(lm, drafter, one.k, params=each, verify=verify if temperature else "auto")
        counts = [output.speculative for output in found]
        assert one.num_steps.sum() == sum(each.num_steps for each in counts)
        assert one.num_accepted_tokens.sum() == sum(each.num_accepted_tokens for each in counts)


def trained(lm, modules, text, k: int, steps: int):
    """A module fitted to one text with k unrolled steps from every start at once, by the reference's formulas."""
    weights = {name: value.clone().requires_grad_() for name, value in modules[0].items()}
    formulas, tokens_of = reference(lm, "llama", [weights]), torch.tensor(text)
    states = features_of(lm, text, ("final",))[:, 0]
    starts = torch.arange(4, len(text) - k - 2)
    each = torch.arange(len(starts))
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, last = torch.zeros(()), len(text) - 1
        pairs = formulas._pair(weights, tokens_of[None, 1:], states[None, :last]).expand(len(starts), -1, -1)
        for slots in (starts + step for step in range(k)):
            hidden = formulas._layer(weights, pairs)[each, slots]
            feature = formulas._norm(hidden, weights["shared_head.norm.weight"])
            loss = loss + torch.nn.functional.cross_entropy(feature @ formulas.head.T, tokens_of[slots + 2])
            news = formulas._pair(weights, tokens_of[None, slots + 2], feature[None])[0]
            pairs = pairs.index_put((each, slots + 1), news)
        loss.backward()
        optimizer.step()
    return [{name: value.detach() for name, value in weights.items()}]


def test_an_overfitted_module_is_always_right(pair, tmp_path: Path) -> None:
    k, num = 3, 24
    lm, modules = pair("llama")
    prompt = PROMPTS[1]
    params = SamplingParams(max_new_tokens=num + k + 2)
    text = [*prompt, *tokens(decode(lm, None, 0, [prompt], params=params))[0]]
    folder = tmp_path / "fitted"
    shutil.copytree(lm.name, folder)
    write_modules(folder, "llama", trained(lm, modules, text, k, 60))
    fitted = load_lm(str(folder), block_size=4, max_num_seqs=4, check=False)
    [found] = decode(fitted, loaded(fitted), k, [prompt], params=SamplingParams(max_new_tokens=num))
    assert found.token_ids == text[len(prompt) : len(prompt) + num]
    stats = found.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens, "acceptance length is k + 1"


def _swapped(monkeypatch):
    monkeypatch.setattr(MtpHead, "_joined", lambda _, embedded, feature: torch.cat([feature, embedded], -1))


def _unshifted(monkeypatch):
    extend = HeadModule.extend
    monkeypatch.setattr(
        HeadModule, "extend", lambda self, held, text, *more: extend(self, held, [0, *text[:-1]], *more)
    )


def _kept(monkeypatch):
    write, seen = LayerFeed.write, set()

    def once(self, keys, values):
        news = [i for i, place in enumerate(self.places) if place not in seen]
        seen.update(self.places)
        if news:
            unseen = LayerFeed(self.keys, self.values, self.slots, [self.places[i] for i in news], self.end)
            write(unseen, keys[:, news], values[:, news])

    monkeypatch.setattr(LayerFeed, "write", once)


FAULTS = {"the other order": _swapped, "an embedding that is not shifted": _unshifted, "refused keys kept": _kept}


@pytest.mark.parametrize("fault", [None, *FAULTS, "features one position off", "the other reading"])
def test_planted_faults_are_caught(pair, fault, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, modules = pair("deepseek")
    drafter = loaded(lm, recycle="pre-norm" if fault == "the other reading" else "post-norm")
    states, formulas = features_of(lm, TEXT, drafter.taps), reference(lm, "deepseek", modules)
    if fault in FAULTS:
        FAULTS[fault](monkeypatch)
    shift, known, is_right = int(fault == "features one position off"), 0, True
    for end in (9, 11, 12):
        features = states[known + shift : end - 1 + shift]
        params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
        guess = drafter.propose([row(TEXT[:end], features, params=params)])[0]
        known = end - 1
        logits = expected(formulas, states[:, 0], end, guess.drafted.tokens)
        is_right &= torch.allclose(guess.q, logits.softmax(-1), atol=1e-3)
    assert is_right == (fault is None)


BAD = {
    "a missing tensor": (lambda w: w.pop("model.layers.2.hnorm.weight"), "lack the tensor `hnorm.weight`"),
    "a missing weight of the layer": (
        lambda w: w.pop("model.layers.2.self_attn.o_proj.weight"), "`layers.0.self_attn.o_proj.weight` is missing"),
    "a wrong shape": (
        lambda w: w.update({"model.layers.2.eh_proj.weight": torch.ones(HIDDEN, HIDDEN)}),
        r"`model.layers.2.eh_proj.weight` .* has the shape \[32, 32\], where \[32, 64\]"),
    "a wrong shape of the layer": (
        lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.ones(7, HIDDEN)}), "has another shape"),
    "a stranger": (lambda w: w.update({"model.layers.2.self_attn.gate.weight": torch.ones(7)}), "is not read"),
    "no numbers": (
        lambda w: w["model.layers.2.eh_proj.weight"].fill_(torch.nan), "`model.layers.2.eh_proj.weight` .* not finite"),
    "no modules": (lambda w: w.clear(), "has no MTP modules"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_one_sentence(pair, case: str, tmp_path: Path) -> None:
    spoil, said = BAD[case]
    lm, _ = pair("llama")
    folder = tmp_path / "bad"
    shutil.copytree(lm.name, folder)
    second, index = folder / "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
    weights = load_file(second)
    spoil(weights)
    save_file(weights, second, {"format": "pt"})
    content = json.loads(index.read_text())
    first = {name: file for name, file in content["weight_map"].items() if file != second.name}
    index.write_text(json.dumps(content | {"weight_map": first | dict.fromkeys(weights, second.name)}))
    with pytest.raises(UsageError, match=said) as failed:
        Engine.load(str(folder), "mtp", kv_cache_bytes=1 << 20, check=False)
    assert failed.value.exit_code == 2
    assert not Engine.load(str(folder), None, kv_cache_bytes=1 << 20, check=False).has_work, "the target is as it was"


def test_fp8_modules_are_dequantized(pair, tmp_path: Path) -> None:
    lm, modules = pair("llama")
    folder = tmp_path / "fp8"
    shutil.copytree(lm.name, folder)
    stored = {}
    for name, value in modules[0].items():
        stored[name] = value
        if value.dim() > 1 and name != "eh_proj.weight":
            scale = value.abs().amax() / 448
            stored[name] = (value / scale).to(torch.float8_e4m3fn)
            stored[name.removesuffix("weight") + "weight_scale_inv"] = scale.reshape(1, 1)
    keys = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
    write_modules(folder, "llama", [stored], **keys)
    read = read_mtp(str(folder)).read(0, torch.float32)
    for name, value in modules[0].items():
        found = read[name if name.startswith(("enorm", "hnorm", "eh_proj")) else _common(name)]
        assert torch.allclose(found, value, rtol=0.07, atol=1e-2)


def _common(name: str) -> str:
    return "norm.weight" if name == "shared_head.norm.weight" else f"layers.0.{name}"


def test_only_two_readings_are_known() -> None:
    with pytest.raises(UsageError, match="must be post-norm or pre-norm, not `both`"):
        drafters.create("mtp", {"recycle": "both"})


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(("kind", "num"), [("deepseek", 1), ("glm", 1), ("qwen", 1), ("llama", 2)])
def test_doctor_names_the_modules_and_their_memory(pair, kind: str, num: int) -> None:
    lm, _ = pair(kind, num)
    found = preflight(resolve(sets=[f"target.model={lm.name}", "draft.method=mtp"]).recipe, look())
    name = f"{num} MTP module{'s' if num > 1 else ''} of the target's checkpoint"
    assert (found.draft_method, found.head, found.errors, found.taps) == ("mtp", name, [], ("final",))
    facts, held = not_none(found.target), not_none(loaded(lm)._sequences)
    assert (facts.num_mtp_modules, facts.mtp_bytes) == (num, held.weight_bytes)
    sizes = not_none(found.head_facts)
    slot = sum(module.cache.bytes_per_slot for module in held.modules)
    assert (sizes.weights_bytes, sizes.kv_bytes_per_token) == (held.weight_bytes, slot)
    assert found.memory["draft"].weights == held.weight_bytes


@pytest.mark.parametrize(("draft", "advised"), [("mtp", False), ("suffix+mtp", False), ("suffix", True)])
def test_doctor_advises_the_modules_where_they_are_not_used(pair, draft: str, advised: bool) -> None:
    lm, _ = pair("llama")
    flags = {"draft": (drafters.parse_spec(draft), "--draft")}
    found = preflight(resolve(sets=[f"target.model={lm.name}"], flags=flags).recipe, look())
    assert _mtp_words(not_none(found.target), found.draft_method).endswith("try --draft mtp") == advised


def test_doctor_refuses_a_target_without_modules(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "plain")
    letter_tokenizer().save_pretrained(folder)
    found = preflight(resolve(sets=[f"target.model={folder}", "draft.method=mtp"]).recipe, look())
    assert ["has no MTP modules" in problem.message for problem in found.errors] == [True]
