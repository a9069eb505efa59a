"""Load a language model or a tokenizer by name; every way in which that fails ends in one clear sentence."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.lm import dummy
from specdec_cli.lm.attention import NAME
from specdec_cli.lm.door import Row
from specdec_cli.lm.linear import kind_for
from specdec_cli.lm.transformers_lm import KVCacheBytes, TransformersLM

BUILTIN = ("builtin:target", "builtin:draft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Families of encoders that transformers lists among the causal LMs; only `is_decoder` makes one of them causal.
ENCODERS = {"bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"}
ENCODERS |= {"roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def load_lm(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    load_format: str = "auto",
    quantize: str = "none",
    max_num_seqs: int = 8,
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_cache_bytes: KVCacheBytes = None,
    extra_tokens: int = 16,
    decoder: str = "auto",
) -> TransformersLM:
    """Load a causal LM.

    Args:
        name: a local folder, a hub id, or `builtin:target` / `builtin:draft`.
        revision: branch, tag or commit of a hub id.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        device: auto (a GPU where there is one), cpu, cuda or cuda:N.
        trust_remote_code: run Python code that comes with the model.
        load_format: auto (weights from the model's files), or dummy (random ones; no file is read, and nothing ends
            a text).
        quantize: none, or int8 (linear layers, on a CPU).
        max_num_seqs: sequences that the KV cache should have room for.
        max_model_len: a shorter context limit than the model's own, in tokens.
        block_size: tokens in a block of KV cache.
        kv_cache_bytes: most memory for the KV cache, as TransformersLM takes it; None is half of what is free.
        extra_tokens: room beyond the context limit for each sequence.
        decoder: auto (our own where it knows the shape), or transformers.

    Raises:
        UsageError: a wrong option, or an architecture that cannot be a target or a draft.
        RunError: the model does not load.
    """
    has_weights = not dummy.is_dummy(name, load_format)
    target_device, target_dtype = _device(device), _dtype(dtype)
    folder = _model_folder(name, revision, trust_remote_code, has_weights)
    with _quiet(), _clear_errors(name):
        config = _config(name, folder, trust_remote_code)
        _check_architecture(name, config, trust_remote_code)
        if has_weights:
            model = _model(name, folder, config, target_dtype, trust_remote_code)
        else:
            attention = _attention(config)
            model = dummy.build(name, config, target_dtype, target_device, attention, trust_remote_code)
        lm = TransformersLM(
            model.to(target_device).eval(),
            name,
            eos_token_ids=_eos_token_ids(model) if has_weights else (),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            extra_tokens=extra_tokens,
            decoder=decoder,
            kind=kind_for(model.dtype, target_device, quantize),
        )
    if model.config.get_text_config()._attn_implementation != NAME:
        _check_packing(lm)
    return lm


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, load_format: str = "auto"
) -> Any:
    """Load a transformers tokenizer by the name of its model; where the weights are random, one stands in for none.

    Raises:
        RunError: there is none, or it is broken.
    """
    has_weights = not dummy.is_dummy(name, load_format)
    folder = _model_folder(name, revision, trust_remote_code, has_weights)
    hint = "give a model folder that holds `tokenizer.json`"
    if not any((folder / file).exists() for file in _TOKENIZER_FILES) and not list(folder.glob("*.model")):
        with _quiet():
            config = _config(name, folder, trust_remote_code)
        if not has_weights:
            return dummy.stand_in_tokenizer(config)
        raise RunError(f"model `{name}` has no tokenizer", hint)
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            if (folder / "config.json").is_file():  # which transformers reads first; it may be the broken one
                _config(name, folder, trust_remote_code)
            raise _remote_code_error(name, error) or RunError(
                f"the tokenizer of `{name}` does not load: {_first_line(error)}", hint
            ) from error
    if len(tokenizer) == 0:
        raise RunError(f"the tokenizer of `{name}` is empty", hint)
    return tokenizer


_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer_config.json", "tekken.json")


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"unknown device `{device}`", "use auto, cpu, cuda or cuda:N")
    wanted = torch.device(device)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise RunError(f"device `{device}` is not here", "use --device cpu, or --device auto")
    return wanted


def _dtype(dtype: str) -> torch.dtype | str:
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"unknown dtype `{dtype}`", f"use auto, {', '.join(DTYPES)}")
    return DTYPES.get(dtype, "auto")


def _model_folder(name: str, revision: str | None, trust_remote_code: bool, has_weights: bool = True) -> Path:
    """The local folder behind a name; a hub id is fetched, or found in the local cache."""
    if name.startswith(dummy.PREFIX):
        return dummy.shape_folder(name)
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise UsageError(f"unknown built-in model `{name}`", f"the built-in pair is {' and '.join(BUILTIN)}")
        folder = Path(__file__).parent.parent / "builtin" / name.removeprefix("builtin:")
        if not folder.is_dir():
            raise RunError(f"the weights of `{name}` are not installed", "install specdec-cli again")
        return folder
    path = Path(name).expanduser()
    if name.strip() and path.is_dir():
        return path
    hint = "give a folder with `config.json` and safetensors, or a hub id such as `Qwen/Qwen3-0.6B`"
    if path.is_file():
        raise RunError(f"`{name}` is a file, not a model folder", hint)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        raise RunError(f"model folder `{name}` does not exist", hint)
    return _fetch(name, revision, trust_remote_code, has_weights)


def _fetch(name: str, revision: str | None, trust_remote_code: bool, has_weights: bool) -> Path:
    """Download a hub model's safetensors, if it has any, and small files, or find them in the local cache."""
    patterns = ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    patterns += ["*.safetensors"] if has_weights else []
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["original/*", "onnx/*", "consolidated*"],
                etag_timeout=5,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except Exception as error:
        raise _fetch_error(name, revision, error) from error


