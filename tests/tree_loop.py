"""A decode loop that drafts trees, batched over draws, on two table models: a target and a draft of its own.

Siblings are sampled without replacement. Planted faults override its parts.
"""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from table_loop import PROMPT, numbered, reference_probs
from typed import not_none

from specdec_cli.drafted import CONTEXT_END, NOTHING, Drafted
from specdec_cli.drafters.contract import Drafter, Guesses
from specdec_cli.engine import verify as verify_module
from specdec_cli.engine.driver import Driver
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.stepper import fit
from specdec_cli.engine.verify import VerifyRow
from specdec_cli.events import SpeculativeCounts, Stepped
from specdec_cli.lm.door import Row
from specdec_cli.measure.audit.chisquare import ChiSquare, chi_square, enumerate_joint
from specdec_cli.measure.audit.table import TableLM
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import ChainRow, distribution, inverse_cdf
from specdec_cli.sampling.noise import Purpose
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import rule_of

LENGTH = 3
ALL = SamplingParams(temperature=1.3, top_k=3, top_p=0.95, frequency_penalty=0.7, presence_penalty=0.2, ignore_eos=True)
TREES = {
    "2,2": (-1, -1, 0, 0, 1, 1),
    "3,1,1": (-1, -1, -1, 0, 1, 2, 3, 4, 5),
    "ragged": (-1, -1, 0, 0, 0, 3, 3),
    "numbered by depth first": (-1, 0, 1, 0, -1, 4, -1),
    "chain": (-1, 0, 1),
}
"""Parents of static trees; nodes whose draft has no token left are left out, with all after them."""


def table_lm(table, kind=TableLM):
    """A model of logits [V, V, V] by the last two tokens."""
    return kind(lambda text: table[text[-2], text[-1]], table.shape[0], order=2)


class TreeLoop:
    """Steps of many draws at once."""

    def __init__(
        self, table, params, mode, parents, num_draws=3_000, grammar=None, is_drawn: bool = True, kind=TableLM
    ) -> None:
        self.table, self.mode, self.parents, self.num_draws = table, mode, parents, num_draws
        self.is_drawn = is_drawn
        self.params = numbered(params, num_draws)
        self.target, self.draft = table_lm(table.p, kind), table_lm(table.q)
        start = None if grammar is None else grammar.start(table.num_tokens, frozenset())
        self.matchers = [None if start is None else start.copy() for _ in range(num_draws)]
        self.num_accepted = self.num_drafted = self.num_steps = 0

    def run(self, length) -> list[tuple[int, ...]]:
        contexts = [list(PROMPT) for _ in range(self.num_draws)]
        wanted = len(PROMPT) + length
        running = list(range(self.num_draws))
        gc.disable()  # many live lists make every collection slow
        try:
            while running:
                self.step(contexts, running)
                running = [i for i in running if len(contexts[i]) < wanted]
        finally:
            gc.enable()
        return [tuple(context[len(PROMPT) : wanted]) for context in contexts]

    def step(self, contexts, running) -> None:
        guesses = self.propose([contexts[i] for i in running], running)
        allowed: list[Any] = [None] * len(running)
        for place, i in enumerate(running):
            if self.matchers[i] is not None:
                guesses[place], allowed[place] = fit(guesses[place], self.matchers[i], place)
        drafted = [guess.drafted for guess in guesses]
        rows = [Row(i, contexts[i], len(d) + 1, d) for i, d in zip(running, drafted, strict=True)]
        chain = [
            ChainRow(self.params[i], contexts[i], len(PROMPT), d, frozenset(), mask)
            for i, d, mask in zip(running, drafted, allowed, strict=True)
        ]
        p = distribution(self.target.score(rows), chain, self.table.num_tokens)
        verify_rows = [
            VerifyRow(rule_of(self.mode, self.params[i].temperature), self.params[i], len(contexts[i]), guess)
            for i, guess in zip(running, guesses, strict=True)
        ]
        for i, one, verdict in zip(running, drafted, verify_module.verify(p, verify_rows), strict=True):
            assert all(one.parents[b] == a for a, b in zip((CONTEXT_END, *verdict.path), verdict.path, strict=False))
            tokens = [*(one.tokens[node] for node in verdict.path), verdict.own]
            contexts[i] += tokens
            if self.matchers[i] is not None:
                assert self.matchers[i].accept(tokens) == len(tokens)
            self.num_accepted += len(verdict.path)
            self.num_drafted += len(one)
        self.num_steps += len(running)

    def propose(self, contexts, running) -> list[Guesses]:
        """A tree for each row, level by level; the draft samples as the target will, and knows no grammar."""
        seeds, indices = [self.params[i].seed for i in running], [self.params[i].index for i in running]
        uniforms = noise.uniforms_many(seeds, indices, [len(one) for one in contexts], Purpose.DRAFT, len(self.parents))
        tokens = [{} for _ in running]
        q = [{} for _ in running]
        for parent in [CONTEXT_END, *range(len(self.parents))]:
            children = [node for node, its in enumerate(self.parents) if its == parent]
            rows = [r for r in range(len(running)) if parent == CONTEXT_END or parent in tokens[r]]
            if not children or not rows:
                continue
            texts = [[*contexts[r], *self.path(tokens[r], parent)] for r in rows]
            given = distribution(
                self.draft.score([Row(r, text, 1) for r, text in zip(rows, texts, strict=True)]),
                [
                    ChainRow(self.params[running[r]], t, len(PROMPT), NOTHING, frozenset())
                    for r, t in zip(rows, texts, strict=True)
                ],
                self.table.num_tokens,
            ).probs
            weights = not_none(given).clone()
            for node in children:
                chosen = self.choose(weights, uniforms[rows, node])
                stands = self.stands(weights, chosen)
                for place, token in enumerate(chosen.tolist()):
                    if stands[place]:
                        tokens[rows[place]][node], q[rows[place]][node] = token, not_none(given)[place]
                self.take_out(weights, chosen)
        return [self.guesses(*one) for one in zip(tokens, q, strict=True)]

    def choose(self, weights, uniforms):
        """The next sibling of every row; V where none is left."""
        return inverse_cdf(weights, uniforms) if self.is_drawn else weights.argmax(dim=-1)

    def stands(self, weights, chosen) -> list[bool]:
        """Whether each row's choice becomes a node."""
        drawn = weights.gather(1, chosen[:, None].clamp(max=weights.shape[1] - 1))[:, 0]
        return ((chosen < weights.shape[1]) & (drawn > 0)).tolist()

    def take_out(self, weights, chosen) -> None:
        """Siblings are sampled without replacement."""
        weights.scatter_(1, chosen[:, None].clamp(max=weights.shape[1] - 1), 0.0)

    def path(self, tokens, node):
        return [] if node == CONTEXT_END else [*self.path(tokens, self.parents[node]), tokens[node]]

    def guesses(self, tokens, q) -> Guesses:
        kept = sorted(tokens)
        number = {CONTEXT_END: CONTEXT_END} | {node: i for i, node in enumerate(kept)}
        drafted = Drafted(tuple(tokens[node] for node in kept), tuple(number[self.parents[node]] for node in kept))
        return Guesses(drafted, torch.stack([q[node] for node in kept]) if kept and self.is_drawn else None)


