"""The tokenizer's wrapper: encode, chat, the real vocabulary's size, and whether two tokenizers are the same."""

from __future__ import annotations

import many_tokenizers
import pytest
from many_tokenizers import KINDS, TEXTS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec_cli.errors import UsageError
from specdec_cli.text.printable import printable
from specdec_cli.text.tokenizer import Tokenizer

TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('No system role') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make(
    swap: bool = False, extra: str | None = None, prefix: bool = False, eos: str = "</s>", **options: str
) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap:
        letters[:2] = letters[1::-1]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>", *([extra] if extra else [])])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos, **options))


def test_encode_adds_special_tokens_as_the_tokenizer_does() -> None:
    tokenizer = make()
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 0
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.num_tokens == 258


def test_decode_leaves_out_special_tokens_and_padding() -> None:
    tokenizer = make()
    assert tokenizer.decode([*tokenizer.encode("a b"), 1, 5000]) == "a b"
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "<s>a"


def test_chat_leaves_special_tokens_to_the_template() -> None:
    tokenizer = make(chat_template=TURNS)
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user:hi\nassistant:"
    assert ids.count(0) == 1
    ids = tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert tokenizer.decode(ids) == "user:hi\n"


def test_a_refused_chat_says_why() -> None:
    with pytest.raises(UsageError, match="no chat template") as error:
        make().chat([{"role": "user", "content": "hi"}])
    assert error.value.hint == "use a chat model, or give a template with --chat-template", (
        "also in an answer over HTTP"
    )
    with pytest.raises(UsageError, match="No system role") as error:
        make(chat_template=TURNS).chat([{"role": "system", "content": "be brief"}])
    assert "system role" in (error.value.hint or "")


def test_equal_tokenizers() -> None:
    found = make().compare(make())
    assert found.equal
    assert (found.num_shared, found.share, found.reason) == (258, 1.0, "")


def test_another_end_token_alone_is_reported_but_fits() -> None:
    found = make().compare(make(eos="<s>"))
    assert found.equal
    assert found.special_differences == (("eos_token", "</s>", "<s>"),)


@pytest.mark.parametrize(("other", "shared", "reason"), [
    (make(swap=True), 256, "is token 2 in one and token 3 in the other"),
    (make(extra="<think>"), 258, "`'<think>'` is absent in one and token 258 in the other"),
    (make(prefix=True), 258, "cut into different tokens"),
])  # fmt: skip
def test_tokenizers_that_differ(other: Tokenizer, shared: int, reason: str) -> None:
    found = make().compare(other)
    assert not found.equal
    assert found.num_shared == shared
    assert reason in found.reason


def test_printable_strips_what_acts_on_a_terminal() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x1b]8;;http://a\x1b\\y") == "red xy"
    assert printable("a\rb\x00\x08\x7f\x85\x9b2Jc\x1b(Bd\x1bM") == "abcd"
    assert printable("naïve 你好 🙂👩‍👧") == "naïve 你好 🙂👩‍👧"
    assert "\x1b" not in printable("cut \x1b[3")


@pytest.mark.in_turn(7, every=8)
@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize(
    "text", [*filter(None, TEXTS), "a" * 50, " ", "\n", "\u200b", "e\u0301", "\U0001f642", "<|user|>", "lion "]
)
def test_a_text_that_fits_is_never_found_too_long(kind: str, text: str) -> None:
    """Whatever a tokenizer joins, drops or composes: pieces of a text never count twice the tokens of the whole."""
    tokenizer = many_tokenizers.tokenizer(kind)
    long = text * (40_000 // len(text))
    num_tokens = len(tokenizer.encode(long))
    assert not tokenizer.exceeds(long, num_tokens)
    assert num_tokens < 300 or tokenizer.exceeds(long, num_tokens // 4)
