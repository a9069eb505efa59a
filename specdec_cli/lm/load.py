"""Load a language model or a tokenizer by name; every way in which that fails ends in one clear sentence."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.cache.cache_plan import KVCacheBytes
from specdec_cli.lm.decoders import AUTO as AUTO_DECODER
from specdec_cli.lm.decoders import COMPILING, check_decoder
from specdec_cli.lm.door import Tap
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import check_adapter
from specdec_cli.lm.files.architecture import check_architecture
from specdec_cli.lm.files.checkpoint import clear_errors, model_folder, read_config, remote_code_error
from specdec_cli.lm.files.generation import Generation, read_generation
from specdec_cli.lm.files.gguf_folder import gguf_of, read_gguf_tokenizer
from specdec_cli.lm.files.headers import first_dtype
from specdec_cli.lm.files.lengths import max_context, own_context
from specdec_cli.lm.files.names import AUTO, BUILTIN
from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.files.quantization import (
    check_quantization,
    forget_quantization,
    is_dequantized,
    stays_quantized,
    take_form,
)
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.files.tokenizer_files import TOKENIZER_FILES, check_tokenizer, tokenizer_error
from specdec_cli.lm.files.weights_files import all_files, check_weights, stored_bytes, weights_files
from specdec_cli.lm.forward.implementations import NAME
from specdec_cli.lm.forward.taps import check_taps
from specdec_cli.lm.from_files import Form, model_from_files, registered_attention
from specdec_cli.lm.kernels.kinds import kind_when
from specdec_cli.lm.llama.builtin_pair import read_builtin_config, read_builtin_model
from specdec_cli.lm.llama.native import missing
from specdec_cli.lm.machine.device_memory import check_room
from specdec_cli.lm.oracle import Oracle, RoundingError
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.template_limits import limit_templates
from specdec_cli.lm.transformers_lm import TransformersLM

if TYPE_CHECKING:
    from specdec_cli.lm.blocks_check import BlocksOracle
    from specdec_cli.lm.files.gguf_weights import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NATIVE = "native"  # of `lm.compute`, which is imported for GGUF files alone
_log = logging.getLogger(__name__)


def load_lm(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    load_format: str = "auto",
    quantize: str = "none",
    compute: str = "auto",
    max_num_seqs: int = 8,
    max_model_len: int | None = None,
    block_size: int = 16,
    kv_cache_bytes: KVCacheBytes = None,
    num_blocks: int | None = None,
    extra_tokens: int = 16,
    decoder: str = "auto",
    generation_config: str = AUTO,
    check: bool = True,
    progress: Progress | None = None,
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
        compute: auto (a GGUF file's blocks as they are, where that is possible), native, or dequantized.
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
        progress: told how many bytes of a GGUF file are dequantized, and of how many.

    Raises:
        UsageError: a wrong option, or an architecture that cannot be a target or a draft.
        RunError: the model does not load.
    """
    options = dict(locals())
    has_weights = not dummy.is_dummy(name, load_format)
    target_device, wanted_dtype = device_named(device), dtype_named(dtype)
    folder = model_folder(name, revision, trust_remote_code, has_weights)
    with quiet(), clear_errors(name):
        native = False
        if has_weights and compute != _NATIVE and _is_of_pair(name, decoder, wanted_dtype, target_device):
            check_weights(name, folder)
            generation, config = read_generation(folder, generation_config), read_builtin_config(folder)
            config._attn_implementation = NAME
            model: Any = read_builtin_model(folder, config, resolve_dtype(name, dtype, config, folder))
        else:
            config = read_config(name, folder, trust_remote_code)
            check_architecture(name, config, trust_remote_code)
            if has_weights:
                check_weights(name, folder)
                check_quantization(name, config, folder, quantize)
                _check_gguf(name, folder, config)
                form = take_form(config)
                check_adapter(name, folder, stays_quantized(config))
                native = _is_native(name, folder, config, compute, quantize, decoder, target_device)
                _check_room(name, folder, config, form, dtype, _NATIVE if native else quantize, target_device)
            else:
                forget_quantization(config)
            check_decoder(name, decoder, config, target_device, quantize)
            generation = read_generation(folder, generation_config) if has_weights else Generation()
            if native:
                model = _model_in_blocks(name, folder, config, resolve_dtype(name, dtype, config, folder))
            elif has_weights:
                resolved = resolve_dtype(name, dtype, config, folder)
                model = model_from_files(name, folder, config, resolved, trust_remote_code, form, progress=progress)
            else:
                attention = registered_attention(config)
                model = dummy.build(name, config, wanted_dtype, target_device, attention, trust_remote_code)
            model = model.to(target_device).eval()
        oracle = _oracle(model, native) if check else None
        if isinstance(wanted_dtype, torch.dtype) and model.dtype != wanted_dtype and stays_quantized(config):
            runs_in = str(model.dtype).removeprefix("torch.")
            said = f"`{name}` is quantized by `{stays_quantized(config)}` and runs in `{runs_in}`, not in `{dtype}`"
            raise UsageError(said, "leave --dtype at auto")
        if isinstance(oracle, Oracle) and oracle.is_quantized:  # its dtype may be none that its kernels take
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
            kind="blocks" if native else kind_when(decoder in COMPILING, model.dtype, target_device, quantize),
        )
        weights = fingerprint(folder, all_files(name, folder)) if has_weights else None
        lm.generation = generation
        kept_as = _NATIVE if native else quantize
        lm.origin = Origin(name, revision, str(lm.dtype).removeprefix("torch."), kept_as, weights)
        doubt = None if oracle is None else _doubt(oracle, lm)
    if doubt is None:
        return lm
    del model, lm  # float32 takes their memory
    return _load_in_float32(doubt, options)


