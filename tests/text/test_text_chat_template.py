"""A chat template that somebody names: a file or the text itself, with variables of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_engine import letter_tokenizer

from specdec_cli.errors import UsageError
from specdec_cli.text.chat_template import chat_tokenizer, named_template
from specdec_cli.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinks %} on{% else %} off{% endif %}"
USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("name", ["t.jinja", "a b.txt", "{t}.jinja"])
def test_a_file_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + TEMPLATE.encode())
    assert named_template(str(tmp_path / name)) == TEMPLATE


def test_a_file_of_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    assert named_template("~/t.jinja") == TEMPLATE


@pytest.mark.parametrize("text", [TEMPLATE, "{{ messages[0].content }}", "{# " + "x" * 5000 + " #}{{ 1 }}", "a\nb"])
def test_a_text_with_braces_is_the_template_itself(text: str) -> None:
    assert named_template(text) == text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.jinja", "`nowhere.jinja` cannot be read"),
        (".", "cannot be read"),
        ("\n", "is empty"),
        ("a\0b", "cannot"),
    ],
)
def test_what_is_neither_is_refused(given: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        named_template(given)


def test_a_file_that_is_empty_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" ")
    (tmp_path / "bytes").write_bytes(b"\xff{")
    for name, said in [("empty", "is empty"), ("bytes", "not valid UTF-8")]:
        with pytest.raises(UsageError, match=said):
            named_template(str(tmp_path / name))


def test_variables_hold_for_every_conversation_unless_it_sets_them() -> None:
    tokenizer = Tokenizer(letter_tokenizer(), TEMPLATE, {"thinks": True})

    def said(**variables: bool) -> str:
        return tokenizer.decode(tokenizer.chat(USER, variables=variables))

    assert said() == "a on"
    assert said(thinks=False) == "a off"
    assert Tokenizer(letter_tokenizer(), TEMPLATE).chat(USER) == tokenizer.encode("a off", False)
    assert tokenizer.chat_template == TEMPLATE


def test_what_the_template_does_not_read_is_refused_before_a_request() -> None:
    assert chat_tokenizer(letter_tokenizer(), TEMPLATE, {"thinks": 1}).chat_template == TEMPLATE
    for name, said in [("think", "does not read"), ("content", "does not read"), ("tools", "no variable")]:
        with pytest.raises(UsageError, match=f"sets `{name}`, which .*{said}") as refused:
            chat_tokenizer(letter_tokenizer(), TEMPLATE, {name: 1})
        assert said != "does not read" or "the template reads thinks" in str(refused.value.hint)
    with pytest.raises(UsageError, match="does not read"):
        chat_tokenizer(letter_tokenizer(), None, {"thinks": 1})


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{ messages[ }}", "{% nonsense %}"])
def test_a_broken_template_is_refused_when_it_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="the chat template of `--chat-template` is broken: "):
        chat_tokenizer(letter_tokenizer(), text, None)


def test_a_template_that_transformers_alone_knows_parses() -> None:
    text = (
        "{% for m in messages %}{% if m.x %}{% continue %}{% endif %}{% generation %}a{% endgeneration %}{% endfor %}"
    )
    assert chat_tokenizer(letter_tokenizer(), text, None).chat_template == text


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("{{ raise_exception('no') }}", "refuses these messages: no", "in turns"),
        ("{{ messages[0].nothing.at.all }}", "refuses these messages: ", "correct the template"),
        ("{{ messages[0]['content'] + 1 }}", "refuses these messages: can only conc", "cannot take these messages"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refuses these messages: Range too", "cannot take these messages"),
        ("{% if false %}a{% endif %}", "makes no text of these messages", "correct the template"),
    ],
)
def test_the_option_is_blamed_for_its_template(text: str, words: str, hint: str) -> None:
    """Not the model, whose own template nobody reads; and roles are suspected only where the template says so."""
    with pytest.raises(UsageError, match=f"the chat template of `--chat-template` {words}") as refused:
        chat_tokenizer(letter_tokenizer(), text, None).chat(USER)
    assert hint in str(refused.value.hint)
