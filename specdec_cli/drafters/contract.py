"""The interface of drafters: what they see and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specdec_cli.drafted import NOTHING, Drafted

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_cli.lm.cache.unread import Unread
    from specdec_cli.lm.door import LM
    from specdec_cli.sampling.params import SamplingParams


@dataclass(slots=True)
class DraftRow:
    """One sequence that wants guesses.

    Args:
        handle: names the sequence; the same for all its steps.
        context: prompt and output so far.
        num_prompt_tokens: how many of them are the prompt.
        k: most tokens to guess, at least 1.
        params: the request's sampling parameters (the draft samples as the target will).
        stop_ids: tokens that end this request (banned while fewer than min_tokens are emitted).
        needs_q: whether tokens drawn by chance have to come with the q that they were drawn from.
        shares_noise: whether the target chooses by noise keyed by position (`Purpose.GUMBEL`), which the draft is to
            choose by as well; otherwise it draws by noise of its own (`Purpose.DRAFT`).
        p_min: stop before a position whose largest q is below this; 0 never stops.
        prediction: tokens that the output is expected to follow, where the request brought them.
        cache_salt: a draft model may share cached tokens with sequences of the same salt; None shares nothing.
    """

    handle: int
    context: list[int]
    num_prompt_tokens: int
    k: int
    params: SamplingParams
    stop_ids: frozenset[int]
    needs_q: bool
    shares_noise: bool
    p_min: float
    prediction: Sequence[int] | None = None
    cache_salt: str | None = None


@dataclass(slots=True)
class Guesses:
    """Drafted tokens of one sequence; `q` [len(drafted), V] float32 is what each node was sampled from.

    `q` is None for a draft without chance (n-gram, an argmax): one-hot, or where the row does not need it.
    Of `unread` tokens the device alone knows which they are: stand-ins are in their places.
    """

    drafted: Drafted = NOTHING
    q: Tensor | None = None
    unread: Unread | None = None

    def read(self) -> Guesses:
        """The same with the tokens themselves; the host may wait for them."""
        if self.unread is None:
            return self
        return Guesses(self.drafted.with_tokens(self.unread.known(self.drafted.tokens)), self.q)


@dataclass(slots=True)
class Resources:
    """Everything that a drafter may use when it is loaded.

    Args:
        load_lm: loads a draft model by name or folder with the recipe's draft settings.
        encode: text to token ids with the target's tokenizer, or None where there is no tokenizer.
        num_tokens: V, the size of the real vocabulary; guesses and q never go beyond it.
    """

    load_lm: Callable[[str], LM]
    encode: Callable[[str], list[int]] | None
    num_tokens: int


class Drafter(Protocol):
    """One drafting method. Its file's name is its name in recipes, its dataclass fields are its options there."""

    @property
    def lm(self) -> LM | None:
        """The language model whose distribution its guesses come from, once it is loaded; None without one."""
        ...

    @property
    def max_context(self) -> int | None:
        """Longest context (guesses included) that it can read; None has no limit."""
        ...

    def load(self, resources: Resources) -> None:
        """Make ready; called once before the first `propose`."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> list[Guesses]:
        """Guesses for every row, at most `row.k` each; an empty guess is fine."""
        ...

    def release(self, handle: int) -> None:
        """Forget a sequence."""
        ...


class WithoutModel:
    """Base of drafters without a language model, which read contexts of any length."""

    lm = None
    max_context = None
