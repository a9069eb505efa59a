"""A GGUF file as a model folder: its configuration, tokenizer and end tokens as the files that transformers reads.

transformers translates the metadata; what it leaves out and a forward depends on is added here, and what neither reads
is refused: it would be another model. The weights stay in the GGUF file or its parts, to which the folder holds links.
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

from tokenizers import Tokenizer

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.backend_tokenizer import BackendTokenizer
from specdec_cli.lm.files.contents import check_gguf
from specdec_cli.lm.files.gguf_header import GgufHeader, PassedList, read_lists
from specdec_cli.lm.files.gguf_split import gguf_parts, read_model_header
from specdec_cli.lm.files.gguf_tokenizer import GgufTokenizer, UnreadTokenizerError
from specdec_cli.lm.files.names import GENERATION_FILE
from specdec_cli.lm.files.plain_config import CONFIGS, PlainConfig
from specdec_cli.lm.files.reading import MOST_PARTS, first_line, quiet, read_object

WEIGHTS = "specdec-weights.gguf"
"""The link to the GGUF file, or the first part, in the folder; a name that no model's folder has."""
_PARTS = "specdec-weights-?????.gguf"  # links to further parts
TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_OTHER = "choose the checkpoint with its safetensors"
_SAMPLING = "general.sampling."
_SAMPLED = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Sampling defaults by their names in a file and in transformers' `generation_config.json`."""
_ADDED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Entries that some families need and transformers does not translate for them, and the configuration's names."""
_WINDOW = "attention.sliding_window"
_LLAMA = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Entries of Llama and families like it, and transformers' names for them."""
_OPTIONAL = {"vocab_size", "rope.dimension_count", "attention.key_length"}
_EXPERTS, _TAKEN = "expert_count", "expert_used_count"
_MIXTURES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("mixtral", {_EXPERTS: "num_local_experts", "rope.dimension_count": "head_dim"}, {}),
    "olmoe": ("olmoe", {_EXPERTS: "num_experts"}, {"norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", {_EXPERTS: "num_experts", "attention.key_length": "head_dim"}, {"norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", {_EXPERTS: "num_local_experts", "expert_feed_forward_length": "intermediate_size"}, {}),
}
"""Mixtures of experts: transformers' name, entries beside Llama's, and what llama.cpp knows of the architecture."""
_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Tokens by their names in a file and in a configuration."""
_SAME = ("rope.dimension_count", "attention.key_length", "attention.value_length")
"""Entries that must be the size of a head."""
_NEEDED = {"context_length": 2, "embedding_length": 1, "block_count": 1, "attention.head_count": 1}
_LEAST = _NEEDED | {"attention.head_count_kv": 1, "feed_forward_length": 1, "attention.key_length": 1}
_LEAST |= {_EXPERTS: 0, _TAKEN: 0, "expert_feed_forward_length": 1}
"""Numbers without which transformers would take those of another model, and the least value of each."""
_OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Entries that have a number for each layer in some families."""
_ABOVE_ZERO = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base")
_MOST = (1 << 31) - 1
_UNIMPORTANT = {"vocab_size", "tensor_data_layout", "attention.causal", "rope.scaling.finetuned"}
_ROPE = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3.1 to 3.3, but for its factor."""

_built: dict[Path, Tokenizer] = {}
"""Tokenizers by the folders that they were built for: to write one into a file and read it takes as long."""


def gguf_folder(name: str, path: Path) -> Path:
    """The folder of a GGUF file's small files, made once for a process.

    Raises:
        RunError: the file is broken, a package is missing, or it says something that is not read.
        UsageError: it holds no causal LM, or one of an architecture that transformers does not know.
    """
    paths = gguf_parts(name, path.absolute())
    return _made(name, paths, tuple((part.stat().st_mtime_ns, part.stat().st_size) for part in paths))


@lru_cache(maxsize=16)
def _made(name: str, paths: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> Path:
    """Make the folder, which goes with the process; `states` tell replaced files from those before."""
    header = read_model_header(name, paths)
    check_gguf(name, header)
    folder = Path(mkdtemp(prefix="specdec-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write(folder / "config.json", _config(name, paths[0], header))
    ends = _write_tokenizer(name, paths[0], header, folder)
    _write(folder / GENERATION_FILE, _sampling(header) | {"eos_token_id": ends})
    for place, path in enumerate(paths):
        (folder / (WEIGHTS if place == 0 else _PARTS.replace("?????", f"{place + 1:05d}"))).symlink_to(path)
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def gguf_links(folder: Path) -> list[str]:
    """The links in a folder to the GGUF files that it was made for, in order; none in a folder of safetensors."""
    if not (folder / WEIGHTS).is_symlink():
        return []
    return [WEIGHTS, *sorted(path.name for path in folder.glob(_PARTS))]


def gguf_source(folder: Path) -> Path | None:
    """The GGUF file that a folder was made for, or its first part, as it was named; None for other folders."""
    path = folder / WEIGHTS
    while path.name == WEIGHTS:  # an adapter's folder links to that of its base model
        if not path.is_symlink():
            return None
        path = path.readlink()
    return path


def gguf_header_of(name: str, folder: Path) -> GgufHeader | None:
    """The header of the GGUF model whose folder this is; None for a folder of safetensors.

    Raises:
        RunError: a file was changed, and is broken now.
    """
    paths = [(folder / link).resolve() for link in gguf_links(folder)]
    return read_model_header(name, paths) if paths else None


def _config(name: str, path: Path, header: GgufHeader) -> dict[str, Any]:
    """The model's configuration, every entry of the architecture's in it."""
    _check_numbers(name, header)
    config = _mixture_config(name, header) or _llama_config(header) or _transformers_config(name, path, header)
    _add(name, config, header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        config.vocab_size = embedding.shape[0]
    own = config.to_dict() if isinstance(config, PlainConfig) else config.to_diff_dict()
    content: dict[str, Any] = own | {"dtype": header.dtype}
    content.pop("transformers_version", None)
    return content


def _llama_config(header: GgufHeader) -> PlainConfig | None:
    """The configuration of Llama or a family like it, as transformers reads it; None of others, and of odd sizes."""
    own, entries = header.own, _llama_entries(header.architecture)
    is_whole = own.keys() >= entries.keys() - _OPTIONAL and "token_embd.weight" in header.tensors
    if header.architecture not in CONFIGS or not is_whole or _WINDOW in own:
        return None
    given = {attribute: own[key] for key, attribute in entries.items() if key in own}
    hidden, heads, key_heads = (given[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if type(heads) is not int or type(key_heads) is not int or hidden % heads or heads % key_heads:
        return None
    tokens = {f"tokenizer.ggml.{key}_token_id": f"{name}_token_id" for key, name in _TOKENS.items()}
    ids = {name: header.metadata[key] for key, name in tokens.items() if key in header.metadata}
    rope = {"rope_theta": given.pop("rope_theta"), "rope_type": "default"}
    more = {"rope_parameters": rope, "hidden_act": "silu", "tie_word_embeddings": "output.weight" not in header.tensors}
    return CONFIGS[header.architecture](**{"head_dim": hidden // heads, **given, **ids, **more})


def _mixture_config(name: str, header: GgufHeader) -> Any:
    """The configuration of a mixture of experts that has names of its own (`gguf_names`); None of others.

    Raises:
        RunError: an entry is missing, or a token takes more experts than there are.
    """
    own, entries = header.own, _mixture_entries(header)
    if entries is None:
        return None
    absent = min(entries.keys() - own.keys() - _OPTIONAL, default=None)
    if absent is not None:
        raise RunError(f"`{name}` does not say its `{header.architecture}.{absent}`", _OTHER)
    if not 1 <= own[_TAKEN] <= own[_EXPERTS]:
        message = f"`{name}` says `{header.architecture}.{_TAKEN}: {own[_TAKEN]}`, and has {own[_EXPERTS]} experts"
        raise RunError(message, _OTHER)
    from transformers import CONFIG_MAPPING

    model_type, _, more = _MIXTURES[header.architecture]
    given = {attribute: own[key] for key, attribute in entries.items() if key in own}
    rope = {"rope_theta": given.pop("rope_theta"), "rope_type": "default"}
    is_tied = "output.weight" not in header.tensors
    return CONFIG_MAPPING[model_type].from_dict(
        given | more | {"rope_parameters": rope, "tie_word_embeddings": is_tied}
    )


def _mixture_entries(header: GgufHeader) -> dict[str, str] | None:
    """Entries of a mixture of experts, and transformers' names for them; None of other files."""
    if header.architecture not in _MIXTURES or not header.own.get(_EXPERTS):
        return None
    return _LLAMA | {_TAKEN: "num_experts_per_tok"} | _MIXTURES[header.architecture][1]


def _llama_entries(architecture: str) -> dict[str, str]:
    """Entries of Llama and families like it, and transformers' names for them."""
    return _LLAMA | ({"rope.dimension_count": "head_dim"} if architecture == "llama" else {})


def _transformers_config(name: str, path: Path, header: GgufHeader) -> Any:
    """The configuration as transformers reads it.

    Raises:
        UsageError: transformers does not know the architecture, or does not read it from several files.
        RunError: the header is not a valid configuration.
    """
    import transformers
    from transformers import modeling_gguf_pytorch_utils  # takes a third of a second
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

    is_newer = header.architecture in GGUF_CONFIG_ARCHS
    if is_newer and len(header.paths) > 1:
        message = f"transformers reads `{header.architecture}` from one GGUF file, and `{name}` is in several"
        raise UsageError(message, "join them: `llama-gguf-split --merge FIRST-PART NEW-FILE`")
    try:
        with quiet():
            if is_newer:
                entries = {key: getattr(value, "length", value) for key, value in header.metadata.items()}
                given = get_gguf_config(entries, tuple(header.tensors))
            else:
                with patch("gguf.GGUFReader", lambda _: _Fields(header)):
                    given = modeling_gguf_pytorch_utils.load_gguf_checkpoint(path)["config"]
            return transformers.CONFIG_MAPPING[given["model_type"]].from_dict(given)
    except MemoryError as error:
        raise RunError(f"model `{name}` does not fit into memory", "choose a smaller model") from error
    except Exception as error:
        if "is not supported" in str(error):
            message = f"transformers does not read architecture `{header.architecture}` of `{name}` from GGUF files"
            raise UsageError(message, _OTHER) from error
        raise RunError(f"the header of `{name}` is not a valid configuration: {first_line(error)}", _OTHER) from error


def _add(name: str, config: Any, header: GgufHeader) -> None:
    """Add what transformers leaves out.

    Raises:
        RunError: the file says something that is not read.
    """
    own, known = header.own, _known_entries(header, config)
    if known is None:
        return
    read = {key for key, value in known.items() if value is not None} | _UNIMPORTANT
    for key, attribute in _ADDED.items():
        if key in own and key not in read and hasattr(config, attribute):
            setattr(config, attribute, own[key])
            read.add(key)
    sizes = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    read |= {key for key in _SAME if own.get(key) == sizes}
    read -= {key for key in _SAME if known.get(key) == "head_dim" and own.get(key) != sizes}
    read |= _add_rope(name, config, header)
    read |= {key for key in (_EXPERTS, _TAKEN) if own.get(key) == 0}
    absent = next((key for key in _NEEDED if known.get(key) is not None and key not in own), None)
    if absent is not None:
        raise RunError(f"`{name}` does not say its `{header.architecture}.{absent}`", _OTHER)
    unread = sorted(set(own) - read)
    if unread:
        message = f"`{name}` says `{header.architecture}.{unread[0]}: {own[unread[0]]}`, which is not read"
        raise RunError(message, _OTHER)


def _known_entries(header: GgufHeader, config: Any) -> dict[str, Any] | None:
    """Entries that the configuration was read from; None for transformers' newer reader, which takes all."""
    architecture, mixture = header.architecture, _mixture_entries(header)
    if mixture is not None:
        return mixture
    if isinstance(config, PlainConfig):
        return _llama_entries(architecture)
    from transformers import modeling_gguf_pytorch_utils  # takes a third of a second

    mapping = modeling_gguf_pytorch_utils.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    if (
        architecture not in modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES
        and config.model_type not in mapping
    ):
        return None
    return mapping.get(architecture) or mapping.get(config.model_type) or {}


def _check_numbers(name: str, header: GgufHeader) -> None:
    """Refuse numbers that no model has.

    Raises:
        RunError: a size that is none or too large, or a number that is not finite.
    """
    for key, value in header.own.items():
        if key in _OF_LAYERS and isinstance(value, list | PassedList):
            continue
        most = MOST_PARTS if "_count" in key else _MOST
        is_wrong = key in _LEAST and (type(value) is not int or not _LEAST[key] <= value <= most)
        is_wrong |= key in _ABOVE_ZERO and (type(value) not in (float, int) or not value > 0)
        if is_wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise RunError(f"`{name}` says `{header.architecture}.{key}: {value}`, which no model has", _OTHER)
    for key, value in header.metadata.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if (is_id and type(value) is not int) or (key == "tokenizer.chat_template" and not isinstance(value, str)):
            raise RunError(f"`{name}` says `{key}: {value}`, which is no {'token' if is_id else 'template'}", _OTHER)


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
        if any(abs(stored - other) > 1e-3 * other for stored, other in zip(header.rope_factors, wanted, strict=True)):
            raise RunError(f"`{name}` divides its rotary frequencies by factors that are not Llama 3's", _OTHER)
        config.rope_parameters = rope | {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if kind == "none":
        return {"rope.scaling.type"}
    if not rope or header.rope_factors or kind not in ("linear", "yarn"):
        return set()
    scaling = {_ROPE[key]: own[key] for key in _ROPE if key in own}
    if kind == "yarn" and header.architecture == "gpt-oss":  # which does not round YaRN's limits; no entry says so
        scaling["truncate"] = False
    config.rope_parameters = rope | scaling | {"rope_type": kind}
    return set(_ROPE)


def _llama3_factors(head_size: int, theta: float, factor: float) -> list[float]:
    """Divisors of frequencies that llama.cpp's converter writes for transformers' `rope_type: llama3`."""
    low, high, original = _LLAMA3.values()
    factors = []
    for place in range(0, head_size, 2):
        wavelength = 2 * math.pi * theta ** (place / head_size)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _sampling(header: GgufHeader) -> dict[str, Any]:
    """The file's sampling defaults by transformers' names; those that have none there keep their own."""
    defaults = {}
    for key, value in header.metadata.items():
        if key.startswith(_SAMPLING):
            # As the converter read it, which writes 32 bits of it; a list is refused as what it says.
            is_usual = isinstance(value, int | str)
            plain = value if is_usual else float(f"{value:.7g}") if isinstance(value, float) else str(value)
            defaults[_SAMPLED.get(key.removeprefix(_SAMPLING), key)] = plain
    return defaults


def _write_tokenizer(name: str, path: Path, header: GgufHeader, folder: Path) -> list[int]:
    """Write the file's tokenizer, where it has one; returns the tokens that end an answer.

    Raises:
        UsageError: it is of a kind that is not read.
        RunError: its lists do not fit each other.
    """
    if header.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return []
    try:
        given = GgufTokenizer(read_lists(path))
        _built[folder] = given.build()
    except UnreadTokenizerError as error:
        raise UsageError(f"the tokenizer of `{name}` says {error}, which is not read", _OTHER) from error
    except Exception as error:
        message = f"the tokenizer of `{name}` (`{header.metadata['tokenizer.ggml.model']}`) does not load"
        raise RunError(f"{message}: {first_line(error)}", _OTHER) from error
    _write(folder / _SETTINGS, given.settings)
    return list(given.ends)


def read_gguf_tokenizer(folder: Path) -> BackendTokenizer:
    """The tokenizer of a folder made by `gguf_folder`, or of an adapter's folder that links to one."""
    built, settings = _built.get(folder), read_object(folder / _SETTINGS)
    if built is None:  # an adapter may add tokens
        built = Tokenizer.from_str(_built[(folder / WEIGHTS).readlink().parent].to_str())
    return BackendTokenizer(built, settings, str(gguf_source(folder)), built.get_vocab_size())


def write_gguf_tokenizer(folder: Path) -> None:
    """Put `tokenizer.json` into a folder made by `gguf_folder`, for programs that read it; others stay as they are."""
    if folder in _built:
        _built[folder].save(str(folder / TOKENIZER), pretty=False)


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
