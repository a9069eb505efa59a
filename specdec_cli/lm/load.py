"""Load a language model or a tokenizer by name; every way in which that fails ends in one clear sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.pytorch_utils import Conv1D

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.cache.cache_plan import KVCacheBytes
from specdec_cli.lm.decoders import COMPILING, check_decoder
from specdec_cli.lm.door import Tap
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.architecture import check_architecture
from specdec_cli.lm.files.checkpoint import clear_errors, model_folder, read_config, remote_code_error
from specdec_cli.lm.files.classes import auto_class_of
from specdec_cli.lm.files.dequantize import descriptions, plain_weights
from specdec_cli.lm.files.generation import AUTO, Generation, read_generation
from specdec_cli.lm.files.gguf_folder import check_gguf_tensors, gguf_of, load_gguf
from specdec_cli.lm.files.headers import differing, first_dtype, is_pickled, read_headers, read_tensors
from specdec_cli.lm.files.lengths import max_context, own_context
from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.files.quantization import (
    check_finite,
    check_quantization,
    forget_quantization,
    give_dtype,
    is_dequantized,
    settings_of,
    stays_quantized,
    take_form,
)
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.files.tokenizer_files import TOKENIZER_FILES, tokenizer_error
from specdec_cli.lm.files.weights_files import check_weights, stored_bytes, weights_files
from specdec_cli.lm.forward.joined import attention_of
from specdec_cli.lm.forward.taps import check_taps
from specdec_cli.lm.kernels.kinds import kind_when
from specdec_cli.lm.machine.device_memory import check_room
from specdec_cli.lm.oracle import Oracle
from specdec_cli.lm.transformers_lm import TransformersLM

ON_PAPER = "batched_mm"  # experts in one product each, with no branch on what a router chose
Form = dict[str, Any] | None
"""The `quantization_config` of weights that `files.dequantize` undoes; None for others."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    num_blocks: int | None = None,
    extra_tokens: int = 16,
    decoder: str = "auto",
    generation_config: str = AUTO,
    check: bool = True,
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
        quantize: none, or int8 (linear layers).
        max_num_seqs: sequences that the KV cache should have room for.
        max_model_len: a shorter context limit than the model's own, in tokens.
        block_size: tokens in a block of KV cache.
        kv_cache_bytes: most memory for the KV cache, as TransformersLM takes it; None is half of what is free.
        num_blocks: blocks of the KV cache, in the place of `kv_cache_bytes`.
        extra_tokens: room beyond the context limit for each sequence.
        decoder: auto (our own where it knows the shape; on a GPU graphs where they can be recorded), transformers,
            compiled (transformers', for `LM.compile`), graphs (transformers', recorded, on a GPU), compiled graphs, or
            compiled auto.
        generation_config: auto (the model's own), none (only its end tokens), or a folder with another.
        check: compare the logits of a few tokens with transformers' own forward (see lm.oracle).

    Raises:
        UsageError: a wrong option, or an architecture that cannot be a target or a draft.
        RunError: the model does not load.
    """
    has_weights = not dummy.is_dummy(name, load_format)
    target_device, wanted_dtype = device_named(device), dtype_named(dtype)
    folder = model_folder(name, revision, trust_remote_code, has_weights)
    with quiet(), clear_errors(name):
        config = read_config(name, folder, trust_remote_code)
        check_architecture(name, config, trust_remote_code)
        if has_weights:
            check_weights(name, folder)
            check_quantization(name, config, folder, quantize)
            check_gguf_tensors(name, folder, config)
            form = take_form(config)
            _check_room(name, folder, config, form, dtype, quantize, target_device)
        else:
            forget_quantization(config)
        check_decoder(name, decoder, config, target_device, quantize)
        generation = read_generation(folder, generation_config) if has_weights else Generation()
        if has_weights:
            model = _model(
                name, folder, config, resolve_dtype(name, dtype, config, folder), trust_remote_code, form=form
            )
        else:
            attention = attention_of(config)
            model = dummy.build(name, config, wanted_dtype, target_device, attention, trust_remote_code)
        model = model.to(target_device).eval()
        oracle = Oracle(model) if check else None
        if isinstance(wanted_dtype, torch.dtype) and model.dtype != wanted_dtype and stays_quantized(config):
            runs_in = str(model.dtype).removeprefix("torch.")
            said = f"`{name}` is quantized by `{stays_quantized(config)}` and runs in `{runs_in}`, not in `{dtype}`"
            raise UsageError(said, "leave --dtype at auto")
        if oracle is not None and oracle.is_quantized:  # its dtype may be none that its kernels take
            oracle.check_reference(name)
        lm = TransformersLM(
            model,
            name,
            eos_token_ids=(generation.eos_token_ids or _eos_token_ids(model)) if has_weights else (),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
            extra_tokens=extra_tokens,
            decoder=decoder,
            kind=kind_when(decoder in COMPILING, model.dtype, target_device, quantize),
        )
        weights = fingerprint(folder, weights_files(name, folder)) if has_weights else None
        lm.generation = generation
        lm.origin = Origin(name, revision, str(lm.dtype).removeprefix("torch."), quantize, weights)
        if oracle is not None:
            oracle.check(lm)
    return lm


def _check_room(
    name: str, folder: Path, config: Any, form: Form, dtype: str, quantize: str, device: torch.device
) -> None:
    """Refuse weights that cannot fit into the RAM, whatever of their files' dtype is kept.

    Raises:
        RunError: they cannot.
    """
    num_bytes = stored_bytes(name, folder)
    if gguf_of(folder) is not None or form is not None or is_dequantized(config):
        numbers = dummy.num_parameters(dummy.on_paper(config, "auto", False))
        num_bytes = numbers * (4 if dtype != "auto" else resolve_dtype(name, dtype, config, folder).itemsize)
    if quantize != "none":
        num_bytes //= 4  # the files may be float32
    elif dtype != "auto":
        num_bytes = num_bytes * DTYPES[dtype].itemsize // 4
    if device.type == "cpu":
        what = quantize if quantize != "none" else dtype if dtype != "auto" else "its own dtype"
        check_room(name, num_bytes, what, device, "choose a smaller model or dtype")


def check_target(
    name: str,
    max_model_len: int | None,
    taps: Sequence[Tap] = (),
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    load_format: str = "auto",
) -> None:
    """Refuse what a target cannot give, before its weights are read.

    Args:
        name: as `load_lm` takes it, like all others.
        max_model_len: context limit.
        taps: hidden states that its draft reads.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run Python code that comes with the model.
        load_format: auto, or dummy.

    Raises:
        UsageError: a limit that is longer than its own, or hidden states that it has not.
        RunError: the model's configuration cannot be read.
    """
    if max_model_len is None and not taps:
        return
    folder = model_folder(name, revision, trust_remote_code, not dummy.is_dummy(name, load_format))
    with quiet(), clear_errors(name):
        config = read_config(name, folder, trust_remote_code).get_text_config()
    own = own_context(config)
    if own is not None and max_model_len is not None and max_model_len > own:
        raise UsageError(
            f"max_model_len is `{max_model_len}`, and `{name}` reads `{own}` tokens at most",
            f"lower --max-model-len (engine.max_model_len) to {own}, or leave it out",
        )
    check_taps(name, taps, config, max_context(config, max_model_len))


def num_layers(name: str, revision: str | None = None, trust_remote_code: bool = False) -> int:
    """How many decoder layers a model has, by its configuration.

    Raises:
        UsageError: transformers does not know the architecture.
        RunError: there is no such model, or its configuration cannot be read.
    """
    folder = model_folder(name, revision, trust_remote_code, has_weights=False)
    with quiet(), clear_errors(name):
        return int(read_config(name, folder, trust_remote_code).get_text_config().num_hidden_layers)


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, load_format: str = "auto"
) -> Any:
    """Load a transformers tokenizer by the name of its model; where the weights are random, one stands in for none.

    Raises:
        RunError: there is none, or it is broken.
    """
    has_weights = not dummy.is_dummy(name, load_format)
    folder = model_folder(name, revision, trust_remote_code, has_weights)
    hint = "give a model folder that holds `tokenizer.json`"
    if not any((folder / file).exists() for file in TOKENIZER_FILES) and not list(folder.glob("*.model")):
        with quiet():
            config = read_config(name, folder, trust_remote_code)
        if not has_weights:
            return dummy.stand_in_tokenizer(config)
        raise RunError(f"model `{name}` has no tokenizer", hint)
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            if (folder / "config.json").is_file():  # which transformers reads first; it may be the broken one
                read_config(name, folder, trust_remote_code)
            raise remote_code_error(name, error) or tokenizer_error(name, folder, error) from error
    if len(tokenizer) == 0:
        raise RunError(f"the tokenizer of `{name}` is empty", hint)
    return tokenizer


def device_named(device: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here.

    Raises:
        UsageError: another word.
        RunError: it is not here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"unknown device `{device}`", "use auto, cpu, cuda or cuda:N")
    wanted = torch.device(device)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise RunError(f"device `{device}` is not here", "use --device cpu, or --device auto")
    return wanted


def dtype_named(dtype: str) -> torch.dtype | str:
    """The dtype of a name; `auto` stays itself.

    Raises:
        UsageError: another name.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"unknown dtype `{dtype}`", f"use auto, {', '.join(DTYPES)}")
    return DTYPES.get(dtype, "auto")


