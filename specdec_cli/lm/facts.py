"""Facts about a model before its weights are read: limits, end tokens, memory. No large file is downloaded."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.files import given_path
from specdec_cli.lm.compute import is_native
from specdec_cli.lm.decoders import COMPILING, check_decoder, graphs_obstacle, own_obstacle, tries_graphs
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import check_adapter
from specdec_cli.lm.files.architecture import check_architecture
from specdec_cli.lm.files.checkpoint import clear_errors, model_folder, read_config
from specdec_cli.lm.files.generation import read_generation
from specdec_cli.lm.files.gguf_weights import check_gguf_tensors
from specdec_cli.lm.files.lengths import max_context
from specdec_cli.lm.files.names import NONE
from specdec_cli.lm.files.paper import NEEDS_NUMBERS, on_paper
from specdec_cli.lm.files.quantization import (
    check_quantization,
    forget_quantization,
    method_of,
    settings_of,
    stays_quantized,
    take_form,
)
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.files.weights_files import check_weights, stored_as, stored_bytes
from specdec_cli.lm.first_layers import added_bytes, first_layers, weights_of_first_layers
from specdec_cli.lm.forward.compiled import check_compiler
from specdec_cli.lm.forward.forward import CacheShape
from specdec_cli.lm.forward.packed import PackedForward
from specdec_cli.lm.from_files import model_on_paper
from specdec_cli.lm.gguf_blocks import block_bytes
from specdec_cli.lm.heads.mtp_files import MtpModules, find_mtp
from specdec_cli.lm.kernels.kinds import kind_when
from specdec_cli.lm.kernels.packing import weights_of
from specdec_cli.lm.llama.families import kept_as
from specdec_cli.lm.load import device_named, resolve_dtype, tokenizer_in
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.traffic import model_traffic, num_experts


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model by its configuration and its files' headers.

    Args:
        name: as shown in reports and messages.
        architecture: for example `llama`.
        dtype: what it would run in: float32, bfloat16 or float16.
        max_context: its own context limit, in tokens.
        embedding_size: width of its logits, padding included.
        hidden_size: width of its hidden states; None where its configuration has another word for it.
        num_parameters: weights, each counted once as the files or the configuration have them.
        weights_bytes: memory for them in `dtype`, or as `--quantize` packs them.
        weights_counted_in: `headers of its files`, or `configuration` where the weights are not here.
        kv_bytes_per_token: keys and values of one token, as the engine's cache holds them; None where the forward
            goes by the numbers that it computes, so that only loading tells.
        state_bytes: what its recurrent layers carry from a token to the next; 0 without such layers.
        prefix_state_bytes: of a snapshot of it, by which a cached prefix is shared.
        eos_token_ids: tokens that end a text.
        is_mixture_of_experts: whether tokens take different weights.
        is_complete: whether the weights are on this machine.
        load_format: auto, or dummy for random weights.
        read_bytes: of weights that a forward of one token reads: an input embedding that is not the output's is
            looked up, and a token takes a share of the experts.
        decoder: whose forward runs it: `own`, `own, native` on a GGUF file's blocks, or `transformers` and why.
        stored_as: form of its files, `safetensors` or for example `GGUF (Q4_K, Q6_K)`; None where they are not here.
        stored_bytes: their size.
        num_mtp_modules: modules in its checkpoint that `--draft mtp` guesses with.
        mtp_bytes: memory for them in `dtype`; None without any, or where their form is not read.
    """

    name: str
    architecture: str
    dtype: str
    max_context: int
    embedding_size: int
    hidden_size: int | None
    num_parameters: int
    weights_bytes: int
    weights_counted_in: str
    kv_bytes_per_token: int | None
    state_bytes: int
    prefix_state_bytes: int
    eos_token_ids: tuple[int, ...]
    is_mixture_of_experts: bool
    is_complete: bool
    load_format: str
    read_bytes: int
    decoder: str
    stored_as: str | None
    stored_bytes: int | None
    num_mtp_modules: int
    mtp_bytes: int | None

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
    compute: str = "auto",
    device: str = "auto",
    decoder: str = "auto",
    self_draft: SelfDraft | None = None,
) -> ModelFacts:
    """Read a model's configuration and headers, and refuse it by name if the engine would.

    The engine's own checks, loader and probe run, on paper (`lm.paper`): what they raise, loading raises.

    Args:
        name: a local folder, a hub id, a built-in name or a shape.
        revision: branch, tag or commit of a hub id.
        dtype: auto, or a dtype's name.
        trust_remote_code: run Python code that comes with the model.
        load_format: auto, or dummy.
        quantize: none, or int8.
        compute: as `load_lm` takes it.
        device: where it would run, whether that is here or not.
        decoder: as `load_lm` takes it.
        self_draft: describe this draft of the model, which adds its own weights alone; None describes the model.

    Raises:
        UsageError: an architecture that cannot be a target or a draft, or not compiled; int8 on a GPU.
        RunError: no such model, files that are broken or do not belong together, or no compiler.
    """
    is_dummy = dummy.is_dummy(name, load_format)
    folder = small_files(name, revision, trust_remote_code, not is_dummy)
    place = _place(device)
    with quiet(), clear_errors(name):
        config = read_config(name, folder, trust_remote_code)
        check_architecture(name, config, trust_remote_code)
        check_decoder(name, decoder, config, place, quantize)
        if decoder in COMPILING:
            check_compiler(place)
        is_complete = not is_dummy and _has_weights(name, folder)
        if is_dummy:
            forget_quantization(config)
        else:
            check_quantization(name, config, folder if is_complete else None, quantize)
            check_gguf_tensors(name, folder, config)
        modules = find_mtp(name, folder, config, trust_remote_code) if is_complete else None
        method = method_of(config)
        form = None if is_dummy else take_form(config)
        if is_complete:
            check_adapter(name, folder, stays_quantized(config))
        kind = resolve_dtype(name, dtype, config, folder if is_complete else None)
        with on_paper():
            source = folder if is_complete else None
            whole = model_on_paper(name, source, config, kind, trust_remote_code, form)
            found = own_obstacle(whole, decoder, place)
            shared = weights_of(whole, kept_as(kind_when(decoder in COMPILING, kind, place, quantize), found))
            native = is_complete and is_native(
                name, folder, config, compute, quantize=quantize, decoder=decoder, device=place
            )
            if native:
                sizes = block_bytes(name, folder, config)
                shared = [replace(weight, num_bytes=sizes.get(weight.name, weight.num_bytes)) for weight in shared]
            draft = self_draft or SelfDraft()
            if self_draft is not None:
                _check_self_draft(self_draft, name, config, found, "blocks" if native else quantize)
            model = first_layers(whole, draft.layers)
            kept = _probe(name, model) or _probe_unquantized(name, config, kind, trust_remote_code, draft.layers)
            left = weights_of_first_layers(shared, whole, draft.layers)
        packed = left if draft.quantize == "none" else weights_of(model, "int8")
        text = model.config.get_text_config()
        return ModelFacts(
            name=name if self_draft is None else self_draft.spec,
            architecture=config.model_type,
            dtype=str(kind).removeprefix("torch."),
            max_context=max_context(text, None),
            embedding_size=int(text.vocab_size) if kept is None else kept.vocab_size,
            hidden_size=getattr(text, "hidden_size", None),
            num_parameters=dummy.num_parameters(model),
            weights_bytes=added_bytes(packed, [] if self_draft is None else shared),
            weights_counted_in="headers of its files" if is_complete else "configuration",
            kv_bytes_per_token=None if kept is None else kept.kv_bytes_per_token,
            state_bytes=0 if kept is None else kept.state_bytes,
            prefix_state_bytes=0 if kept is None else kept.prefix_state_bytes,
            eos_token_ids=() if is_dummy else _eos_token_ids(folder, config),
            is_mixture_of_experts=num_experts(text) > 1,
            is_complete=is_complete,
            load_format="dummy" if is_dummy else "auto",
            read_bytes=int(model_traffic(config, packed, 0).bytes_moved(1, 0)),
            decoder="own, native"
            if native
            else _decoder(found)
            if not tries_graphs(decoder, place)
            else _graphs(name, config, place),
            stored_as=stored_as(name, folder, method) if is_complete else None,
            stored_bytes=stored_bytes(name, folder) if is_complete else None,
            num_mtp_modules=0 if modules is None else len(modules.tensors),
            mtp_bytes=None if modules is None else _mtp_bytes(modules, kind),
        )