def _check_gguf(name: str, folder: Path, config: Any) -> None:
    """Refuse a GGUF file whose tensors are not those of its configuration; errors as in `check_gguf_tensors`."""
    if gguf_of(folder) is not None:
        from specdec_cli.lm.files.gguf_weights import check_gguf_tensors

        check_gguf_tensors(name, folder, config)


def _is_native(
    name: str, folder: Path, config: Any, compute: str, quantize: str, decoder: str, device: torch.device
) -> bool:
    """Whether a model's products take its GGUF file's blocks; errors as in `is_native`."""
    if compute == AUTO and gguf_of(folder) is None:
        return False
    from specdec_cli.lm.compute import is_native

    return is_native(name, folder, config, compute, quantize=quantize, decoder=decoder, device=device)


def _model_in_blocks(name: str, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    from specdec_cli.lm.gguf_blocks import model_in_blocks

    return model_in_blocks(name, folder, config, dtype)


def _is_of_pair(name: str, decoder: str, dtype: torch.dtype | str, device: torch.device) -> bool:
    """Whether a model is one of the built-in pair that our own decoder runs, so that transformers' is not needed."""
    is_plain = name in BUILTIN and decoder == AUTO_DECODER and device.type == "cpu" and dtype != torch.float16
    return is_plain and missing() is None


def _config_of(name: str, folder: Path, trust_remote_code: bool) -> Any:
    """A model's configuration, for its numbers alone."""
    return read_builtin_config(folder) if name in BUILTIN else read_config(name, folder, trust_remote_code)


def _oracle(model: Any, native: bool) -> Oracle | BlocksOracle:
    if not native:
        return Oracle(model)
    from specdec_cli.lm.blocks_check import BlocksOracle

    return BlocksOracle(model)


def _doubt(oracle: Oracle | BlocksOracle, lm: TransformersLM) -> RoundingError | None:
    """Check a model; what only float32 can judge."""
    try:
        oracle.check(lm)
    except RoundingError as error:
        return error.with_traceback(None)  # whose frames hold the model
    return None


def _load_in_float32(doubt: RoundingError, options: dict[str, Any]) -> TransformersLM:
    """Load a model in float32 that failed the check in 16 bits.

    Raises:
        RoundingError: it fails there, too, or does not fit.
    """
    try:
        lm = load_lm(**options | {"dtype": "float32"})
    except RunError as error:
        raise doubt from error
    _log.warning("%s: float32 agrees with it, so `%s` runs in float32", doubt.message, lm.name)
    return lm


def _check_room(
    name: str, folder: Path, config: Any, form: Form, dtype: str, quantize: str, device: torch.device
) -> None:
    """Refuse weights that cannot fit into the RAM, whatever of their files' dtype is kept.

    Raises:
        RunError: they cannot.
    """
    num_bytes = stored_bytes(name, folder)
    if quantize == _NATIVE:
        check_room(name, num_bytes, "its file's blocks", device, "choose a smaller model")
        return
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
    drafts: Sequence[SelfDraft] = (),
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
        drafts: made of its weights.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run Python code that comes with the model.
        load_format: auto, or dummy.

    Raises:
        UsageError: a limit that is longer than its own, hidden states that it has not, or a draft with all its layers.
        RunError: the model's configuration cannot be read.
    """
    if max_model_len is None and not taps and not drafts:
        return
    folder = model_folder(name, revision, trust_remote_code, not dummy.is_dummy(name, load_format))
    with quiet(), clear_errors(name):
        config = _config_of(name, folder, trust_remote_code).get_text_config()
    own = own_context(config)
    if own is not None and max_model_len is not None and max_model_len > own:
        raise UsageError(
            f"max_model_len is `{max_model_len}`, and `{name}` reads `{own}` tokens at most",
            f"lower --max-model-len (engine.max_model_len) to {own}, or leave it out",
        )
    check_taps(name, taps, config, max_context(config, max_model_len))
    for draft in drafts:
        draft.check(name, config.num_hidden_layers)


def num_layers(name: str, revision: str | None = None, trust_remote_code: bool = False) -> int:
    """How many decoder layers a model has, by its configuration.

    Raises:
        UsageError: transformers does not know the architecture.
        RunError: there is no such model, or its configuration cannot be read.
    """
    folder = model_folder(name, revision, trust_remote_code, has_weights=False)
    with quiet(), clear_errors(name):
        return int(_config_of(name, folder, trust_remote_code).get_text_config().num_hidden_layers)


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, load_format: str = "auto"
) -> Any:
    """Load a transformers tokenizer by the name of its model; where the weights are random, one stands in for none.

    Raises:
        RunError: there is none, or it is broken.
    """
    has_weights = not dummy.is_dummy(name, load_format)
    folder = model_folder(name, revision, trust_remote_code, has_weights)
    return tokenizer_in(name, folder, trust_remote_code, has_weights)


def tokenizer_in(name: str, folder: Path, trust_remote_code: bool, has_weights: bool = True) -> Any:
    """The tokenizer in a model's folder.

    Args:
        name: for messages.
        folder: of the model.
        trust_remote_code: run Python code that comes with the model.
        has_weights: its weights are no random ones, which a stand-in may serve.

    Raises:
        RunError: there is none, or it is broken.
    """
    limit_templates()
    hint = "give a model folder that holds `tokenizer.json`"
    if not any((folder / file).exists() for file in TOKENIZER_FILES) and not list(folder.glob("*.model")):
        with quiet():
            config = read_config(name, folder, trust_remote_code)
        if not has_weights:
            return dummy.stand_in_tokenizer(config)
        raise RunError(f"model `{name}` has no tokenizer", hint)
    with quiet():
        try:
            if gguf_of(folder) is not None:
                return read_gguf_tokenizer(folder)
            if name in BUILTIN:  # its class is known, which transformers would search for among all of its models
                return transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            if (folder / "config.json").is_file():  # which transformers reads first; it may be the broken one
                read_config(name, folder, trust_remote_code)
            raise remote_code_error(name, error) or tokenizer_error(name, folder, error) from error
        check_tokenizer(name, folder, tokenizer)
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


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Tokens that end a text, by the generation configuration, else by the model's."""
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return ()
