"""P-EAGLE heads: all k tokens of one pass against the formulas, and whole texts against the target's own."""

import json
from pathlib import Path

import pytest
import torch
from head_drafts import GREEDY, LAYERS, TEXT, features_of, loaded, reference, row
from safetensors.torch import save_file
from tiny_engine import PROMPTS, decode, tokens
from tiny_heads import publish, random_weights
from tiny_models import VOCAB

from specdec_cli.engine.engine import Engine
from specdec_cli.errors import UsageError
from specdec_cli.lm.heads.eagle import PEagleHead
from specdec_cli.lm.heads.head_module import HeadModule
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape

MASK = 5


def weights_of(layers: int = 2, **options):
    return random_weights(True, seed=3, layers=layers, masked=True, **options)


def head(folder: Path, weights, **keys) -> Path:
    return publish(folder / "head", weights, "peagle", LAYERS, **({"mask_token_id": MASK} | keys))


VARIANTS = [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True}]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_draw_from_what_the_formulas_say(lm, layers: int, variant, temperature: float, tmp_path: Path) -> None:
    weights = weights_of(layers, **variant)
    drafter = loaded(lm, head(tmp_path, weights, **variant))
    states, formulas = features_of(lm, TEXT, drafter.taps), reference(weights, lm, **variant)
    ids = formulas._ids(torch.arange(40))
    known, params = 0, SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    # A prompt; all accepted with the bonus token; partly accepted; all refused; nothing new, and then more is wanted.
    for end, k in ((9, 4), (14, 4), (16, 4), (17, 2), (17, 2), (17, 5)):
        features = states[known : end - 1] if known < end - 1 else None
        guess = drafter.propose([row(TEXT[:end], features, k, params=params)])[0]
        known = end - 1
        logits = formulas.masked(states[: end - 1], torch.tensor(TEXT[1:end]), k, MASK)
        if temperature == 0:
            assert ids[logits.argmax(-1)].tolist() == list(guess.drafted.tokens)
        else:
            q = torch.zeros(k, VOCAB)
            q[:, ids] = logits.softmax(-1)
            assert torch.allclose(guess.q, q, atol=2e-5)