def _mtp_bytes(modules: MtpModules, dtype: torch.dtype) -> int | None:
    """Memory of MTP modules; None for a form that is not read, which only matters to who drafts with them."""
    try:
        modules.check()
        return modules.num_bytes(dtype.itemsize)
    except SpecdecError:
        return None


def _check_self_draft(draft: SelfDraft, name: str, config: Any, obstacle: str | None, quantize: str) -> None:
    """Refuse a draft that cannot be made of a model, as `TransformersLM.self_draft` does."""
    quantized = quantize if quantize != "none" else stays_quantized(config)
    draft.check(name, config.get_text_config().num_hidden_layers)
    draft.check_copy(name, "own" if obstacle is None else "transformers", quantized or "none")


def _probe(name: str, model: Any) -> CacheShape | None:
    """Bytes that the model caches per token; None if its forward pass depends on values, which meta tensors lack.

    Raises:
        UsageError: it does not run on a block cache.
    """
    try:
        return PackedForward(model).probe(name)
    except UsageError as error:
        if isinstance(error.__cause__, NEEDS_NUMBERS):
            return None
        raise


def _probe_unquantized(
    name: str, config: Any, dtype: torch.dtype, trust_remote_code: bool, num_layers: int | None
) -> CacheShape | None:
    """The same with unquantized weights, which cache as much; None if the weights are unquantized."""
    if settings_of(config) is None:
        return None
    plain = copy.deepcopy(config)
    forget_quantization(plain)
    return _probe(name, first_layers(model_on_paper(name, None, plain, dtype, trust_remote_code), num_layers))


