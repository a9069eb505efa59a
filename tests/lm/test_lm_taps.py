"""Hidden states beside the logits: transformers' own, of every fed position, and logits with the same bits."""

from pathlib import Path

import pytest
import torch
from tiny_models import EXTRA_FAMILIES, FAMILIES, VOCAB, make_tiny
from transformers import AutoModelForCausalLM
from typed import stand_in

from specdec_cli.drafted import Drafted
from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Row, Tapped
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.recipe.values import Quantize

TEXT = [(11 * i * i + 3 * i) % VOCAB for i in range(60)]
TAPS = (1, 0, "final")
LAYERS = {"num_hidden_layers": 3}
KNOWN = sorted({*FAMILIES, *EXTRA_FAMILIES} - {"phi3_long"})  # which is refused


def layers_of(family):
    return {} if family.startswith("gemma") else LAYERS  # which have three, each of its own kind


def hidden_states(folder, text, dtype=torch.float32):
    """Transformers' own states [tokens, taps, hidden]."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        found = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.stack([found[tap + 1 if isinstance(tap, int) else -1][0] for tap in TAPS], 1)


def tapped(lm, *rows):
    """Logits, and the states of each row with the places that they begin at."""
    for row in rows:
        row.tapped = Tapped()
    logits = lm.score(rows)
    return logits, [(row.tapped.first, row.tapped.states) for row in rows]


@pytest.mark.in_turn(3, every=8)
@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize("family", [*KNOWN])
def test_49_1_states_are_those_of_transformers(family, decoder: str, tmp_path: Path) -> None:
    folder = str(make_tiny(family, tmp_path, **layers_of(family)))
    right = hidden_states(folder, TEXT, torch.float64)
    # float32 takes the same sums in another order on every processor: how far they lead apart is this model's rounding.
    atol = max(1e-5, 8 * float((hidden_states(folder, TEXT) - right).abs().max()))
    right = right.float()
    lm = load_lm(folder, decoder=decoder, check=False, block_size=4)
    if decoder == "auto" and lm.decoder != "own":
        pytest.skip("transformers' forward decodes it, which another test tries")
    lm.tap(stand_in(TAPS))
    assert lm.taps == TAPS

    _, [(first, states)] = tapped(lm, Row(0, TEXT[:17], 0))  # a prompt's chunk
    assert first == 0
    assert torch.allclose(states, right[:17], atol=atol)

    logits, found = tapped(lm, Row(0, TEXT[:30], 1), Row(1, TEXT[:20], 5, Drafted.chain(TEXT[20:24])))
    assert [first for first, _ in found] == [17, 0]
    assert torch.allclose(found[0][1], right[17:30], atol=atol)
    assert torch.allclose(found[1][1], right[:24], atol=atol)
    assert torch.allclose(lm.head(found[1][1][-5:, 2]), logits[1:], atol=atol)

    lm.score([Row(0, TEXT[:30], 1)])  # and again with what is cut back
    _, [(first, states)] = tapped(lm, Row(0, [*TEXT[:25], *TEXT[25:28]], 2))
    assert first == 26
    assert torch.allclose(states, right[26:28], atol=atol)


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
def test_states_of_a_trees_nodes_are_those_of_their_paths(decoder: str, tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path, **LAYERS))
    lm = load_lm(folder, decoder=decoder, check=False)
    lm.tap(stand_in(TAPS))
    tree = Drafted((5, 6, 7, 8), (-1, -1, 0, 1))
    _, [(first, states)] = tapped(lm, Row(0, TEXT[:20], 5, tree))
    assert first == 0
    for node, path in ((2, [5, 7]), (3, [6, 8])):
        assert torch.allclose(states[20 + node], hidden_states(folder, [*TEXT[:20], *path])[-1], atol=1e-4)


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_logits_have_the_same_bits_with_and_without(
    decoder: str, dtype: str, quantize: Quantize, tmp_path: Path
) -> None:
    folder = str(make_tiny("llama", tmp_path, **LAYERS))
    plain, lm = (load_lm(folder, decoder=decoder, dtype=dtype, quantize=quantize, check=False) for _ in range(2))
    lm.tap(stand_in(TAPS))
    for end in (9, 30, 33):
        rows = [Row(0, TEXT[:end], 2), Row(1, TEXT[5:40], 4, Drafted.chain(TEXT[40:43]))]
        expected = plain.score(rows)
        logits, found = tapped(lm, *rows)
        assert torch.equal(logits, expected)
        assert all(states.dtype == lm.dtype for _, states in found)
        head = lm.head(found[1][1][-4:, 2])
        assert torch.allclose(head, logits[2:], atol=0.2 if quantize == "int8" else 1e-4)
        for row in rows:
            row.tapped = None
    assert torch.equal(lm.score(rows[:1]), plain.score(rows[:1])), "a row that wants none, where others might"


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
def test_the_target_lends_its_embedding(decoder: str, tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path))
    right = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight[TEXT[:9]]
    for dtype in ("float32", "bfloat16"):
        lm = load_lm(folder, decoder=decoder, dtype=dtype, check=False)
        assert torch.equal(lm.embed(TEXT[:9]), right.to(lm.dtype))
    assert lm.embed([]).shape == (0, 32)


def test_nothing_is_hooked_where_nobody_asks(tmp_path: Path) -> None:
    lm = load_lm(str(make_tiny("llama", tmp_path)), decoder="transformers", check=False)
    assert not any(module._forward_hooks for module in lm.model.modules())
    lm.tap((0,))
    lm.tap((0, "final"))
    assert lm.taps == (0, "final")
    assert sum(len(module._forward_hooks) for module in lm.model.modules()) == 2


def test_layers_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    for decoder in ("auto", "transformers"):
        lm = load_lm(str(make_tiny("llama", tmp_path)), decoder=decoder, check=False)
        for wrong in (2, -1, "first"):
            with pytest.raises(UsageError, match=f"layer `{wrong}`, and .* has 2 layers"):
                lm.tap(stand_in((0, wrong)))
        assert lm.taps == ()
    with pytest.raises(UsageError, match="has none"):
        TableLM.random(4).tap((0,))


def test_long_rope_is_refused(tmp_path: Path) -> None:
    folder = str(make_tiny("phi3_long", tmp_path))
    with pytest.raises(UsageError, match="once a text outgrows 24 tokens"):
        load_lm(folder, check=False).tap((0,))
