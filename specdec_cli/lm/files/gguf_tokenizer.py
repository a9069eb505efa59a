"""The tokenizer of a GGUF file, built from the lists that the file holds, with the ids that llama.cpp gives a text.

Two kinds of vocabulary are read: byte-level BPE (`gpt2`, and `gemma4`, whose bytes are tokens of their own), which
merges pairs in the order of a list, and SentencePiece (`llama`), which merges the pair that makes the token with the
best score. Control tokens, the end tokens among them, are cut out of a text first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from specdec_cli.lm.files.gguf_pre_tokenizers import DEFAULT, PRE_TOKENIZERS

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types
_MOST_WORK = 1 << 28  # letters that are compared to find what makes each token
_SPACE = "▁"
_SENTENCEPIECE, _BYTES, _GEMMA4 = "llama", "gpt2", "gemma4"
_IDS = {
    _SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0},
    _BYTES: {"bos": 11, "eos": 11},
    _GEMMA4: {},
}
"""The tokens that llama.cpp assumes where a file names none, by `tokenizer.ggml.model`."""
_WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end an answer whatever the file says of them, as in llama.cpp."""
_FILL_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Likewise those of code that is filled in, by their entry's name; the first that there is counts."""
_FILLS = tuple(
    tuple(form.format(part) for form in ("<|fim_{}|>", "<fim-{}>", "<fim_{}>", "<|code_{}|>", "<|{}|>")) + rest
    for part, rest in (
        ("prefix", ("<｜fim▁begin｜>", "<PRE>", "▁<PRE>")),
        ("suffix", ("<｜fim▁hole｜>", "<SUF>", "▁<SUF>")),
        ("middle", ("<｜fim▁end｜>", "<MID>", "▁<MID>")),
    )
)
"""Tokens around code that is filled in, which are control tokens whatever the file says of them."""
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Control tokens of gpt-oss that are part of a text."""


class UnreadTokenizerError(Exception):
    """A file's tokenizer is of a kind that is not read; the text says which."""


