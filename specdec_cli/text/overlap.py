"""Whether two tokenizers are the same, and where they differ. Embedding sizes say nothing: they are padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdec_cli.document import Count, Share, computed

_MAX_DIFFERENCES = 5

PROBES = (
    "Hello world, it's 3.14 times (better)!",
    "def add(a, b):\n    return a + b\n\n\t# done",
    "  two  spaces\r\nÜber naïve café — 你好 здравствуй 🙂",
    "1234567890 http://example.org/?q=1&r=2",
)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of two vocabularies.

    Args:
        equal: every token has the same id in both and the probe texts are cut into the same tokens.
        num_tokens: vocabulary entries of the first and of the second.
        num_shared: tokens with the same id in both.
        share: `num_shared` over the larger vocabulary.
        differences: the first tokens, by id, that differ: token, its id in the first, its id in the second.
        special_differences: roles (`eos_token`, ...) that name different tokens. A chat model often ends with another
            token than its base model; the target's rules are used, so these alone do not make a pair unequal.
        probe_differences: probe texts that are cut into different tokens.
    """

    equal: bool
    num_tokens: tuple[Count, Count]
    num_shared: Count
    share: Share
    differences: tuple[tuple[str, Count | None, Count | None], ...]
    special_differences: tuple[tuple[str, str | None, str | None], ...]
    probe_differences: tuple[str, ...]

    @computed
    def reason(self) -> str:
        """One sentence about the difference, empty when equal."""
        if self.equal:
            return ""
        shared = f"{self.num_shared} tokens ({100 * self.share:.1f} %) have the same id"
        if not self.differences:
            return f"{shared}, but `{self.probe_differences[0]!r}` is cut into different tokens"
        token, first, second = self.differences[0]
        return f"{shared}; for example `{token!r}` is {_place(first)} in one and {_place(second)} in the other"


def _place(token_id: int | None) -> str:
    return "absent" if token_id is None else f"token {token_id}"


def _first_differences(
    first: Mapping[str, int], second: Mapping[str, int]
) -> tuple[tuple[str, int | None, int | None], ...]:
    different = {token for token, _ in first.items() ^ second.items()}
    rows = [(token, first.get(token), second.get(token)) for token in different]
    rows.sort(key=lambda row: (min(i for i in row[1:] if i is not None), row[0]))
    return tuple(rows[:_MAX_DIFFERENCES])


def overlap(
    vocabularies: tuple[Mapping[str, int], Mapping[str, int]],
    special_tokens: tuple[Mapping[str, str], Mapping[str, str]],
    encode: tuple[Callable[[str], list[int]], Callable[[str], list[int]]],
) -> Overlap:
    """Compare two tokenizers by their token-to-id maps, special tokens and the cuts of a few probe texts."""
    first, second = vocabularies
    num_shared = len(first.items() & second.items())
    roles = sorted(set(special_tokens[0]) | set(special_tokens[1]))
    probes = tuple(text for text in PROBES if encode[0](text) != encode[1](text))
    return Overlap(
        equal=num_shared == len(first) == len(second) and not probes,
        num_tokens=(len(first), len(second)),
        num_shared=num_shared,
        share=num_shared / max(len(first), len(second), 1),
        differences=_first_differences(first, second),
        special_differences=tuple(
            (role, special_tokens[0].get(role), special_tokens[1].get(role))
            for role in roles
            if special_tokens[0].get(role) != special_tokens[1].get(role)
        ),
        probe_differences=probes,
    )