def resolve_dtype(name: str, dtype: str, config: Any, folder: Path | None) -> torch.dtype:
    """The dtype that a model runs in; `auto` is the configuration's, else that of the first weights, else float32.

    Args:
        name: for messages.
        dtype: auto, or a dtype's name.
        config: of the model.
        folder: with its weights; None where they are not here.

    Raises:
        UsageError: another name, or a checkpoint's own dtype that this engine does not compute in.
    """
    named = dtype_named(dtype)
    if isinstance(named, torch.dtype):
        return named
    given = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if given is None and folder is not None:
        given = first_dtype([folder / file for file in weights_files(name, folder)])
    found = str(given or "float32").removeprefix("torch.")
    if found not in DTYPES:
        raise UsageError(
            f"`{name}` is in `{found}`, which the engine does not support", f"use --dtype with {', '.join(DTYPES)}"
        )
    return DTYPES[found]


def model_on_paper(
    name: str, folder: Path | None, config: Any, dtype: torch.dtype, trust_remote_code: bool, form: Form = None
) -> Any:
    """The model that `load_lm` would decode with, as its checks see it; asked within `paper.on_paper`.

    Args:
        name: for messages.
        folder: with the weights, of which headers are read; None where there are none.
        config: of the model.
        dtype: of the weights.
        trust_remote_code: run Python code that comes with the model.
        form: settings of quantized weights that are undone here.

    Raises:
        RunError: the files do not hold the model that the configuration describes.
    """
    if folder is not None and gguf_of(folder) is None:
        model = _model(name, folder, config, dtype, trust_remote_code, is_on_paper=True, form=form)
    else:
        model = auto_class_of(config).from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention_of(config),
            experts_implementation=ON_PAPER,
            trust_remote_code=trust_remote_code,
        )
    return model.eval()


