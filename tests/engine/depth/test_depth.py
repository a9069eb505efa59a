"""Tables of k by batch size, and the fixed depth."""

from specdec_cli.engine.depth.depth import DecodingRow, Fixed, KSchedule


def test_k_by_batch() -> None:
    table = KSchedule.by_batch(4, ((8, 3), (32, 0)), None)
    assert [table.k(num, None) for num in (1, 7, 8, 31, 32, 99)] == [4, 4, 3, 3, 0, 0]
    assert [table.k(num, 6) for num in (1, 8, 32)] == [6, 3, 0], "a wish holds within the entry"
    assert KSchedule.by_batch(4, ((1, 5),), None).most == 5
    assert [table.has_ended(num) for num in (8, 31, 32, 99)] == [False, False, True, True]
    assert not KSchedule(4, ((8, 0), (32, 2))).has_ended(9), "it goes on later"
    limited = KSchedule.by_batch(4, ((1, 5), (8, 3)), 2)
    assert [limited.k(num, None) for num in (1, 2, 3, 9)] == [5, 5, 0, 0]
    assert Fixed().choose([DecodingRow(0, "model", 3, 9)], True) == [3]
