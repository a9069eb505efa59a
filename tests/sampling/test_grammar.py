import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_engine import letter_tokenizer
from tiny_grammar import byte_tokenizer, letter_tokens

from specdec_cli.drafted import CONTEXT_END, Drafted
from specdec_cli.errors import UsageError
from specdec_cli.sampling.grammar import KINDS, Grammar, GrammarError, Matcher, compile_grammar
from specdec_cli.text.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()
V = TOKENIZER.num_tokens
EOS, END = 0, 1


def start(kind: str, source: str, stop_ids=(EOS,), eos_ids=(EOS,), tokenizer=TOKENIZER) -> Matcher:
    return compile_grammar(kind, source, tokenizer).start(tokenizer.num_tokens, stop_ids, eos_ids)


def letters(text: str) -> list[int]:
    return [TOKENIZER.vocabulary[letter] for letter in text]


def next_texts(matcher: Matcher) -> set[str]:
    return {TOKENIZER.text_of(int(token)) if token > END else f"#{token}" for token in np.flatnonzero(matcher.allowed)}


def complete(kind: str, source: str, text: str) -> bool:
    """Whether a text fits and the grammar accepts or can only end after it."""
    matcher = start(kind, source)
    tokens = TOKENIZER.encode(text, False)
    for token in tokens[:-1]:
        if matcher.is_finished or not matcher.allowed[token]:
            return False
        matcher.accept([token])
    if not matcher.allowed[tokens[-1]]:
        return False
    matcher.accept([tokens[-1]])
    return matcher.is_finished or bool(matcher.allowed[EOS])


def test_the_output_ends_where_the_grammar_accepts_and_nowhere_else() -> None:
    matcher = start("regex", "ab*c?")
    assert next_texts(matcher) == {"a", "ab"}
    assert matcher.accept(letters("a")) == 1
    assert next_texts(matcher) == {"#0", "b", "c"}
    assert matcher.accept(letters("bcb")) == 2, "nothing follows what can only end"
    assert matcher.is_finished


def test_the_models_end_tokens_are_never_text() -> None:
    asked = start("regex", "a+", stop_ids=(END, *letters("a")), eos_ids=(EOS,))
    assert next_texts(asked) == {"a"}, "a stop token that is text stays text"
    assert asked.accept(letters("aa")) == 1, "and ends the output"
    ignored = start("regex", "a+", stop_ids=(), eos_ids=(EOS, END))
    ignored.accept(letters("a"))
    assert next_texts(ignored) == {"a"}


def test_looking_ahead_stops_at_what_does_not_fit_and_leaves_the_place_alone() -> None:
    matcher = start("regex", "ab*c?")
    before = matcher.allowed.copy()
    for drafted, num, is_closed in [
        ("", 0, False), ("b", 0, False), ("abbd", 3, False), ("abb", 3, False), ("abca", 3, True), ("a\0b", 2, True),
    ]:  # fmt: skip
        tokens = [EOS if letter == "\0" else letters(letter)[0] for letter in drafted]
        seen = matcher.look(Drafted.chain(tokens))
        assert seen.fitting == tuple(range(num)), drafted
        assert set(seen.masks) == {CONTEXT_END, *range(num - is_closed)}
        follower = start("regex", "ab*c?")
        for node in sorted(seen.masks):
            follower.accept(tokens[node : node + 1] if node >= 0 else [])
            assert np.array_equal(seen.masks[node], follower.allowed)
    assert np.array_equal(matcher.allowed, before)


def test_looking_ahead_follows_each_path_of_a_tree() -> None:
    """Every node's mask is that of its own path alone, whatever its siblings said."""
    tree = Drafted((*letters("adabcbbc"), EOS), (-1, -1, 0, 0, 0, 2, 3, 3, 6))
    matcher = start("regex", "ab*c?")
    before = matcher.allowed.copy()
    seen = matcher.look(tree)
    assert np.array_equal(matcher.allowed, before)
    # After `a`: `b` and `c` fit, `a` does not; after `ab`: `b` and `c`; after `abb` the text may end.
    assert seen.fitting == (0, 3, 4, 6, 7, 8)
    assert set(seen.masks) == {CONTEXT_END, 0, 3, 6}, "nothing follows `ac`, `abc` and the end"
    for node, mask in seen.masks.items():
        follower = start("regex", "ab*c?")
        follower.accept(tree.tokens_to(node))
        assert np.array_equal(mask, follower.allowed)


def test_an_end_at_which_nothing_stands_ends_without_a_token() -> None:
    matcher = start("choice", '["yes", "no"]', stop_ids=())
    assert matcher.accept(letters("yes")) == 3
    assert matcher.is_finished