def _fetch_error(name: str, revision: str | None, error: Exception) -> RunError:
    """What a failed download means to a person."""
    match error:
        case GatedRepoError():
            return RunError(f"model `{name}` is gated", "accept its licence on the hub and log in with `hf auth login`")
        case RevisionNotFoundError():
            return RunError(f"model `{name}` has no revision `{revision}`", "check `revision`")
        case RepositoryNotFoundError():
            hint = "check the spelling, or log in if it is private"
            return RunError(f"no folder and no hub model is named `{name}`", hint)
        case LocalEntryNotFoundError():
            what = "is neither a folder nor in the local hub cache"
        case _:
            what = f"could not be fetched: {_first_line(error)}"
    return RunError(f"model `{name}` {what}", "if no hub can be reached, give a local folder")


def _config(name: str, folder: Path, trust_remote_code: bool) -> Any:
    """The model's configuration."""
    changes = dummy.shape_changes(name)
    path = folder / "config.json"
    if not path.is_file():
        raise RunError(f"model folder `{name}` has no `config.json`", "give the folder that holds the model's files")
    content = _read_object(path)
    if not isinstance(content.get("model_type"), str):
        raise RunError(f"`{path}` does not say a `model_type`", "give the folder of a transformers model")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True, **changes)
    except Exception as error:
        kind = content["model_type"]
        unknown = "does not recognize this architecture" in str(error)
        raise _remote_code_error(name, error) or (
            UsageError(f"architecture `{kind}` of `{name}` is unknown to transformers", "upgrade transformers")
            if unknown
            else RunError(f"`{path}` is not a valid configuration: {_first_line(error)}", "download the model again")
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in one of a model's files."""
    hint = "copy or download the model again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise RunError(f"`{path}` cannot be read: {_first_line(error)}", hint) from error
    if not isinstance(content, dict):
        raise RunError(f"`{path}` cannot be read: it holds no JSON object", hint)
    return content


def _check_architecture(name: str, config: Any, trust_remote_code: bool) -> None:
    """Refuse what cannot be a target or a draft, by name, before any weight is read."""
    kind = config.model_type
    hint = "choose a decoder-only model whose layers all have attention (Llama, Qwen, Mistral, Gemma, GPT-2, ...)"
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"architecture `{kind}` of `{name}` is an encoder-decoder, not a causal LM", hint)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if remote and trust_remote_code:
            return
        raise UsageError(f"architecture `{kind}` of `{name}` is not a causal LM", hint)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if getattr(model_class, "_is_stateful", False) or layer_types - LAYER_TYPES:
        raise UsageError(
            f"architecture `{kind}` of `{name}` keeps a state that cannot be cut back after a rejected draft", hint
        )
    heads = ("CausalLM", "LMHeadModel", "LMHead", "ForConditionalGeneration")
    written_for = getattr(config, "architectures", None) or [model_class.__name__]
    if not any(architecture.endswith(heads) for architecture in written_for):
        raise UsageError(f"`{name}` is a `{written_for[0]}`, not a causal LM", hint)
    if kind in ENCODERS and not getattr(config, "is_decoder", False):
        raise UsageError(
            f"architecture `{kind}` of `{name}` reads text in both directions, it is not a causal LM", hint
        )
    if getattr(text_config, "alibi", False) or kind in ("bloom", "mpt"):
        raise UsageError(f"architecture `{kind}` of `{name}` has ALiBi attention, which is not supported", hint)


