"""Classic faults of drafts that read the target's states, planted in each of them: the formulas' q gives all away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_draft import KINDS
from head_drafts import CHANCE, LAYERS, TEXT, features_of, loaded, reference
from planted import refused_keys_kept
from tiny_dflash import BlockReference, publish_dflash, random_block_weights
from tiny_engine import letter_tokenizer
from tiny_heads import HIDDEN, publish, random_weights
from tiny_medusa import medusa_logits, publish_medusa, random_medusa_weights
from tiny_models import VOCAB
from tiny_mtp import Reference as MtpReference
from tiny_mtp import make_target
from tiny_pard2 import TAPS, Pard2Reference, publish_pard2
from torch import Tensor

from specdec_cli import drafters
from specdec_cli.drafters.contract import DraftRow, Resources, WithoutFeatures
from specdec_cli.lm.heads.head_module import HeadModule
from specdec_cli.lm.heads.head_sequences import HeadSequences
from specdec_cli.lm.heads.published import PublishedDraft
from specdec_cli.lm.load import load_lm

MASK, DRAFTED = 5, 40
Formula = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
"""From the target's states, a context and what was drafted behind it to the logits [drafted, V or 40] of each depth."""


@dataclass
class Family:
    """A loaded drafter, what the formulas say of it, and the target's ids of what it scores."""

    drafter: Any
    formula: Formula
    ids: Tensor


@dataclass
class Target:
    """The target, its MTP modules and a folder for drafts."""

    lm: Any
    modules: list[dict[str, Tensor]]
    folder: Path

    @property
    def table(self) -> Tensor:
        return self.lm.embed(list(range(VOCAB)))

    @property
    def head(self) -> Tensor:
        return self.lm.head(torch.eye(HIDDEN)).T.clone()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    modules = make_target("llama", folder, 2, num_hidden_layers=6)
    letter_tokenizer().save_pretrained(folder)
    return Target(load_lm(str(folder), block_size=4, max_num_seqs=4, check=False), modules, folder)


