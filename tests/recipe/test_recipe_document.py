from typing import Any

import pytest

from specdec_cli.recipe.document import MAX_BYTES, Mark, plain_value, read_document
from specdec_cli.recipe.problems import RecipeError


def problems(text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    try:
        return [str(problem) for problem in read_document(data, "r.yaml").problems]
    except RecipeError as error:
        return [str(problem) for problem in error.problems]


def test_values_and_their_places() -> None:
    document = read_document(b"a:\n  b: 1\n  c: [x, 2.5]\n", "r.yaml")
    assert document.value == {"a": {"b": 1, "c": ["x", 2.5]}}
    assert document.keys["a", "b"] == Mark(2, 3)
    assert document.values["a", "b"] == Mark(2, 6)
    assert document.values["a", "c", 1] == Mark(3, 10)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("true", True), ("False", False),
        ("12", 12), ("-3", -3), ("1.5", 1.5), ("1e-3", 1e-3), (".5", 0.5), ("1.", 1.0), ("-.inf", float("-inf")),
        ("no", "no"), ("on", "on"), ("yes", "yes"), ("010", "010"), ("0x10", "0x10"), ("1_000", "1_000"),
        ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("1" * 5000, "1" * 5000), ("e5", "e5"),
    ],
)  # fmt: skip
def test_plain_scalars_mean_what_they_look_like(text: str, value: Any) -> None:
    assert plain_value(text) == value
    assert type(plain_value(text)) is type(value)


def test_quoted_scalars_stay_text() -> None:
    assert read_document(b"a: \"1\"\nb: 'true'\nc: |\n  12\n", "r").value == {"a": "1", "b": "true", "c": "12\n"}


@pytest.mark.parametrize(
    ("text", "where", "word"),
    [
        ("a: &x 1\n", "r.yaml:1:4", "anchor `&x`"),
        ("a: &x 1\nb: *x\n", "r.yaml:2:4", "alias `*x`"),
        ("a: !!python/object:os.system x\n", "r.yaml:1:4", "tag"),
        ("a: !custom {b: 1}\n", "r.yaml:1:4", "tag"),
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3:1", "duplicate key `a`, first in line 1"),
        ("a: {b: 1, b: 2}\n", "r.yaml:1:11", "duplicate key `b`"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1", "one YAML document"),
        ("- a\n- b\n", "r.yaml:1:1", "mapping of sections"),
        ("just text\n", "r.yaml:1:1", "mapping of sections"),
        ("", "r.yaml:1:1", "empty"),
        ("# only a comment\n", "r.yaml:1:1", "empty"),
        ("a:\n\tb: 1\n", "r.yaml:2:1", "tab"),
        ("a: [1, 2\nb: 3\n", "r.yaml:2:", "not YAML"),
        ("a: b: c\n", "r.yaml:1:", "not YAML"),
        ("a: 'open\n", "r.yaml:", "not YAML"),
        ("? [a, b]\n: 1\n", "r.yaml:1:3", "a key is a plain word"),
        ("*x : 1\n", "r.yaml:1:1", "a key is a plain word"),
        ("a: " + "[" * 500 + "]" * 500, "r.yaml:1:", "nested deeper"),
        (b"a: 1\nb: \xff\n", "r.yaml:2:4", "`0xff` is not UTF-8"),
        (b"a: 1\nb: \x00\n", "r.yaml:2:4", "control character `U+0000`"),
        ("a: \x1b[31m\n", "r.yaml:1:4", "control character `U+001B`"),
    ],
)  # fmt: skip
def test_refused_with_its_place(text: str | bytes, where: str, word: str) -> None:
    found = problems(text)
    assert any(problem.startswith(where) and word in problem for problem in found), found


def test_everything_refused_is_reported_at_once() -> None:
    found = problems("a: &x 1\nb: *x\na: 2\nc: !t 3\n")
    assert [problem.split(": ")[0] for problem in found] == ["r.yaml:1:4", "r.yaml:2:4", "r.yaml:3:1", "r.yaml:4:4"]


def test_a_bomb_of_aliases_does_not_expand() -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert any("alias" in problem for problem in problems("l0: &l0 lol\n" + levels))


def test_a_huge_file_is_refused() -> None:
    assert "larger than 1 MiB" in problems(b"#" * (MAX_BYTES + 1))[0]


def test_a_byte_order_mark_is_no_key() -> None:
    assert read_document(b"\xef\xbb\xbfa: 1\n", "r").value == {"a": 1}
