"""Facts about a model before its weights are read: limits, end tokens, memory. No large file is downloaded."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

import torch

from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.lm.decoders import AUTO, graphs_obstacle, own_obstacle, tries_graphs
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.checkpoint import clear_errors
from specdec_cli.lm.files.lengths import max_context
from specdec_cli.lm.files.names import NONE
from specdec_cli.lm.files.quantization import forget_quantization, method_of, settings_of, stays_quantized
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.files.weights_files import stored_as, stored_bytes
from specdec_cli.lm.first_layers import added_bytes, first_layers, weights_of_first_layers
from specdec_cli.lm.forward.forward import CacheShape
from specdec_cli.lm.from_files import fake_model, fake_model_of
from specdec_cli.lm.heads.mtp_files import MtpModules, find_mtp
from specdec_cli.lm.kernels.kinds import QUANTIZED, takes_blocks
from specdec_cli.lm.kernels.packing import weights_of
from specdec_cli.lm.llama.families import family_of, kept_as
from specdec_cli.lm.llama.model_fields import shape_of
from specdec_cli.lm.load_memory import block_bytes
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.settings import ModelArguments, ModelSettings
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
        decoder: whose forward runs it: `own`, `own, native` on blocks, `own, dequantized` and why, `transformers` and
            why.
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
    decoder: str = AUTO,
    trust_remote_code: bool = False,
    self_draft: SelfDraft | None = None,
    **settings: Unpack[ModelArguments],
) -> ModelFacts:
    """The facts about a model by its name, as `model_facts` reads them; nothing is fetched but small files."""
    plan = ModelPlan(name, ModelSettings(**settings), decoder, NONE, trust_remote_code, fetches_weights=False)
    return model_facts(plan, self_draft)


def model_facts(plan: ModelPlan, self_draft: SelfDraft | None = None) -> ModelFacts:
    """Read a model's headers, and refuse it by name if the engine would.

    The engine's own checks, loader and probe run with fake tensors: what they raise, loading raises.

    Raises:
        UsageError: an architecture that cannot be a target or a draft, or not recorded; int8 on a GPU.
        RunError: no such model, or files that are broken or do not belong together.
    """
    plan.check()
    name, config, quantize, place = plan.name, plan.config, plan.settings.quantize, plan.device
    with quiet(), clear_errors(name):
        modules = find_mtp(name, plan.folder, plan.stored_config, plan.trust_remote_code) if plan.is_complete else None
        with _fake_tensors_for(plan):
            whole = fake_model(plan)
            obstacle = own_obstacle(whole, plan.decoder, place)
            shared = weights_of(whole, kept_as(plan.kind(plan.dtype), obstacle))
            if plan.is_in_blocks:
                sizes = block_bytes(plan)
                shared = [replace(weight, num_bytes=sizes.get(weight.name, weight.num_bytes)) for weight in shared]
            draft = self_draft or SelfDraft()
            kind = QUANTIZED.get(draft.quantize, plan.kind(plan.dtype))
            if self_draft is not None:
                _check_self_draft(self_draft, name, config, obstacle, "blocks" if plan.is_in_blocks else quantize)
            model = first_layers(whole, draft.layers)
            if obstacle is None:
                shape: CacheShape | None = _own_cache(model)
            else:
                shape = _probe(name, model) or _probe_unquantized(plan, draft.layers)
            left = weights_of_first_layers(shared, whole, draft.layers)
        packed = left if draft.quantize == "none" else weights_of(model, kind)
        text = model.config.get_text_config()
        if tries_graphs(plan.decoder, place):
            obstacle = graphs_obstacle(name, config, place)
            decoder = "transformers, graphs" if obstacle is None else f"transformers ({obstacle})"
        else:
            decoder = "own" if obstacle is None else f"transformers ({obstacle})"
        if obstacle is None and plan.dequantized_because is not None:
            decoder = f"own, dequantized ({plan.dequantized_because})"
        return ModelFacts(
            name=name if self_draft is None else self_draft.spec,
            architecture=config.model_type,
            dtype=str(plan.dtype).removeprefix("torch."),
            max_context=max_context(text, None),
            embedding_size=int(text.vocab_size) if shape is None else shape.vocab_size,
            hidden_size=getattr(text, "hidden_size", None),
            num_parameters=dummy.num_parameters(model),
            weights_bytes=added_bytes(packed, [] if self_draft is None else shared),
            weights_counted_in="headers of its files" if plan.is_complete else "configuration",
            kv_bytes_per_token=None if shape is None else shape.kv_bytes_per_token,
            state_bytes=0 if shape is None else shape.state_bytes,
            prefix_state_bytes=0 if shape is None else shape.prefix_state_bytes,
            eos_token_ids=plan.eos_token_ids,
            is_mixture_of_experts=num_experts(text) > 1,
            is_complete=plan.is_complete,
            load_format="dummy" if plan.is_dummy else "auto",
            read_bytes=int(model_traffic(config, packed, 0).bytes_moved(1, 0)),
            decoder="own, native" if takes_blocks(kind) else decoder,
            stored_as=stored_as(name, plan.folder, method_of(plan.stored_config)) if plan.is_complete else None,
            stored_bytes=stored_bytes(name, plan.folder) if plan.is_complete else None,
            num_mtp_modules=0 if modules is None else len(modules.tensors),
            mtp_bytes=None if modules is None else _mtp_bytes(modules, plan.dtype),
        )


def _fake_tensors_for(plan: ModelPlan) -> AbstractContextManager[None]:
    """Context in which a plan's model loads without numbers; that of the built-in pair does so by itself."""
    if plan.is_plain_torch:
        return nullcontext()
    from specdec_cli.lm.files.fake_tensors import fake_tensors  # torch's compiler behind it takes two seconds to import

    return fake_tensors()


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


def _own_cache(model: Any) -> CacheShape:
    """Cache of our own decoder, which stores the keys and values of every layer."""
    shape = shape_of(model.config, family_of(model))
    return CacheShape(shape.kv_bytes(model.config.num_hidden_layers, model.dtype), int(model.config.vocab_size))


def _probe(name: str, model: Any) -> CacheShape | None:
    """Bytes that the model caches per token; None if its forward pass depends on values, which meta tensors lack.

    Raises:
        UsageError: it does not run on a block cache.
    """
    from specdec_cli.lm.families.patches import packed_forward  # transformers' models behind it take seconds to import
    from specdec_cli.lm.files.fake_tensors import NEEDS_NUMBERS

    try:
        return packed_forward(model, name).probe()
    except UsageError as error:
        if isinstance(error.__cause__, NEEDS_NUMBERS):
            return None
        raise


def _probe_unquantized(plan: ModelPlan, num_layers: int | None) -> CacheShape | None:
    """The same with unquantized weights, which cache as much; None if the weights are unquantized."""
    if settings_of(plan.config) is None:
        return None
    plain = copy.deepcopy(plan.config)
    forget_quantization(plain)
    return _probe(plan.name, first_layers(fake_model_of(plain, plan.dtype, plan.trust_remote_code), num_layers))