def test_k_tokens_are_one_pass(lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, passes, run = loaded(lm, head(tmp_path, weights_of())), [], PEagleHead.run
    monkeypatch.setattr(PEagleHead, "run", lambda self, *given: passes.append(1) or run(self, *given))
    guess = drafter.propose([row(TEXT[:9], features_of(lm, TEXT[:9], LAYERS)[:8], 6)])[0]
    assert (len(guess.drafted), len(passes)) == (6, 1)
    assert drafter.one_pass


def test_a_trees_siblings_are_the_likeliest_of_their_depth(lm, tmp_path: Path) -> None:
    weights = weights_of()
    drafter = loaded(lm, head(tmp_path, weights))
    states, formulas = features_of(lm, TEXT, LAYERS), reference(weights, lm)
    drafted = drafter.propose([row(TEXT[:9], states[:8], 3, tree=TreeShape.parse("3,2,1"))])[0].drafted
    best = formulas._ids(formulas.masked(states[:8], torch.tensor(TEXT[1:9]), 3, MASK).topk(3).indices)
    for node in range(len(drafted)):
        siblings = [drafted.tokens[one] for one in drafted.children(drafted.parents[node])]
        assert siblings == best[drafted.depth(node) - 1, : len(siblings)].tolist()


FAULTS = {
    "another mask": lambda m: m.setattr(PEagleHead, "recycled", lambda _, output: output),
    "another mask token": lambda m: m.setattr(HeadModule, "masks", lambda _, num: (MASK + 1,) * num),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(lm, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of()
    drafter = loaded(lm, head(tmp_path, weights))
    states, formulas = features_of(lm, TEXT, LAYERS), reference(weights, lm)
    FAULTS[fault](monkeypatch)
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    guess = drafter.propose([row(TEXT[:9], states[:8], params=params)])[0]
    q = torch.zeros(4, VOCAB)
    logits = formulas.masked(states[:8], torch.tensor(TEXT[1:9]), 4, MASK)
    q[:, formulas._ids(torch.arange(40))] = logits.softmax(-1)
    assert torch.allclose(guess.q[0], q[0], atol=2e-5), "the first token comes from no mask"
    assert not torch.allclose(guess.q, q, atol=1e-3)


def test_49_1_an_overfitted_head_is_always_right(lm, tmp_path: Path) -> None:
    k, num = 3, 24
    [prompt] = [PROMPTS[1]]
    text = [*prompt, *tokens(decode(lm, None, 0, [prompt], params=SamplingParams(max_new_tokens=num + k + 2)))[0]]
    weights = {name: value.requires_grad_() for name, value in random_weights(True, drafted=VOCAB, seed=8,
               masked=True).items()}  # fmt: skip
    formulas, states = reference(weights, lm), features_of(lm, text, LAYERS)
    ends = range(len(prompt) + 1, len(text) - k, k + 1)  # where a draft begins if all before was accepted
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    for _ in range(600):  # until it is sure of every token: how soon depends on how the processor rounds
        optimizer.zero_grad()
        loss, surest = torch.zeros(()), []
        for end in ends:
            logits = formulas.masked(states[: end - 1], torch.tensor(text[1:end]), k, MASK)
            right = torch.tensor(text[end : end + k])
            loss = loss + torch.nn.functional.cross_entropy(logits, right)
            surest.append(float(logits.detach().softmax(-1).gather(1, right[:, None]).min()))
        if min(surest) > 0.9:
            break
        loss.backward()
        optimizer.step()
    assert min(surest) > 0.9, "it was trained until it knew the text"
    drafter = loaded(lm, head(tmp_path, {name: value.detach() for name, value in weights.items()}))
    [found] = decode(lm, drafter, k, [prompt], params=SamplingParams(max_new_tokens=num))
    stats = found.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens, "acceptance length is k + 1"


BAD = {
    "no mask token": (lambda c, w: c.pop("mask_token_id"), r"has no mask token \(`mask_token_id`\)"),
    "a mask token beyond": (lambda c, w: c.update(mask_token_id=VOCAB), f"mask token .* is `{VOCAB}`, which is none"),
    "no mask state": (lambda c, w: w.pop("mask_hidden"), "lacks the tensor `mask_hidden`"),
    "a part of a layer": (lambda c, w: w.pop("layers.1.mlp.up_proj.weight"), "lacks .*`layers.1.mlp.up_proj.weight`"),
    "another width": (lambda c, w: c.update(target_hidden_size=64), "states of width 64, and .* has 32"),
    "no numbers": (lambda c, w: w["mask_hidden"].fill_(torch.nan), "`mask_hidden` .* not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_sentence(lm, case: str, tmp_path: Path) -> None:
    spoil, said = BAD[case]
    weights = weights_of()
    folder = head(tmp_path, weights)
    config = json.loads((folder / "config.json").read_text())
    spoil(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UsageError, match=said):
        Engine.load(lm.name, str(folder), kv_cache_bytes=1 << 20, check=False)


def test_a_head_without_a_speculators_folder_is_recognized_by_its_mask(lm, tmp_path: Path) -> None:
    weights = weights_of()
    folder = publish(tmp_path / "head", weights, "modelopt", LAYERS, ptd_token_id=MASK, num_hidden_layers=2)
    drafter = loaded(lm, folder)
    assert drafter.one_pass
    states = features_of(lm, TEXT, LAYERS)
    guess = drafter.propose([row(TEXT[:9], states[:8], params=GREEDY)])[0]
    formulas = reference(weights, lm, borrows=True)
    best = formulas.masked(states[:8], torch.tensor(TEXT[1:9]), 4, MASK).argmax(-1)
    assert formulas._ids(best).tolist() == list(guess.drafted.tokens)
