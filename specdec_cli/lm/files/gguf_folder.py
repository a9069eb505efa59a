"""A GGUF file as a model folder: its configuration, tokenizer and end tokens as the files that transformers reads.

transformers translates the metadata; what it leaves out and a forward depends on is added here, and what neither reads
is refused: it would be another model. The weights stay in the GGUF file, to which the folder holds a link.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, modeling_gguf_pytorch_utils
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from specdec_cli.errors import RunError, UsageError, WeightsError
from specdec_cli.lm.files.dummy import on_paper
from specdec_cli.lm.files.gguf_header import ROPE_FACTORS, GgufHeader, header_reader, read_gguf_header
from specdec_cli.lm.files.reading import first_line, quiet, read_object

WEIGHTS = "specdec-weights.gguf"
"""The link to the GGUF file in the folder; a name that no model's folder has."""
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
        _save_tokenizer(name, path, header, folder)
    ends = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = sorted({int(end) for end in ends if end is not None})
    if known:
        _write(folder / "generation_config.json", {"eos_token_id": known})
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
    try:
        with _quick_reader():
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
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
    own, mapping = header.own, GGUF_TO_TRANSFORMERS_MAPPING["config"]
    if header.architecture not in GGUF_SUPPORTED_ARCHITECTURES and config.model_type not in mapping:
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


def _save_tokenizer(name: str, path: Path, header: GgufHeader, folder: Path) -> None:
    """Save the file's tokenizer, where it has one.

    Raises:
        RunError: transformers does not build it.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        tokenizer.save_pretrained(folder)
        _as_in_file(folder, header.num_tokens)
    except Exception as error:
        said = f"the tokenizer of `{name}` (`{kind}`) does not load: {first_line(error)}"
        raise RunError(said, _OTHER) from error


def check_gguf_tensors(name: str, folder: Path, config: Any) -> None:
    """Refuse a GGUF file whose tensors are not those of its configuration, before one of them is read.

    Args:
        name: for messages.
        folder: of the model; nothing is checked of one that is not made from a GGUF file.
        config: of the model.

    Raises:
        WeightsError: a tensor is missing, has another size, or belongs to nothing.
    """
    path = gguf_of(folder)
    if path is None:
        return
    header, outline = read_gguf_header(name, path), on_paper(config, "auto", False)
    if header.architecture not in GGUF_TO_TRANSFORMERS_MAPPING["config"] and not _is_legacy(outline.config):
        return  # read by transformers' newer reader, which names what is missing
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=outline.config.to_dict())
    wanted = {key: tensor.numel() for key, tensor in outline.state_dict().items()}
    places = get_gguf_hf_weights_map(outline, processor)
    found = dict.fromkeys(wanted, 0)
    wrong = []
    for key, tensor in header.tensors.items():
        place = places.get(key) or places.get(key.removesuffix(".weight"))
        if place in found:
            found[place] += tensor.num_numbers
        elif key != ROPE_FACTORS:
            wrong.append(f"`{key}` is not read")
    tied = {**outline.all_tied_weights_keys} if outline.config.get_text_config().tie_word_embeddings else {}
    names = {place: key for key, place in places.items()}
    for place, size in wanted.items():
        if found[place] != size and place not in tied:
            what = "is missing" if not found[place] else "has another shape"
            wrong.insert(0, f"`{names.get(place, place)}` {what}")
    if wrong:
        raise WeightsError(f"the weights of `{name}` do not match its header: {wrong[0]}", _OTHER)


def _is_legacy(config: Any) -> bool:
    return config.model_type in GGUF_TO_TRANSFORMERS_MAPPING["config"]


def _as_in_file(folder: Path, num_tokens: int) -> None:
    """Take out the special tokens that transformers' tokenizer classes add to the file's own.

    They would have ids beyond the model's vocabulary. Read as a class of no family, the tokenizer stays as it is saved.
    """
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    content = read_object(path)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < num_tokens]
    _write(path, content)
    _write(settings, read_object(settings) | {"tokenizer_class": "PreTrainedTokenizerFast"})


@contextmanager
def _quick_reader() -> Iterator[None]:
    """Let transformers read headers without the vocabulary's lists, and dequantize without a bar of its own."""
    with (
        patch("gguf.GGUFReader", header_reader()),
        patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors),
    ):
        yield


def load_gguf(folder: Path, config: Any, how: dict[str, Any]) -> tuple[Any, Any]:
    """The transformers model of a GGUF file in plain numbers, and transformers' report.

    Args:
        folder: made by `gguf_folder`.
        config: of the model.
        how: further arguments for transformers.
    """
    plain = getattr(transformers, "GgufConfig", None)  # later versions can keep the blocks on some devices
    how |= {} if plain is None else {"quantization_config": plain(dequantize=True)}
    with _quick_reader():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, gguf_file=WEIGHTS, local_files_only=True, **how
        )
    return model, report