class GgufTokenizer:
    """A file's tokenizer.

    Attributes:
        model: llama.cpp's name of its kind.
        tokens: its texts.
        ends: ids of the tokens that end an answer.
        bos, eos, unknown, padding: ids; None where there is none.

    Raises:
        UnreadTokenizerError: it is of another kind.
        ValueError: its lists do not fit each other.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = str(metadata["tokenizer.ggml.model"])
        if self.model not in _IDS:
            raise UnreadTokenizerError(f"`tokenizer.ggml.model: {self.model}`")
        self._pre = str(self._entry("pre") or DEFAULT)
        if self.model == _BYTES and self._pre not in PRE_TOKENIZERS:
            raise UnreadTokenizerError(f"`tokenizer.ggml.pre: {self._pre}`")
        self.tokens = [text or f"[EMPTY_{place}]" for place, text in enumerate(self._texts("tokens"))]
        self._id_of = {text: place for place, text in enumerate(self.tokens)}
        if len(self._id_of) < len(self.tokens):
            twice = next(text for place, text in enumerate(self.tokens) if self._id_of[text] != place)
            raise ValueError(f"it has the token `{twice}` twice")
        self._kinds = self._numbers("token_type", np.ones(len(self.tokens), int)).tolist()
        self.bos, self.eos, self.unknown, self.padding = map(self._token, ("bos", "eos", "unknown", "padding"))
        if self._pre in _WITHOUT_BOS and self._entry("bos_token_id") is None:
            self.bos = None
        self.ends = tuple(sorted(self._ends()))
        for names in _FILLS:
            self._make_control([next((self._id_of[name] for name in names if name in self._id_of), None)])

    def _entry(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def _texts(self, name: str) -> list[str]:
        texts = self._entry(name)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"its `tokenizer.ggml.{name}` is not a list of texts")
        return texts

    def _numbers(self, name: str, default: Any) -> Any:
        """A number for each token."""
        numbers = self._entry(name)
        if numbers is None:
            return default
        if not isinstance(numbers, np.ndarray):
            raise ValueError(f"its `tokenizer.ggml.{name}` is not a list of numbers")
        if len(numbers) < len(self.tokens):
            raise ValueError(f"its `tokenizer.ggml.{name}` has {len(numbers)} numbers for {len(self.tokens)} tokens")
        return np.asarray(numbers)[: len(self.tokens)]

    def _token(self, name: str) -> int | None:
        """The id of a token by the name of its entry."""
        given, assumed = self._entry(f"{name}_token_id"), _IDS[self.model].get(name)
        token = given if given is not None and 0 <= given < len(self.tokens) else assumed
        return int(token) if token is not None and token < len(self.tokens) else None

    def _ends(self) -> set[int]:
        """Ids of the tokens that end an answer, which become control tokens."""
        fills = [
            next((token for token in (self._token(name), *map(self._id_of.get, texts)) if token is not None), None)
            for name, texts in _FILL_ENDS.items()
        ]
        named = [self._id_of[text] for text in _ENDS if text in self._id_of]
        self._make_control([*fills, *named])
        ends = {
            token for token in (*fills, *named, self.eos, self._token("eot"), self._token("eom")) if token is not None
        }
        for text in _SHOWN:
            if text in self._id_of:
                self._kinds[self._id_of[text]] = _USER_DEFINED
        texts = {self.tokens[token] for token in ends}
        if {"<|return|>", "<|call|>"} <= texts or ({"<|call|>", "<|calls|>"} & texts and "<|flush|>" in texts):
            ends -= self._ordinary("<|end|>", _USER_DEFINED)
        if "<|tool_response>" in texts:
            ends -= self._ordinary("</s>", 1)
        return ends

    def _make_control(self, ids: Sequence[int | None]) -> None:
        for token in ids:
            if token is not None and self._kinds[token] not in (_CONTROL, _USER_DEFINED, _UNKNOWN):
                self._kinds[token] = _CONTROL

    def _ordinary(self, text: str, kind: int) -> set[int]:
        """The token that is an end by its name alone, and in this vocabulary is not."""
        if text not in self._id_of:
            return set()
        self._kinds[self._id_of[text]] = kind
        return {self._id_of[text]}

    def _adds(self, which: str, by_default: bool) -> bool:
        given = self._entry(f"add_{which}_token")
        return by_default if given is None else bool(given)

    @property
    def settings(self) -> dict[str, Any]:
        """Its special tokens and chat template, by transformers' names."""
        ids = {"bos": self.bos, "eos": self.eos, "unk": self.unknown, "pad": self.padding}
        special_tokens: dict[str, Any] = {
            f"{name}_token": self.tokens[token]
            for name, token in ids.items()
            if token is not None and self._is_cut_out(token)
        }
        template = self._metadata.get("tokenizer.chat_template")
        return (
            special_tokens
            | {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
            | ({} if template is None else {"chat_template": template})
        )

    def build(self) -> Tokenizer:
        """The tokenizer as the tokenizers library computes it.

        Raises:
            ValueError: its lists do not fit each other.
        """
        made = {_SENTENCEPIECE: self._of_scores, _BYTES: self._of_bytes, _GEMMA4: self._of_gemma4}[self.model]()
        added = [self._added(place) for place in range(len(self.tokens)) if self._is_cut_out(place)]
        made.add_special_tokens([token for token in added if token.special])
        made.add_tokens([token for token in added if not token.special])
        begins = self._adds("bos", self.model != _BYTES or PRE_TOKENIZERS[self._pre].adds_bos) or self.model == _GEMMA4
        around = [self.bos if begins else None, self.eos if self._adds("eos", False) else None]
        if around != [None, None]:
            made.post_processor = _around(self.tokens, *around)
        return made

    def _is_cut_out(self, place: int) -> bool:
        """Whether a token is found in a text before anything else."""
        return self._kinds[place] in (_UNKNOWN, _CONTROL, _USER_DEFINED)

    def _added(self, place: int) -> AddedToken:
        text, is_special = self.tokens[place], self._kinds[place] != _USER_DEFINED
        name = str(self._metadata.get("general.name", "")).lower()
        is_phi3 = "phi-3" in name or "phi3" in name
        strips = is_phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")
        return AddedToken(text, normalized=False, special=is_special, rstrip=strips)

    def _merges(self) -> list[tuple[str, str]]:
        if self._entry("merges") is None:
            raise ValueError("it has no `tokenizer.ggml.merges`")
        pairs = []
        for line in self._texts("merges"):
            place = line.find(" ", 1)  # a token may begin with a space
            pairs.append((line[:place], line[place + 1 :]))
        return pairs

    def _of_bytes(self) -> Tokenizer:
        """Byte-level BPE."""
        pre = PRE_TOKENIZERS[self._pre]
        made = Tokenizer(models.BPE(self._id_of, self._merges(), ignore_merges=pre.ignores_merges))
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        return made

    def _of_gemma4(self) -> Tokenizer:
        """BPE of whole lines, whose spaces are letters and whose unknown letters are bytes."""
        made = Tokenizer(models.BPE(self._id_of, self._merges(), byte_fallback=True))
        made.normalizer = normalizers.Replace(" ", _SPACE)
        made.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
        made.decoder = _spaces_back(is_stripped=False)
        return made

    def _of_scores(self) -> Tokenizer:
        """SentencePiece's BPE: merges follow from the tokens' scores."""
        unknown = None if self.unknown is None else self.tokens[self.unknown]
        made = Tokenizer(
            models.BPE(self._id_of, list(self._pairs()), byte_fallback=True, unk_token=unknown, fuse_unk=True)
        )
        is_prefixed = self._entry("add_space_prefix") is not False
        changes = [normalizers.Prepend(_SPACE)] if is_prefixed else []
        made.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", _SPACE)])
        made.decoder = _spaces_back(is_stripped=is_prefixed)
        return made

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Pairs of tokens that make a token, the best score first."""
        id_of = self._id_of
        if sum(len(text) ** 2 for text in self.tokens) > _MOST_WORK:
            raise ValueError(f"a token has {max(map(len, self.tokens))} letters")
        for place in np.argsort(-self._numbers("scores", np.zeros(len(self.tokens))), kind="stable"):
            text = self.tokens[place]
            for cut in range(1, len(text)):
                if text[:cut] in id_of and text[cut:] in id_of:
                    yield text[:cut], text[cut:]


def _around(tokens: Sequence[str], begin: int | None, end: int | None) -> TemplateProcessing:
    """Tokens at the beginning and the end of each text."""
    before, after = ([] if token is None else [tokens[token]] for token in (begin, end))
    known = [(tokens[token], token) for token in dict.fromkeys((begin, end)) if token is not None]
    single, other = ([*before, text, *after] for text in ("$A", "$B"))
    return TemplateProcessing(single=single, pair=single + other, special_tokens=known)


def _spaces_back(is_stripped: bool) -> decoders.Sequence:
    """The decoder of tokens with `▁` for spaces and `<0x0A>` for bytes."""
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if is_stripped else parts)
