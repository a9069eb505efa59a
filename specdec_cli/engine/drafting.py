"""The drafters of an engine, by name: which one guesses for a row, and what happens when it fails.

If a drafter raises, its rows lose their guesses, not their output: they decode plain in that step, and to their end if
the drafter reads features of the target. A notice appears once for each kind of error. After three consecutive failures
the drafter is disabled, with another notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_cli import drafters
from specdec_cli.drafters.contract import Drafter, DraftRow, DraftsOnDevice, Guesses
from specdec_cli.errors import RunError, UsageError
from specdec_cli.events import Noticed
from specdec_cli.lm.door import Tap
from specdec_cli.sampling.chain import LogitsError

NONE, PREDICTION = "none", "prediction"
_MOST_FAILURES = 3


class Drafters:
    """An engine's own drafter and others beside it; loaded already.

    Args:
        own: the one for requests that name none.
        others: by the names that requests give.
        num_tokens: V, the real vocabulary.

    Attributes:
        by_name: every drafter; the own one under its method's name.
        own_name: the own one's name.
        num_failures: failed steps of each drafter so far.
        switched_off: names of drafters that are asked no more.
        notices: that have not been reported yet.
    """

    def __init__(self, own: Drafter, others: Mapping[str, Drafter], num_tokens: int) -> None:
        self.own_name = drafters.method_of(own)
        assert not {self.own_name, NONE} & others.keys(), "each drafter has a name of its own"
        self.by_name: dict[str, Drafter] = {self.own_name: own, **others}
        self.num_failures = dict.fromkeys(self.by_name, 0)
        self.switched_off: set[str] = set()
        self.notices: list[Noticed] = []
        self._num_tokens = num_tokens
        self._in_a_row = dict.fromkeys(self.by_name, 0)
        self._reported: set[tuple[str, type[Exception]]] = set()
        self._left_out: set[int] = set()

    def name(self, draft: str | None, prediction: Sequence[int] | None) -> str:
        """The drafter that a request gets: the one it names, `prediction` if it brings one, else the engine's own.

        Raises:
            UsageError: there is none of that name, or it does not read the prediction.
        """
        name = draft or (self.own_name if prediction is None else PREDICTION)
        if name != NONE and name not in self.by_name:
            raise UsageError(f"there is no draft `{name}` here", f"one of {', '.join({*self.by_name, NONE})}")
        if prediction is not None and name != PREDICTION:
            raise UsageError(f"the draft `{name}` reads no prediction", "leave the draft or the prediction out")
        return name

    def max_context(self, name: str) -> int | None:
        """Longest context that a drafter reads; None has no limit."""
        return None if name == NONE else self.by_name[name].max_context

    def check_tree(self, name: str) -> None:
        """Refuse a tree from a drafter that guesses chains.

        Raises:
            UsageError: it builds no trees.
        """
        if name == NONE or not self.by_name[name].builds_trees:
            raise UsageError(f"the draft `{name}` builds no trees", "leave --tree out, or choose another draft")

    @property
    def all_taps(self) -> tuple[Tap, ...]:
        """The target's hidden states that any of them reads."""
        return tuple(dict.fromkeys(tap for drafter in self.by_name.values() for tap in drafter.taps))

    def taps(self, name: str, handle: int) -> Sequence[Tap]:
        """The hidden states that a drafter still reads of a sequence."""
        return () if name == NONE or name in self.switched_off or handle in self._left_out else self.by_name[name].taps

    def adopt(self, name: str, handle: int, context: Sequence[int], salt: str) -> int:
        """How many first tokens of a new sequence its drafter can do without the features of; it gets all others.

        The last token is always fed.
        """
        try:
            return min(self.by_name[name].adopt(handle, context, salt), len(context) - 1)
        except Exception as error:
            self._failed(name, error)
            return 0

    def propose(self, rows: Sequence[tuple[str, DraftRow]]) -> list[Guesses]:
        """Guesses for rows, each by the drafter named beside it; empty where that one fails."""
        guesses = [Guesses() for _ in rows]
        for name in dict.fromkeys(name for name, _ in rows):
            places = [i for i, (its, row) in enumerate(rows) if its == name and row.handle not in self._left_out]
            if name in self.switched_off or not places:
                continue
            for i, guess in zip(places, self._ask(name, [rows[i][1] for i in places]), strict=True):
                guesses[i] = guess
        return guesses

    def on_device(self, name: str) -> DraftsOnDevice | None:
        """The drafter of a name, if it can go on without the host."""
        drafter = self.by_name.get(name)
        return drafter if isinstance(drafter, DraftsOnDevice) else None

    def release(self, handle: int) -> None:
        """Forget a sequence, in every drafter."""
        self._left_out.discard(handle)
        for name in self.by_name:
            self._release(name, handle)

    def clear(self) -> None:
        """Forget what drafters keep of sequences that ended."""
        for name, drafter in self.by_name.items():
            try:
                drafter.clear()
            except Exception as error:
                self._failed(name, error)

    def _ask(self, name: str, rows: Sequence[DraftRow]) -> list[Guesses]:
        try:
            guesses = self.by_name[name].propose(rows)
            self._check(rows, guesses)
        except LogitsError as error:  # of one row alone: the drafter is asked again for the others
            self._failed(name, error, in_a_row=len(rows) == 1)
            failing, others = rows[error.row].handle, [row for i, row in enumerate(rows) if i != error.row]
            self._left_out.add(failing)
            self._release(name, failing)
            guesses = self._ask(name, others) if others else []
            return [*guesses[: error.row], Guesses(), *guesses[error.row :]]
        except Exception as error:
            self._failed(name, error)
            for row in rows:
                self._release(name, row.handle)
            if self.by_name[name].taps:  # it has lost features that no later step brings again
                self._left_out.update(row.handle for row in rows)
            return [Guesses() for _ in rows]
        self._in_a_row[name] = 0
        return guesses

    def _check(self, rows: Sequence[DraftRow], guesses: Sequence[Guesses]) -> None:
        """Refuse guesses that break the drafters' contract, before the target reads them."""
        if len(guesses) != len(rows):
            raise RunError(f"it gave `{len(guesses)}` guesses for `{len(rows)}` rows")
        for row, guess in zip(rows, guesses, strict=True):
            if len(guess.drafted) > row.most_nodes:
                raise RunError(f"it guessed `{len(guess.drafted)}` tokens where `{row.most_nodes}` were wanted")
            if guess.drafted.max_depth > row.k or (row.tree is None and not guess.drafted.is_chain):
                raise RunError(f"it guessed another shape than `{row.tree or 'a chain'}` of depth `{row.k}`")
            if guess.unread is None and not all(0 <= token < self._num_tokens for token in guess.drafted.tokens):
                raise RunError("it guessed a token that does not exist")

    def _failed(self, name: str, error: Exception, in_a_row: bool = True) -> None:
        self.num_failures[name] += 1
        self._in_a_row[name] += in_a_row
        message = f"{type(error).__name__}: {error}".split("\n")[0]
        if (name, type(error)) not in self._reported:
            self._reported.add((name, type(error)))
            self.notices.append(Noticed(None, f"the draft `{name}` failed ({message}): continuing without its guesses"))
        if self._in_a_row[name] >= _MOST_FAILURES:
            self.switched_off.add(name)
            words = f"the draft `{name}` failed {_MOST_FAILURES} times in a row and is disabled"
            self.notices.append(Noticed(None, words))

    def _release(self, name: str, handle: int) -> None:
        try:
            self.by_name[name].release(handle)
        except Exception as error:
            self._failed(name, error)