@pytest.mark.parametrize("choices", [["yes", "no"], ['a"b', "x\\y", "ü\n", "\0z", "\u2028", "/a/", 'a" | "b', "😀"]])
def test_choices_are_taken_literally(choices: list[str]) -> None:
    source = json.dumps(choices)
    assert all(complete("choice", source, text) for text in choices)
    assert not complete("choice", source, "ab")


def test_every_kind_compiles() -> None:
    sources = {
        "json_object": ("", '{"a":1}', "[1]"),
        "json_schema": ('{"type": "array", "items": {"type": "integer"}}', "[1,22]", '["a"]'),
        "regex": ("[a-c]{3}", "abc", "abd"),
        "choice": ('["x"]', "x", "y"),
        "grammar": ('start: "a" start | "b"', "aaab", "aaa"),
    }
    assert set(sources) == set(KINDS)
    for kind, (source, good, bad) in sources.items():
        assert complete(kind, source, good)
        assert not complete(kind, source, bad)


def test_json_is_compact_unless_whitespace_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert complete("json_schema", json.dumps(schema), '{"a":1}')
    assert not complete("json_schema", json.dumps(schema), '{"a": 1}')
    assert not complete("json_object", "", '{"a": 1}')
    spacious = json.dumps(schema | {"x-guidance": {"whitespace_flexible": True}})
    assert complete("json_schema", spacious, '{"a": 1}')


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "", "only the empty text"),
        ("regex", r"[^\s\S]", "no text matches"),
        ("json_schema", "true", "must be an object"),
        ("json_schema", "[1", "EOF while parsing"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("choice", "x", "not JSON"),
        ("choice", '["a", ""]', "none of them empty"),
        ("choice", "[]", "is an empty list"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
    ],
)
def test_a_bad_source_is_refused_with_its_field_and_llguidances_words(kind: str, source: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        compile_grammar(kind, source, TOKENIZER)
    assert f"`{kind}`" in caught.value.message
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="no kind of grammar `xml`"):
        compile_grammar("xml", "", TOKENIZER)


def test_a_grammar_that_grows_too_costly_ends_in_an_error_of_its_own() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    grammar = compile_grammar("json_schema", json.dumps(schema), TOKENIZER)
    matcher = grammar.start(V, (EOS,))
    seen = matcher.look(Drafted.chain(letters("{")))
    assert (seen.fitting, set(seen.masks)) == ((0,), {CONTEXT_END})
    assert matcher.accept(letters("{abc")) == 1
    assert not matcher.is_finished
    with pytest.raises(GrammarError, match="cannot continue"):
        _ = matcher.allowed
    assert grammar.start(V, (EOS,)).allowed.any(), "another output of the same grammar is not touched"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError) as caught:
        compile_grammar("regex", "a", TOKENIZER)
    assert caught.value.hint == "`pip install 'specdec-cli[structured]'`"


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    slow = SimpleNamespace(backend_tokenizer=None, name_or_path="slow one", get_vocab=dict)
    for tokenizer, name in ((Tokenizer(slow), "slow one"), (Tokenizer(letter_tokenizer()), "TokenizersBackend")):
        with pytest.raises(UsageError, match=f"cannot read the tokenizer of `{name}`"):
            compile_grammar("regex", "a", tokenizer)


def test_a_tokenizer_without_an_end_token_serves_too() -> None:
    tokenizer = letter_tokens()
    matcher = start("regex", "ab*", stop_ids=(), eos_ids=(), tokenizer=tokenizer)
    assert matcher.allowed.tolist() == [True, False, False, False]
    matcher.accept([0])
    assert matcher.allowed.tolist() == [False, True, False, False], "token 0 is text, not an end"


def test_masks_are_as_wide_as_asked() -> None:
    grammar = compile_grammar("regex", "[^x]+", TOKENIZER)
    assert grammar.start(V + 7, ()).allowed[V:].sum() == 0
    assert grammar.start(5, (END, V)).allowed.shape == (5,)


def test_compiling_from_several_threads_gives_grammars_that_do_not_share_a_place() -> None:
    def follow(i: int) -> tuple[Grammar, list[bool]]:
        grammar = compile_grammar("regex", f"a{{{i + 1}}}", TOKENIZER)
        matcher = grammar.start(V, ())
        return grammar, [matcher.accept(letters("a")) == 1 and matcher.is_finished for _ in range(i + 1)]

    with ThreadPoolExecutor(4) as pool:
        for i, (grammar, finished) in enumerate(pool.map(follow, range(16))):
            assert finished == [False] * i + [True]
            assert not grammar.start(V, ()).is_finished
