"""What is known of a model before its weights are read: limits, end tokens, memory. Nothing large is fetched."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from safetensors import safe_open

from specdec_cli.errors import RunError, SpecdecError
from specdec_cli.lm import dummy
from specdec_cli.lm.checkpoint import (
    check_architecture,
    check_weights,
    clear_errors,
    first_line,
    hub_proxy_words,
    model_folder,
    quiet,
    read_config,
)
from specdec_cli.lm.compiled import check_compiler
from specdec_cli.lm.generation import NONE, read_generation
from specdec_cli.lm.linear import kind_when
from specdec_cli.lm.llama_weights import kept_as, obstacle
from specdec_cli.lm.load import DTYPES, check_compilable, device_named, load_tokenizer
from specdec_cli.lm.packing import weights_of
from specdec_cli.lm.traffic import model_traffic
from specdec_cli.lm.transformers_lm import COMPILED, OBSTACLES, _max_context
from specdec_cli.proxy import exempt_this_machine

_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model by its configuration and its files' headers.

    Args:
        name: what a person calls it.
        architecture: for example `llama`.
        dtype: what it would run in: float32, bfloat16 or float16.
        max_context: its own context limit, in tokens.
        embedding_size: width of its logits, padding included.
        num_parameters: weights, each counted once as the files or the configuration have them.
        weights_bytes: memory for them in `dtype`, or as `--quantize` packs them.
        weights_counted_in: `safetensors headers`, or `configuration` where the weights are not here.
        kv_bytes_per_token: keys and values of one token in all layers.
        eos_token_ids: tokens that end a text.
        is_mixture_of_experts: whether tokens take different weights.
        is_complete: whether the weights are on this machine.
        load_format: auto, or dummy for random weights.
        read_bytes: of weights that a forward of one token reads: an input embedding that is not the output's is
            looked up, and a token takes a share of the experts.
        decoder: whose forward runs it: `own`, or `transformers` and why.
    """

    name: str
    architecture: str
    dtype: str
    max_context: int
    embedding_size: int
    num_parameters: int
    weights_bytes: int
    weights_counted_in: str
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...]
    is_mixture_of_experts: bool
    is_complete: bool
    load_format: str
    read_bytes: int
    decoder: str

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def describe(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    load_format: str = "auto",
    quantize: str = "none",
    device: str = "auto",
    compiled: bool = False,
) -> ModelFacts:
    """Read a model's configuration and headers, and refuse it by name if the engine would.

    Raises:
        UsageError: an architecture that cannot be a target or a draft, or not compiled; int8 on a GPU.
        RunError: no such model, files that are broken, or no compiler.
    """
    folder = small_files(name, revision, trust_remote_code)
    with quiet(), clear_errors(name):
        config = read_config(name, folder, trust_remote_code)
        check_architecture(name, config, trust_remote_code)
        if compiled:
            check_compilable(name, config, _place(device), quantize)
            check_compiler(_place(device))
        is_dummy = dummy.is_dummy(name, load_format)
        is_complete = not is_dummy and _has_weights(name, folder)
        text = config.get_text_config()
        dtype = _dtype(dtype, config, folder if is_complete else None)
        width = getattr(torch, dtype).itemsize
        model = dummy.on_paper(config, getattr(torch, dtype), trust_remote_code)
        found = OBSTACLES[COMPILED] if compiled else obstacle(model, _place(device))
        kind = kind_when(compiled, getattr(torch, dtype), _place(device), quantize)
        packed = weights_of(model, kept_as(kind, found))
        # The files may hold more than the configuration knows of.
        saved = sum(one.num_bytes for one in weights_of(model, "plain")) - sum(one.num_bytes for one in packed)
        counted = _count_in_headers(folder) if is_complete else dummy.num_parameters(model)
        kv_bytes_per_token = _kv_numbers_per_token(text) * width
        return ModelFacts(
            name=name,
            architecture=config.model_type,
            dtype=dtype,
            max_context=_max_context(text, None),
            embedding_size=int(text.vocab_size),
            num_parameters=counted,
            weights_bytes=counted * width - saved,
            weights_counted_in="safetensors headers" if is_complete else "configuration",
            kv_bytes_per_token=kv_bytes_per_token,
            eos_token_ids=() if is_dummy else _eos_token_ids(folder, config),
            is_mixture_of_experts=any((getattr(text, key, None) or 0) > 1 for key in _EXPERTS),
            is_complete=is_complete,
            load_format="dummy" if is_dummy else "auto",
            read_bytes=int(model_traffic(config, packed, kv_bytes_per_token).bytes_moved(1, 0)),
            decoder=_decoder(found),
        )