def masked_probs(table, params, context, allowed_after=None) -> np.ndarray:
    """The target's p after a context, plain numpy, with a grammar's mask."""
    output = context[len(PROMPT) :]
    logits = table.p[context[-2], context[-1]].astype(np.float64)
    if allowed_after is not None:
        logits = np.where(np.isin(np.arange(len(logits)), allowed_after(output)), logits, -1e9)
    return reference_probs(logits, params, PROMPT, output)


def measured_tree(loop: TreeLoop, params, length=3, allowed_after=None) -> ChiSquare:
    joint = enumerate_joint(lambda text: masked_probs(loop.table, params, text, allowed_after), PROMPT, length)
    return chi_square(Counter(loop.run(length)), joint)


def sampled_p_value(
    table: Any, drafter: Drafter, params: SamplingParams, num: int, verify: str, tree: str | None
) -> tuple[float, float]:
    """How likely so many sampled texts are by the target's table, and tokens per step; drafts are two deep."""
    options = EngineOptions(num_speculative_tokens=2, tree=tree, verify=verify, max_num_seqs=256)
    counts, length = drawn(Engine(table_lm(table.p), drafter, options=options), params, num)
    joint = enumerate_joint(lambda text: masked_probs(table, params, text), PROMPT, LENGTH)
    return chi_square(counts, joint).p_value, length


def drawn(one: Engine, params: SamplingParams, num: int, **wishes: Any) -> tuple[Counter[tuple[int, ...]], float]:
    """The first tokens of so many requests, and tokens per step."""
    longest = replace(params, max_new_tokens=LENGTH + 4)  # so that the first steps draft the whole tree
    counts, found = SpeculativeCounts(), Counter[tuple[int, ...]]()
    with Driver(one) as driver:
        tokens: dict[int, list[int]] = {
            driver.add(list(PROMPT), replace(longest, index=i), **wishes): [] for i in range(num)
        }
        for events in driver.steps():
            for emitted in [emitted for event in events if isinstance(event, Stepped) for emitted in event.emitted]:
                counts.add(emitted)
                its = tokens[emitted.sequence_id]
                its += emitted.tokens
                if len(its) >= LENGTH:
                    driver.abort(emitted.sequence_id)
                    found[tuple(its[:LENGTH])] += 1
    assert bool(counts.drafted_trees) == (one.options.tree is not None)
    assert found.total() == num
    return found, counts.acceptance_length or 1.0
