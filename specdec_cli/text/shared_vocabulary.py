"""The tokens that two tokenizers share by their text, whatever their ids, and what that allows a draft to guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specdec_cli.document import VocabularyResult
from specdec_cli.text.tokenizer import Tokenizer

LEAST_SHARE = 0.1
"""Below this share of a text's tokens, drafting by the shared tokens is refused: nearly every guess would be wrong."""
_ROLES = ("bos_token", "eos_token", "pad_token")
SAMPLE = """\
Once upon a time there was a little girl named Lily. She loved to play in the park with her friends, and every day \
they found something new: a red ball, a lost kitten, a tree that was easy to climb. "Can we take it home?" she asked.

The report describes how speculative decoding reduces latency. In 2022, two groups published the method independently; \
since then, at least 40 papers have improved the draft, the verification rule, or both. Acceptance depends on the \
text: source code and tables are easy to predict, while poetry isn't.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

Dear Ms. Müller, thank you for your e-mail of 3 May. The café on the corner (naïve as that may sound) costs €12.50 \
a month. Let me know what you think 🙂
"""
"""Text by which two tokenizers are compared where no other is at hand: prose, facts, code, accents, an emoji."""


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The tokens of a target's and a draft's tokenizer that add the same bytes to a text.

    Args:
        of_target: ids in the target's vocabulary, ascending, special tokens among them.
        of_draft: the ids of the same tokens in the draft's; none occurs twice.
        special_of_target: from the target's special tokens to the draft's of the same name or role.
        special_of_draft: the other way.
        share_of_target: shared tokens over all of the target's.
        share_of_draft: over all of the draft's.
        share_of_text: of a text's tokens in the target's vocabulary, those that are shared. Drafting by shared tokens
            accepts no more of them.
        draft_tokens_per_token: the draft's tokens for one of the target's, in the same text.
    """

    of_target: tuple[int, ...]
    of_draft: tuple[int, ...]
    special_of_target: Mapping[int, int]
    special_of_draft: Mapping[int, int]
    share_of_target: float
    share_of_draft: float
    share_of_text: float
    draft_tokens_per_token: float

    def __len__(self) -> int:
        """The number of shared tokens."""
        return len(self.of_target)

    def share_of(self, outputs: Iterable[Sequence[int]]) -> float | None:
        """Of the tokens of some outputs, the share that draft and target have in common; None of no tokens."""
        known = set(self.of_target)
        is_shared = [token in known for tokens in outputs for token in tokens]
        return sum(is_shared) / len(is_shared) if is_shared else None

    def result(self, outputs: Iterable[Sequence[int]] = ()) -> VocabularyResult:
        """The part of a document.

        Args:
            outputs: of the target, for the share of their tokens that is shared.
        """
        return VocabularyResult(
            num_shared_by_text=len(self),
            share_of_target=self.share_of_target,
            share_of_draft=self.share_of_draft,
            share_of_text=self.share_of_text,
            share_of_output=self.share_of(outputs),
            draft_tokens_per_token=self.draft_tokens_per_token,
        )

    def __str__(self) -> str:
        """In words."""
        return (
            f"{len(self)} tokens have the same text in both ({100 * self.share_of_target:.1f} % of the target's, "
            f"{100 * self.share_of_draft:.1f} % of the draft's), {100 * self.share_of_text:.1f} % of a sample text's "
            "tokens are among them"
        )


def shared_vocabulary(
    target: Tokenizer, draft: Tokenizer, num_target: int | None = None, num_draft: int | None = None
) -> SharedVocabulary:
    """Find the shared tokens of two tokenizers.

    Args:
        target: the target's.
        draft: the draft's.
        num_target: tokens that the target scores; ids beyond it are not shared. None leaves all.
        num_draft: tokens that the draft scores, likewise.
    """
    num_target, num_draft = num_target or target.num_tokens, num_draft or draft.num_tokens
    first, second = _by_text(target, num_target), _by_text(draft, num_draft)
    special = _special(target, draft, num_target, num_draft)
    pairs = {token: second[text] for text, token in first.items() if text in second}
    pairs |= special
    shared = sorted(pairs.items())
    text, draft_text = target.encode(SAMPLE, False), draft.encode(SAMPLE, False)
    return SharedVocabulary(
        tuple(token for token, _ in shared),
        tuple(token for _, token in shared),
        special,
        {other: token for token, other in special.items()},
        len(pairs) / max(len(target.vocabulary), 1),
        len(pairs) / max(len(draft.vocabulary), 1),
        sum(token in pairs for token in text) / max(len(text), 1),
        len(draft_text) / max(len(text), 1),
    )


def _by_text(tokenizer: Tokenizer, num_tokens: int) -> dict[bytes, int]:
    """Ordinary tokens by what they add to a text; of several the first, a byte of a byte fallback after all others."""
    token_of_text: dict[bytes, int] = {}
    for token in sorted(tokenizer.vocabulary.values()):
        text = tokenizer.added_bytes(token, begins=False) if token < num_tokens else b""
        if text and (
            text not in token_of_text
            or (token_of_text[text] in tokenizer.byte_tokens and token not in tokenizer.byte_tokens)
        ):
            token_of_text[text] = token
    return token_of_text


def _special(target: Tokenizer, draft: Tokenizer, num_target: int, num_draft: int) -> dict[int, int]:
    """The target's special tokens with the draft's of the same name, else of the same role; one-to-one."""
    draft_of_target: dict[int, int] = {}
    names = {token: name for name, token in target.vocabulary.items() if token in target.special_ids}
    same_name = [(token, draft.vocabulary.get(name)) for token, name in sorted(names.items())]
    same_role = [(target.special_token(role), draft.special_token(role)) for role in _ROLES]
    for token, other in (*same_name, *same_role):
        if token is None or other is None or token >= num_target or other >= num_draft:
            continue
        if other in draft.special_ids and token not in draft_of_target and other not in draft_of_target.values():
            draft_of_target[token] = other
    return draft_of_target
