"""A tokenizer's files in a model's folder, and what they lack where transformers cannot load them."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from specdec_cli.errors import RunError
from specdec_cli.libraries import blamed
from specdec_cli.lm.files.reading import first_line

_HINT = "give a model folder that holds `tokenizer.json`"
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
TOKENIZER_FILES = (*VOCABULARIES, "tokenizer_config.json")

_AGAIN = "copy or download the model again"
_NUM_PIECES = 8


def check_tokenizer(name: str, folder: Path, tokenizer: Any) -> None:
    """Refuse a tokenizer without tokens of text, and one that splits text in another way than its own file.

    Raises:
        RunError: it is such a one.
    """
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        lone = next((path.name for path in sorted(folder.glob("*.tiktoken"))), None)
        reason = "" if lone is None else f": transformers reads `{lone}` by the name `tokenizer.model` alone"
        raise RunError(f"the tokenizer of `{name}` is empty but for special tokens{reason}", _HINT)
    from transformers.utils import is_sentencepiece_available

    lone_file = next(iter(sorted(folder.glob("*.model"))), None)
    is_own_code = type(tokenizer).__module__.startswith("transformers_modules")
    if lone_file is None or is_own_code or any((folder / file).is_file() for file in VOCABULARIES):
        return
    if _is_ranks(lone_file):
        _check_ranks(name, lone_file)
    elif is_sentencepiece_available():
        _check_pieces(name, lone_file, tokenizer)


def _check_ranks(name: str, path: Path) -> None:
    """Refuse a tiktoken file without all bytes, which are tokens in each."""
    tokens = {line.split()[0] for line in path.read_bytes().splitlines() if line.strip()}
    if not all(base64.b64encode(bytes([byte])) in tokens for byte in range(256)):
        raise RunError(f"the tokenizer of `{name}`, the tiktoken file `{path.name}`, has not all bytes", _AGAIN)


def _check_pieces(name: str, path: Path, tokenizer: Any) -> None:
    """Refuse a tokenizer that splits some words in another way than its sentencepiece file does."""
    from sentencepiece import SentencePieceProcessor

    try:
        own = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise RunError(
            f"the tokenizer of `{name}`, `{path.name}`, is not a whole sentencepiece file", _AGAIN
        ) from error
    words = (own.id_to_piece(place).partition("▁") for place in range(own.vocab_size()))
    text = " ".join([word for before, mark, word in words if mark and not before and word.isalpha()][:_NUM_PIECES])
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    if pieces != own.encode(text, out_type=str):
        message = f"transformers splits text in another way than the tokenizer of `{name}`, the sentencepiece file"
        hint = f"name its `tokenizer_class` in `tokenizer_config.json`, or {_HINT}"
        raise RunError(f"{message} `{path.name}`", hint)


def _is_ranks(path: Path) -> bool:
    """Whether a file is tiktoken's: a token in base64 and its rank in every line."""
    return re.match(rb"[A-Za-z0-9+/=]+ \d+\s", path.read_bytes()[:512]) is not None


def tokenizer_error(name: str, folder: Path, error: Exception) -> RunError:
    """The package that a tokenizer lacks. transformers tries several, and its error names the last one."""
    lone = next(iter(sorted(folder.glob("*.model"))), None)
    if lone is None or (folder / "tokenizer.json").is_file():
        return RunError(*blamed(f"the tokenizer of `{name}` does not load: {first_line(error)}", _HINT))
    from transformers.utils import is_protobuf_available, is_sentencepiece_available, is_tiktoken_available

    is_ranks = _is_ranks(lone)
    sentencepiece = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    needed = {"tiktoken": is_tiktoken_available()} if is_ranks else sentencepiece
    absent = [package for package, is_here in needed.items() if not is_here]
    kind = "tiktoken" if is_ranks else "sentencepiece"
    if not absent:
        message = f"the tokenizer of `{name}` (`{lone.name}`) does not load: {first_line(error)}"
        return RunError(*blamed(message, _HINT))
    packages = "`, `".join(needed)
    return RunError(
        f"the tokenizer of `{name}` is the {kind} file `{lone.name}`, which takes `{packages}`: `{absent[0]}` is not "
        "installed",
        f"`pip install 'specdec-cli[tokenizers]'`, or {_HINT}",
    )
