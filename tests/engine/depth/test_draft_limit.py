"""What a draft with a limit loses of a k or a tree that goes beyond it, and which k are left."""

from types import SimpleNamespace

import pytest
from typed import stand_in

from specdec_cli.drafters import create
from specdec_cli.drafters.fallback import DraftWithFallback
from specdec_cli.engine.depth.draft_limit import check_depth, check_reach, cut_drafts, depths_within
from specdec_cli.errors import UsageError
from specdec_cli.tree_shape import TreeShape

NGRAM = create("ngram", {})


def medusa(num_heads: int = 4):
    made = stand_in(create("medusa", {"model": "heads"}))
    made._sequences = SimpleNamespace(most_tokens=num_heads)
    return made


LIMITED = DraftWithFallback(NGRAM, medusa())
SAYS = "the draft `medusa` drafts at most 4 tokens in a row"


@pytest.mark.parametrize(
    ("k", "tree", "words"),
    [
        (4, None, []),
        (9, None, [f"{SAYS}, and k is 9: its drafts are cut to 4"]),
        (9, "2,2,2", []),
        (5, "2,2,2,2,2", [f"{SAYS}, and the tree `2,2,2,2,2` is 5 deep: its drafts are cut to 4"]),
        (4, "dynamic:32", []),
        (9, "dynamic:32", [f"{SAYS}, and k is 9: its drafts are cut to 4"]),
    ],
)
def test_a_draft_that_is_cut_says_where(k: int, tree: str | None, words: list[str]) -> None:
    shape = None if tree is None else TreeShape.parse(tree)
    assert cut_drafts(medusa(), k, shape) == words
    assert cut_drafts(LIMITED, k, shape) == words  # of two drafts, the one with the limit
    assert cut_drafts(NGRAM, k, shape) == []


def test_every_k_that_is_swept_differs_from_the_one_before_it() -> None:
    assert depths_within(medusa(), 4) == (4, [])
    assert depths_within(medusa(), 8) == (4, [f"k ends at 4, not at 8, because {SAYS}"])
    assert depths_within(NGRAM, 8) == (8, [])
    assert depths_within(LIMITED, 8) == (8, [f"{SAYS}, and k is 8: its drafts are cut to 4"])
    assert DraftWithFallback(medusa(2), medusa(4)).most_depth == 4


def test_what_is_asked_for_by_itself_is_refused_beyond_the_limit() -> None:
    check_reach(medusa(), 4)
    check_reach(LIMITED, 9)
    check_depth(medusa(), TreeShape.parse("2,2,2,2"))
    check_depth(medusa(), TreeShape.parse("dynamic:32"))
    with pytest.raises(UsageError, match=f"{SAYS}, and k is `9`"):
        check_reach(medusa(), 9)
    with pytest.raises(UsageError, match=f"{SAYS}, and the tree `2,2,2,2,2` is `5` deep") as refused:
        check_depth(medusa(), TreeShape.parse("2,2,2,2,2"))
    assert refused.value.hint == "shorten the tree to `2,2,2,2`"
