"""A decode loop over a table model, batched over draws, and what its output's distribution should be, exactly.

The model is a function from the last two tokens to logits. Draws differ in `index` alone, as rows of one run do.
"""

import gc
from collections import Counter
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch

from specdec_cli.drafted import Drafted
from specdec_cli.drafters.contract import Guesses
from specdec_cli.engine import verify as verify_module
from specdec_cli.engine.verify import VerifyRow
from specdec_cli.measure.audit.chisquare import ChiSquare, chi_square, enumerate_joint
from specdec_cli.sampling import chain, draft
from specdec_cli.sampling.chain import ChainRow
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.verification import RULES, rule_of

PROMPT = (0, 1)


@dataclass(frozen=True)
class Table:
    """Logits [V, V, V] of target and draft by the last two tokens."""

    p: np.ndarray
    q: np.ndarray

    @classmethod
    def random(cls, num_tokens=5, seed=0, sharpness=1.5, disagreement=1.0):
        rng = np.random.default_rng(seed)
        p = sharpness * rng.standard_normal((num_tokens,) * 3)
        return cls(p, p + disagreement * rng.standard_normal(p.shape))

    @property
    def num_tokens(self):
        return self.p.shape[0]

    @property
    def token_ids(self):
        return range(self.num_tokens)


def numbered(params: SamplingParams, num: int) -> list[SamplingParams]:
    """The parameters of so many draws; `replace` would check each of them, which takes ten times as long."""
    made = [copy(params) for _ in range(num)]
    for i, one in enumerate(made):
        object.__setattr__(one, "index", i)
    return made


def reference_probs(logits, params, prompt, output):
    """The chain as EXACTNESS.md tells it, one row, plain numpy."""
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * count
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    x = x / params.temperature
    if params.top_k is not None:
        x[np.argsort(-x, kind="stable")[params.top_k :]] = -np.inf
    if params.top_p < 1:
        probs = softmax(x)
        order = np.argsort(-probs, kind="stable")
        held = np.cumsum(probs[order])
        x[order[int(np.searchsorted(held, params.top_p)) + 1 :]] = -np.inf
    probs = softmax(x)
    x[probs < params.min_p * probs.max()] = -np.inf
    return softmax(x)


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def exact_joint(table, params, length, prompt=PROMPT):
    def probs(context):
        return reference_probs(table.p[context[-2], context[-1]], params, prompt, context[len(prompt) :])

    return enumerate_joint(probs, prompt, length)


class Loop:
    """The engine's step, for many draws at once. Planted faults override its parts."""

    def __init__(self, table, params, mode, k, prompt=PROMPT, num_draws=8_000, without_chance=()) -> None:
        self.table, self.mode, self.prompt, self.num_draws = table, mode, prompt, num_draws
        self.params = numbered(params, num_draws)
        self.k = k if callable(k) else lambda index: k
        self.without_chance = without_chance
        self.num_accepted = self.num_drafted = self.num_steps = 0

    def logits(self, which, last, previous):
        return torch.from_numpy(which[previous, last]).float()

    def distribution(self, logits, rows):
        return chain.distribution(logits, rows, self.table.num_tokens)

    def q_given(self, q, logits):
        """What is handed on as q."""
        return q.dense()

    def keep_drafted(self, token, q_row) -> bool:
        """Whether a token drawn from q stays drafted."""
        return True

    def run(self, length) -> list[list[int]]:
        contexts = [list(self.prompt) for _ in range(self.num_draws)]
        wanted = len(self.prompt) + length
        running = list(range(self.num_draws))
        gc.disable()  # a hundred thousand live lists make every collection slow
        try:
            while running:
                self.step(contexts, running)
                running = [i for i in running if len(contexts[i]) < wanted]
        finally:
            gc.enable()
        return [context[len(self.prompt) : wanted] for context in contexts]

    def step(self, contexts, running) -> None:
        drafted, q_rows = self.propose(contexts, running)
        rows, previous, last = [], [], []
        for i in running:
            rows.append(self.chain_row(contexts[i], i, drafted[i]))
            seen = contexts[i][-2:] + drafted[i]
            previous += seen[:-1]
            last += seen[1:]
        p = self.distribution(self.logits(self.table.p, last, previous), rows)
        guesses = [Guesses(Drafted.chain(drafted[i]), torch.stack(q_rows[i]) if q_rows[i] else None) for i in running]
        verify_rows = [
            VerifyRow(rule_of(self.mode, self.params[i].temperature), self.params[i], len(contexts[i]), g)
            for i, g in zip(running, guesses, strict=True)
        ]
        verdicts = verify_module.verify(p, verify_rows)
        for i, verdict in zip(running, verdicts, strict=True):
            contexts[i] += [*(drafted[i][node] for node in verdict.path), verdict.own]
            self.num_accepted += len(verdict.path)
            self.num_drafted += len(drafted[i])
        self.num_steps += len(running)

    def chain_row(self, context, i, drafted):
        return ChainRow(self.params[i], context, len(self.prompt), Drafted.chain(drafted), frozenset())

    def propose(self, contexts, running):
        drafted = {i: [] for i in running}
        q_rows = {i: [] for i in running}
        drafting = [i for i in running if self.k(i) > 0]
        offset = 0
        while drafting:
            seen = [contexts[i][-2:] + drafted[i] for i in drafting]
            logits = self.logits(self.table.q, [s[-1] for s in seen], [s[-2] for s in seen])
            q = self.distribution(logits, [self.chain_row(contexts[i] + drafted[i], i, []) for i in drafting])
            shared = RULES[self.mode].shares_noise
            wanted = [
                draft.ChildrenWanted(self.params[i], 1, len(contexts[i]), offset, offset, shares_noise=shared)
                for i in drafting
            ]
            tokens = [token for (token,) in draft.draft_children(q, wanted)]
            given = self.q_given(q, logits)
            likeliest = q.argmax.tolist()
            going = []
            for row, i in enumerate(drafting):
                by_chance = i % 4 not in self.without_chance
                token = tokens[row] if by_chance else likeliest[row]
                if not self.keep_drafted(token, given[row]):
                    continue
                drafted[i].append(token)
                if by_chance:
                    q_rows[i].append(given[row])
                if len(drafted[i]) < self.k(i):
                    going.append(i)
            drafting, offset = going, offset + 1
        return drafted, q_rows


def measured(loop: Loop, params, length) -> ChiSquare:
    counts = Counter(map(tuple, loop.run(length)))
    return chi_square(counts, exact_joint(loop.table, params, length, loop.prompt))