def describe_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, load_format: str = "auto"
) -> Any:
    """A model's transformers tokenizer, without its weights.

    Raises:
        RunError: there is none, or it is broken.
    """
    folder = small_files(name, revision, trust_remote_code, not dummy.is_dummy(name, load_format))
    return tokenizer_in(name, folder, trust_remote_code, not dummy.is_dummy(name, load_format))


def small_files(name: str, revision: str | None, trust_remote_code: bool, has_weights: bool = True) -> Path:
    """The folder of a model; of a hub id only the files beside the weights are fetched.

    Args:
        name: a local folder, a hub id, a built-in name or a shape.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: fetch Python files too.
        has_weights: its weights are wanted, now or later.

    Raises:
        UsageError: it is something else than a causal LM.
        RunError: no such folder, and no hub that has it.
    """
    return model_folder(name, revision, trust_remote_code, has_weights, fetches_weights=False)


def _has_weights(name: str, folder: Path) -> bool:
    """Whether the weights are here whole; a local folder must have them, a hub id's may be fetched later.

    Raises:
        RunError: a local folder's are missing or broken.
    """
    try:
        check_weights(name, folder)
    except SpecdecError:
        if name.startswith("builtin:") or given_path(name).exists():
            raise
        return False
    return True


def _decoder(obstacle: str | None) -> str:
    return "own" if obstacle is None else f"transformers ({obstacle})"


def _graphs(name: str, config: Any, place: torch.device) -> str:
    obstacle = graphs_obstacle(name, config, place)
    return "transformers, graphs" if obstacle is None else f"transformers ({obstacle})"


def _place(device: str) -> torch.device:
    """The device by its name, whether it is here or not."""
    return device_named(device) if device == "auto" else torch.device(device)


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
