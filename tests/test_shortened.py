"""Which cases of a test run by default."""

import pytest
from shortened import is_out_of_turn

pytest_plugins = ["pytester"]
ROWS = """
    @pytest.mark.parametrize(("a", "b"), [(1, 1), pytest.param(1, 2, id="named"), (2, 2)])
    def test_it(a, b):
        pass
"""
PAIRS = """
    @pytest.mark.parametrize("a", "xyz")
    @pytest.mark.parametrize("b", [1, 1000, None])
    def test_it(a, b):
        pass
"""


@pytest.mark.parametrize(
    ("mark", "cases", "quick"),
    [
        ("in_turn(0)", ROWS, ["1-1", "2-2"]),
        ("in_turn(1)", ROWS, ["named"]),
        ("in_turn(2, every=3)", ROWS, ["2-2"]),
        ("in_turn(0)", PAIRS, ["1-x", "1-z", "1000-y", "None-x", "None-z"]),
        ("in_turn(2, every=4)", PAIRS, ["1-z", "1000-y", "None-x"]),
        ("gpu", ROWS, ["1-1", "named", "2-2"]),
    ],
)
def test_each_parameter_has_its_turn(mark: str, cases: str, quick: list[str], pytester: pytest.Pytester) -> None:
    items = pytester.getitems(f"    import pytest\n    @pytest.mark.{mark}{cases}")
    assert sorted(item.name for item in items if not is_out_of_turn(item)) == sorted(f"test_it[{one}]" for one in quick)


@pytest.mark.parametrize(("mark", "cases"), [("in_turn(2)", ROWS), ("in_turn(3, every=4)", ROWS)])
def test_a_mark_that_leaves_no_case_is_refused(mark: str, cases: str, pytester: pytest.Pytester) -> None:
    item = pytester.getitems(f"    import pytest\n    @pytest.mark.{mark}{cases}")[0]
    with pytest.raises(AssertionError, match="no case would run"):
        is_out_of_turn(item)
