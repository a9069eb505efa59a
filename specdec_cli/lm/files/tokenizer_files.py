"""A tokenizer's files in a model's folder, and what they lack where transformers cannot load them."""

from __future__ import annotations

import re
from pathlib import Path

from transformers.utils import is_protobuf_available, is_sentencepiece_available, is_tiktoken_available

from specdec_cli.errors import RunError
from specdec_cli.lm.files.reading import first_line

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
TOKENIZER_FILES = (*VOCABULARIES, "tokenizer_config.json")


def tokenizer_error(name: str, folder: Path, error: Exception) -> RunError:
    """The package that a tokenizer lacks. transformers tries several, and its error names the last one."""
    hint = "give a model folder that holds `tokenizer.json`"
    lone = next(iter(sorted(folder.glob("*.model"))), None)
    if lone is None or (folder / "tokenizer.json").is_file():
        return RunError(f"the tokenizer of `{name}` does not load: {first_line(error)}", hint)
    is_ranks = re.match(rb"[A-Za-z0-9+/=]+ \d+\s", lone.read_bytes()[:512]) is not None
    sentencepiece = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    needed = {"tiktoken": is_tiktoken_available()} if is_ranks else sentencepiece
    absent = [package for package, is_here in needed.items() if not is_here]
    kind = "tiktoken" if is_ranks else "sentencepiece"
    if not absent:
        return RunError(f"the tokenizer of `{name}` (`{lone.name}`) does not load: {first_line(error)}", hint)
    packages = "`, `".join(needed)
    return RunError(
        f"the tokenizer of `{name}` is the {kind} file `{lone.name}`, which takes `{packages}`: `{absent[0]}` is not "
        "installed",
        f"`pip install 'specdec-cli[tokenizers]'`, or {hint}",
    )