def describe_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, load_format: str = "auto"
) -> Any:
    """A model's transformers tokenizer, without its weights.

    Raises:
        RunError: there is none, or it is broken.
    """
    folder = small_files(name, revision, trust_remote_code)
    local = name if name.startswith(dummy.PREFIX) else str(folder)
    return load_tokenizer(local, trust_remote_code=trust_remote_code, load_format=load_format)


def small_files(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The folder of a model; of a hub id only the files beside the weights are fetched.

    Raises:
        RunError: no such folder, and no hub that has it.
    """
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) and not Path(name).exists()
    if not is_hub_id:
        return model_folder(name, revision, trust_remote_code)
    patterns = [*_SMALL_FILES, *(["*.py"] if trust_remote_code else [])]
    exempt_this_machine(constants.ENDPOINT)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["original/*", "onnx/*"],
                etag_timeout=5,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except Exception as error:
        raise RunError(
            f"model `{name}` is neither a folder nor in the local hub cache, and no hub could be asked: "
            f"{first_line(error)}",
            f"{hub_proxy_words()}give a local folder, or download the model first",
        ) from error


def _has_weights(name: str, folder: Path) -> bool:
    """Whether the weights are here whole; a local folder must have them, a hub id's may be fetched later.

    Raises:
        RunError: a local folder's are missing or broken.
    """
    try:
        check_weights(name, folder)
    except SpecdecError:
        if name.startswith("builtin:") or Path(name).expanduser().is_dir():
            raise
        return False
    return True


def _weight_files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return [folder / file for file in sorted(set(index["weight_map"].values()))]


def _count_in_headers(folder: Path) -> int:
    """Numbers in the safetensors files, from their headers alone."""
    total = 0
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118 (no mapping)
    return total


def _dtype(wanted: str, config: Any, folder: Path | None) -> str:
    """The dtype it would run in; `auto` is the configuration's, else that of the first weights, else float32."""
    if wanted != "auto":
        return wanted
    given = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if given is None and folder is not None:
        with safe_open(_weight_files(folder)[0], framework="pt") as file:
            given = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(
                file.get_slice(next(iter(file.keys()))).get_dtype()
            )
    name = str(given or "float32").removeprefix("torch.")
    return name if name in DTYPES else "float32"


def _decoder(obstacle: str | None) -> str:
    return "own" if obstacle is None else f"transformers ({obstacle})"


def _place(device: str) -> torch.device:
    """The device by its name, whether it is here or not."""
    return device_named(device) if device == "auto" else torch.device(device)


def _kv_numbers_per_token(config: Any) -> int:
    """Numbers that all layers keep for a token: keys and values of every key head."""
    num_heads = config.num_attention_heads
    # A configuration keeps any key that its file has; only one that its class knows means something.
    is_grouped = hasattr(type(config)(), "num_key_value_heads")
    num_key_heads = (config.num_key_value_heads or num_heads) if is_grouped else num_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        num_key_heads = 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return int(config.num_hidden_layers * 2 * num_key_heads * head_size)


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """Tokens that end a text, by the generation configuration, else by the model's."""
    given = read_generation(folder, NONE).eos_token_ids
    for eos in (
        given or None,
        getattr(config, "eos_token_id", None),
        getattr(config.get_text_config(), "eos_token_id", None),
    ):
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()
