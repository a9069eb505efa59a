"""How byte-level BPE vocabularies cut text before they merge, by the name in a GGUF file's `tokenizer.ggml.pre`.

The names and patterns are llama.cpp's (`src/llama-vocab.cpp`). Patterns are applied one after another, each to the
pieces that the one before left; text between two matches stays a piece. llama.cpp does not tell upper from lower case
beyond ASCII in some of them: its spelling of these is kept, as the file's ids are those that llama.cpp gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LOWER_END = r"[^\r\n\p{L}\p{N}]?(?:(?=\p{L})[^a-z])*(?:(?=\p{L})[^A-Z])+"
_UPPER_BEGINNING = r"[^\r\n\p{L}\p{N}]?(?:(?=\p{L})[^a-z])+(?:(?=\p{L})[^A-Z])*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LOWER_END}|{_UPPER_BEGINNING}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_GPT4O = (
    rf"{_LOWER_END}{_CONTRACTIONS}?|{_UPPER_BEGINNING}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
)
_CHINESE_AND_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_HALVED_SPACES = "|".join(rf"\s{{{2**place}}}(?!\S)" for place in range(9, 1, -1))
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_MARKS = r"\$\+<=>\^~\|"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut.

    Args:
        patterns: regular expressions, applied one after another.
        ignores_merges: a piece that is a token is taken as it is.
        adds_bos: a text begins with the bos token, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignores_merges=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2 megrez stablelm2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((rf"[\p{{P}}{_MARKS}`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("default", PreTokenizer((rf"[\p{{P}}{_MARKS}]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _CHINESE_AND_KANA, _DEEPSEEK3)),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ),
    ("tekken", PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            )
        ),
    ),
    (
        "seed-coder",
        PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_HALVED_SPACES}"
                r"|\s{1,2}(?!\S)|\s{1}",
            )
        ),
    ),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"), ignores_merges=True),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: row for names, row in _ROWS for name in names.split()}
"""By the names that llama.cpp gives them; other names are refused."""
DEFAULT = "default"
"""What a file without a name has."""