def chained(target: Target, folder: Path, form: str) -> Family:
    """An EAGLE head, each token of which is drafted behind its own output."""
    weights = random_weights(form != "eagle", seed=3)
    drafter, formulas = loaded(target.lm, publish(folder, weights, form)), reference(weights, target.lm)

    def formula(states: Tensor, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
        after = torch.tensor(context[1:])
        forced = torch.tensor(list(drafted)).expand(len(after), -1)
        return formulas.draft(states, after, len(drafted), forced)[0][-1]

    return Family(drafter, formula, formulas._ids(torch.arange(VOCAB if form == "eagle" else DRAFTED)))


def masked(target: Target, folder: Path) -> Family:
    weights = random_weights(True, seed=3, layers=2, masked=True)
    drafter = loaded(target.lm, publish(folder, weights, "peagle", LAYERS, mask_token_id=MASK))
    formulas = reference(weights, target.lm)

    def formula(states: Tensor, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
        return formulas.masked(states, torch.tensor(context[1:]), len(drafted), MASK)

    return Family(drafter, formula, formulas._ids(torch.arange(DRAFTED)))


def mtp(target: Target, folder: Path) -> Family:
    drafter = drafters.create("mtp", {})
    target.lm.tap(drafter.taps)
    drafter.load(Resources(lambda _: target.lm, None, VOCAB, target.lm))
    formulas = MtpReference("llama", target.modules, target.table, target.head)

    def formula(states: Tensor, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
        return formulas.draft(states[None, :, 0], torch.tensor([list(context)]), torch.tensor([list(drafted)]))[0]

    return Family(drafter, formula, torch.arange(VOCAB))


def block(target: Target, folder: Path, form: str) -> Family:
    """DFlash, DFlash2 with its selector, and DSpark with its Markov head."""
    is_dspark, drafted = form == "dspark", VOCAB if form == "dflash2" else DRAFTED
    weights = random_block_weights(
        drafted=drafted, seed=3, dspark="vanilla" if is_dspark else None, dflash2=form == "dflash2"
    )
    drafter = loaded(target.lm, publish_dflash(folder, weights, form))
    options = {"from_anchor": True} if is_dspark else {}
    given = BlockReference(weights, target.table, weights.get("lm_head.weight", target.head), options=options)

    def formula(states: Tensor, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
        rows = given.giving(given.states(states, context, [len(context) - 1]))[0]
        return given.logits(rows[: len(drafted)], torch.tensor([context[-1], *drafted[:-1]]))

    return Family(drafter, formula, torch.arange(drafted) + weights.get("d2t", 0))


def pard2(target: Target, folder: Path) -> Family:
    publish_pard2(folder)
    given = Pard2Reference(folder)

    def formula(states: Tensor, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return given.logits(context, states, len(drafted))[:, :VOCAB]

    family = Family(loaded(target.lm, folder), formula, torch.arange(VOCAB))
    assert tuple(family.drafter.taps) == TAPS
    return family


def medusa(target: Target, folder: Path) -> Family:
    weights = random_medusa_weights()
    drafter = loaded(target.lm, publish_medusa(folder, weights))

    def formula(states: Tensor, context: Sequence[int], drafted: Sequence[int]) -> Tensor:
        return medusa_logits(weights, states[-1:, 0])[0, : len(drafted)]

    return Family(drafter, formula, torch.arange(VOCAB))


FAMILIES: dict[str, Callable[[Target, Path], Family]] = {
    "eagle": lambda target, folder: chained(target, folder, "eagle"),
    "eagle3": lambda target, folder: chained(target, folder, "speculators"),
    "p-eagle": masked,
    "mtp": mtp,
    "dflash": lambda target, folder: block(target, folder, "speculators"),
    "dspark": lambda target, folder: block(target, folder, "dspark"),
    "dflash2": lambda target, folder: block(target, folder, "dflash2"),
    "pard2": pard2,
    "medusa": medusa,
}

Change = Callable[[DraftRow, Tensor], DraftRow]


def one_off(row: DraftRow, _: Tensor) -> DraftRow:
    return row if row.features is None else replace(row, features=row.features.roll(1, 0))


def stale(row: DraftRow, refused: Tensor) -> DraftRow:
    """The states of the tokens that were drafted, where others stand now."""
    if row.features is None or not len(refused):
        return row
    return replace(row, features=torch.cat([refused, row.features])[: len(row.features)])


def d2t_as_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PublishedDraft, "target_ids", lambda _, tensors, *__: tensors["d2t"].long())


def embedding_not_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    extend, ahead = HeadModule.extend, HeadSequences.ahead
    monkeypatch.setattr(
        HeadModule, "extend", lambda self, held, text, *more: extend(self, held, [0, *text[:-1]], *more)
    )
    monkeypatch.setattr(
        HeadSequences, "ahead", lambda self, ends: ahead(self, [(one, 0, depth) for one, _, depth in ends])
    )


OF_FEATURES: dict[str, Change] = {"features one position off": one_off, "stale features": stale}
PLANTED = {
    "d2t read as ids": d2t_as_ids,
    "an embedding that is not shifted": embedding_not_shifted,
    "refused keys kept": refused_keys_kept,
}
CANNOT = {
    "d2t read as ids": {"eagle", "mtp", "dflash2", "pard2", "medusa"},  # which score all of the target's tokens
    "an embedding that is not shifted": {"medusa"},  # which reads no tokens, and keeps neither keys nor values
    "refused keys kept": {"medusa"},
}


def is_right(lm: Any, family: Family, change: Change) -> bool:
    """Whether each guess of some rounds is drawn from what the formulas say: of a prompt, all accepted, and refused."""
    states, known, refused, right = features_of(lm, TEXT, family.drafter.taps), 0, torch.empty(0), True
    for end in (9, 11, 12):
        row = DraftRow(0, TEXT[:end], 3, 4, CHANCE, frozenset(), True, False, 0.0, features=states[known : end - 1])
        guess = family.drafter.propose([change(row, refused)])[0]
        known = end - 1
        after = features_of(lm, [*TEXT[:end], *guess.drafted.tokens], family.drafter.taps)
        refused = after[known:-1]
        q = torch.zeros(len(guess.drafted), VOCAB)
        q[:, family.ids] = family.formula(states[:known], TEXT[:end], guess.drafted.tokens).softmax(-1)
        right &= len(q) > 0 and torch.allclose(guess.q, q, atol=1e-3)
    return right


CASES = [
    (name, fault)
    for name in FAMILIES
    for fault in (None, *OF_FEATURES, *PLANTED)
    if name not in CANNOT.get(fault or "", ())
]


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize(("name", "fault"), CASES)
def test_faults_are_caught(
    target: Target, name: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault in PLANTED:
        PLANTED[fault](monkeypatch)
    family = FAMILIES[name](target, tmp_path / "draft")
    change = OF_FEATURES.get(fault or "", lambda row, _: row)
    assert is_right(target.lm, family, change) == (fault is None)


def test_every_draft_that_reads_states_is_here() -> None:
    reading = {name for name, method in drafters.methods().items() if method.taps is not WithoutFeatures.taps}
    assert reading == {*FAMILIES} - {*KINDS}