def _check_weights(name: str, folder: Path) -> None:
    """Every safetensors file that the model needs is there and whole."""
    index = folder / "model.safetensors.index.json"
    hint = "copy or download the model again"
    if (folder / "model.safetensors").is_file():
        files = {"model.safetensors"}
    elif index.is_file():
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise RunError(f"`{index}` cannot be read: it has no `weight_map`", hint)
        files = set(weight_map.values())
    else:
        pickled = any(list(folder.glob(pattern)) for pattern in PICKLES)
        raise RunError(
            f"`{name}` has only pickled weights, which can run code when they are loaded"
            if pickled
            else f"`{name}` has no weights: `model.safetensors` is missing",
            "convert the model to safetensors" if pickled else "give the folder that holds the model's weights",
        )
    for file in sorted(files):
        if not (folder / file).is_file():
            raise RunError(f"`{name}` lacks the weights file `{file}`", hint)
        try:
            with safe_open(folder / file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            said = _first_line(error).removeprefix("Error while deserializing header: ")
            raise RunError(f"`{folder / file}` is not a whole safetensors file: {said}", hint) from error


def _attention(config: Any) -> str:
    """The attention that a family takes: ours where it can be replaced."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or model_class._can_set_attn_implementation():
        return NAME
    return "sdpa" if model_class._supports_sdpa else "eager"


def _model(name: str, folder: Path, config: Any, dtype: torch.dtype | str, trust_remote_code: bool) -> Any:
    """The transformers model, every weight of which came from the files."""
    _check_weights(name, folder)
    if (folder / "generation_config.json").is_file():  # transformers goes on without one that is broken
        _read_object(folder / "generation_config.json")
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        attn_implementation=_attention(config),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        trust_remote_code=trust_remote_code,
        local_files_only=True,
    )
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing or mismatched:
        what = f"`{missing[0]}` is missing" if missing else f"`{mismatched[0][0]}` has another shape"
        raise RunError(
            f"the weights of `{name}` do not match its `config.json`: {what}", "copy or download the model again"
        )
    return model


def _check_packing(lm: TransformersLM) -> None:
    """Where the attention is not ours: packed rows must give what the plain model gives.

    Raises:
        UsageError: they do not; the family looks at more than the mask and the positions.
    """
    tokens = [1 + i % (lm.vocab_size - 1) for i in range(7)]
    with torch.inference_mode():
        plain = lm.model(input_ids=torch.tensor([tokens], device=lm.device), use_cache=False).logits[0].float()
    lm.score([Row(0, tokens[:3], 0)])
    packed = lm.score([Row(1, tokens[:5], 1), Row(0, tokens, 4)])
    lm.release(0)
    lm.release(1)
    allowed = (1e-3 if lm.dtype == torch.float32 else 5e-2) * float(plain.abs().max())
    if float((packed - plain[[4, 3, 4, 5, 6]]).abs().max()) > allowed:
        raise UsageError(
            f"architecture `{lm.config.model_type}` of `{lm.name}` is not supported: it cannot decode several rows "
            "in one forward",
            "choose a model of another family (Llama, Qwen, Mistral, Gemma, Phi-3, GPT-2, GPT-NeoX, Falcon, ...)",
        )


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Tokens that end a text, by the generation configuration, else by the model's."""
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return ()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars, warnings and reports off the terminal while something loads."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    """Turn whatever a load raises into one sentence."""
    try:
        yield
    except SpecdecError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(f"model `{name}` does not fit into memory", "choose a smaller model or dtype") from error
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise RunError(f"model `{name}` does not fit into memory", "choose a smaller model or dtype") from error
        raise _remote_code_error(name, error) or RunError(
            f"model `{name}` does not load: {_first_line(error)}", "check that the folder's files belong together"
        ) from error


def _remote_code_error(name: str, error: Exception) -> UsageError | None:
    if "trust_remote_code" not in str(error):
        return None
    return UsageError(f"model `{name}` comes with Python code of its own", "read it, then pass --trust-remote-code")


def _first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, without its full stop."""
    if isinstance(error, KeyError) and error.args:
        return f"unknown or missing `{error.args[0]}`"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:  # only a heading, as of transformers' checks of a configuration
        lines = [re.sub(r"^\s*\w+Error: ", "", lines[1])]
    return lines[0].strip().rstrip(".:")
