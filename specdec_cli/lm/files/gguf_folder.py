"""A GGUF file as a model folder: its configuration, tokenizer and end tokens as the files that transformers reads.

transformers translates the metadata; what it leaves out and a forward depends on is added here, and what neither reads
is refused: it would be another model. The weights stay in the GGUF file, to which the folder holds a link.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import transformers.integrations.gguf

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.gguf_header import GgufHeader, PassedList, read_gguf_header, read_lists
from specdec_cli.lm.files.gguf_tokenizer import GgufTokenizer, UnreadTokenizerError
from specdec_cli.lm.files.reading import first_line, quiet, read_object

WEIGHTS = "specdec-weights.gguf"
"""The link to the GGUF file in the folder; a name that no model's folder has."""
TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_OTHER = "choose the checkpoint with its safetensors"
_ADDED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Entries that some families need and transformers does not translate for them, and the configuration's names."""
_SAME = ("rope.dimension_count", "attention.key_length", "attention.value_length")
"""Entries that must be the size of a head."""
_UNIMPORTANT = {"vocab_size", "tensor_data_layout", "attention.causal", "rope.scaling.finetuned"}
_ROPE = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3.1 to 3.3, but for its factor."""


def gguf_folder(name: str, path: Path) -> Path:
    """The folder of a GGUF file's small files, made once for a process.

    Raises:
        RunError: the file is broken, a package is missing, or it says something that is not read.
        UsageError: transformers does not know the architecture.
    """
    state = path.stat()
    return _made(name, path.absolute(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _made(name: str, path: Path, changed: int, size: int) -> Path:
    """Make the folder, which goes with the process; `changed` and `size` are the file's."""
    header, folder = read_gguf_header(name, path), Path(mkdtemp(prefix="specdec-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with quiet():
        _write(folder / "config.json", _config(name, path, header))
    _write_tokenizer(name, path, header, folder)
    (folder / WEIGHTS).symlink_to(path)
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def gguf_of(folder: Path) -> Path | None:
    """The GGUF file whose folder this is; None for a folder of safetensors."""
    path = folder / WEIGHTS
    return path.resolve() if path.is_symlink() else None


def _config(name: str, path: Path, header: GgufHeader) -> dict[str, Any]:
    """The model's configuration, every entry of the architecture's in it."""
    from transformers import modeling_gguf_pytorch_utils  # takes a third of a second

    try:
        if header.architecture in transformers.integrations.gguf.GGUF_CONFIG_ARCHS:
            entries = {key: getattr(value, "length", value) for key, value in header.metadata.items()}
            given = transformers.integrations.gguf.get_gguf_config(entries, tuple(header.tensors))
        else:
            with patch("gguf.GGUFReader", lambda _: _Fields(header)):
                given = modeling_gguf_pytorch_utils.load_gguf_checkpoint(path)["config"]
        config = transformers.CONFIG_MAPPING[given["model_type"]].from_dict(given)
    except Exception as error:
        if "is not supported" in str(error):
            said = f"transformers does not read architecture `{header.architecture}` of `{name}` from GGUF files"
            raise UsageError(said, _OTHER) from error
        raise RunError(f"the header of `{name}` is no configuration: {first_line(error)}", _OTHER) from error
    _add(name, config, header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        config.vocab_size = embedding.shape[0]
    found: dict[str, Any] = config.to_diff_dict() | {"dtype": header.dtype}
    found.pop("transformers_version", None)
    return found


def _add(name: str, config: Any, header: GgufHeader) -> None:
    """Add what transformers leaves out.

    Raises:
        RunError: the file says something that is not read.
    """
    from transformers import modeling_gguf_pytorch_utils  # takes a third of a second

    own, mapping = header.own, modeling_gguf_pytorch_utils.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    if (
        header.architecture not in modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES
        and config.model_type not in mapping
    ):
        return  # transformers' newer reader, which takes every entry that it knows to matter
    known = mapping.get(header.architecture) or mapping.get(config.model_type) or {}
    read = {key for key, value in known.items() if value is not None} | _UNIMPORTANT
    for key, attribute in _ADDED.items():
        if key in own and key not in read and hasattr(config, attribute):
            setattr(config, attribute, own[key])
            read.add(key)
    sizes = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    read |= {key for key in _SAME if own.get(key) == sizes}
    read |= _add_rope(name, config, header)
    read |= {key for key in ("expert_count", "expert_used_count") if own.get(key) == 0}
    unread = sorted(set(own) - read)
    if unread:
        said = f"`{name}` says `{header.architecture}.{unread[0]}: {own[unread[0]]}`, which is not read"
        raise RunError(said, _OTHER)


def _add_rope(name: str, config: Any, header: GgufHeader) -> set[str]:
    """Add how the file stretches its rotary positions; returns the entries that this takes.

    Raises:
        RunError: by factors that are not Llama 3's.
    """
    own = header.own
    kind = own.get("rope.scaling.type", "linear" if own.get("rope.scaling.factor") else "none")
    given = getattr(config, "rope_parameters", None)
    rope: dict[str, Any] = given if isinstance(given, dict) and "rope_theta" in given else {}
    if header.rope_factors:
        factor = round(max(header.rope_factors), 3)
        wanted = _llama3_factors(2 * len(header.rope_factors), float(rope.get("rope_theta", 1.0)), factor)
        if any(abs(one - other) > 1e-3 * other for one, other in zip(header.rope_factors, wanted, strict=True)):
            raise RunError(f"`{name}` divides its rotary frequencies by factors that are not Llama 3's", _OTHER)
        config.rope_parameters = rope | {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if kind == "none":
        return {"rope.scaling.type"}
    if not rope or header.rope_factors or kind not in ("linear", "yarn"):
        return set()
    scaling = {_ROPE[key]: own[key] for key in _ROPE if key in own}
    config.rope_parameters = rope | scaling | {"rope_type": kind}
    return set(_ROPE)


def _llama3_factors(head_size: int, theta: float, factor: float) -> list[float]:
    """Divisors of frequencies that llama.cpp's converter writes for transformers' `rope_type: llama3`."""
    low, high, original = _LLAMA3.values()
    found = []
    for place in range(0, head_size, 2):
        wavelength = 2 * math.pi * theta ** (place / head_size)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _write_tokenizer(name: str, path: Path, header: GgufHeader, folder: Path) -> None:
    """Write the file's tokenizer, where it has one, and the tokens that end an answer.

    Raises:
        UsageError: it is of a kind that is not read.
        RunError: its lists do not fit each other.
    """
    if header.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return
    try:
        given = GgufTokenizer(read_lists(path))
        given.build().save(str(folder / TOKENIZER), pretty=False)
    except UnreadTokenizerError as error:
        raise UsageError(f"the tokenizer of `{name}` says {error}, which is not read", _OTHER) from error
    except Exception as error:
        said = f"the tokenizer of `{name}` (`{header.metadata['tokenizer.ggml.model']}`) does not load"
        raise RunError(f"{said}: {first_line(error)}", _OTHER) from error
    _write(folder / _SETTINGS, given.settings)
    _write(folder / "generation_config.json", {"eos_token_id": list(given.ends)})


def read_gguf_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder made by `gguf_folder`.

    transformers' own search for it would read the file five times.
    """
    settings = read_object(folder / _SETTINGS)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / TOKENIZER), name_or_path=str(folder), **settings
    )


class _Fields:
    """A header as transformers asks the gguf package's reader for it; that one takes ten seconds for a vocabulary."""

    def __init__(self, header: GgufHeader) -> None:
        self.tensors = [SimpleNamespace(name=name) for name in header.tensors]
        self.fields = {key: _field(value) for key, value in header.metadata.items()}


def _field(value: Any) -> SimpleNamespace:
    """An entry in the package's parts, and their types by ggml's numbers."""
    items = value if isinstance(value, list) else [] if isinstance(value, PassedList) else [value]
    types = {bool: 7, int: 4, float: 6, str: 8}
    kinds = [types[type(items[0])]] if items else []
    parts = [item.encode() if isinstance(item, str) else [item] for item in items]
    return SimpleNamespace(parts=parts, data=range(len(parts)), types=kinds if items == [value] else [9, *kinds])