def _model(
    name: str,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    is_on_paper: bool = False,
    form: Form = None,
) -> Any:
    """The transformers model, every weight of which came from the files, or from their headers (`lm.paper`)."""
    settings, has_bfloat16 = settings_of(config), is_dequantized(config)  # transformers may take the form out
    how = {
        "dtype": dtype,
        "attn_implementation": attention_of(config),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, by name
    }
    if gguf_of(folder) is not None:
        model, report = load_gguf(folder, config, how)
    elif is_on_paper or form is not None:
        outline, files = (
            dummy.on_paper(config, dtype, trust_remote_code),
            [folder / one for one in weights_files(name, folder)],
        )
        tensors = _tied_headers(outline, files, dtype) if is_on_paper else read_tensors(files)
        if form is not None:
            tensors = plain_weights(name, tensors, form, descriptions(files), dtype)
        how |= {"config": outline.config} | ({"experts_implementation": ON_PAPER} if is_on_paper else {})
        model, report = type(outline).from_pretrained(None, state_dict=tensors, **how)
    else:
        how |= {"trust_remote_code": trust_remote_code, "local_files_only": True}
        how["use_safetensors"] = not is_pickled(weights_files(name, folder)[0])
        model, report = auto_class_of(config).from_pretrained(folder, config=config, **how)
    unread = _unread_beside_weights(model, report["unexpected_keys"]) if settings is None else []
    wrong = [f"`{key}` is missing" for key in sorted(report["missing_keys"])]
    wrong += [f"`{key}` has another shape" for key, *_ in sorted(report["mismatched_keys"])]
    wrong += [f"`{key}` is not read" for key in unread]
    if wrong:
        said = f"the weights of `{name}` do not match its `config.json`: {wrong[0]}"
        raise RunError(said, "copy or download the model again")
    if has_bfloat16:
        give_dtype(model, dtype)
    is_expanded = has_bfloat16 or form is not None or gguf_of(folder) is not None
    if is_expanded and not is_on_paper:
        check_finite(name, model)
    return model


def _tied_headers(outline: Any, files: list[Path], dtype: torch.dtype) -> dict[str, Any]:
    """A checkpoint's tensors on paper, where transformers cannot ask whether two that a model ties are one.

    It ties what is equal, and otherwise keeps both whatever the configuration says.
    """
    headers, pairs = read_headers(files), outline.all_tied_weights_keys
    own = differing(files, pairs, dtype)
    if own:
        for config in (outline.config, outline.config.get_text_config()):
            config.tie_word_embeddings = False
        return headers
    return {key: header for key, header in headers.items() if pairs.get(key) not in headers}


def _unread_beside_weights(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Tensors that a file holds of a layer and that the layer does not read: a scale, a bias, a part of the weight."""
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | Conv1D)}
    return sorted(key for key in unexpected if key.rpartition(".")[0] in layers)


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Tokens that end a text, by the generation configuration, else by the model's."""
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return ()
