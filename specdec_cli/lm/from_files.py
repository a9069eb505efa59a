"""Read a checkpoint into transformers' model: plain numbers, whatever form its files have.

What is quantized or in a GGUF file is dequantized, an adapter is merged, and a weight that is missing or left over is
an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec_cli.errors import WeightsError
from specdec_cli.lm.files.classes import auto_class_of
from specdec_cli.lm.files.contents import ADAPTER
from specdec_cli.lm.files.dequantize import descriptions, plain_weights
from specdec_cli.lm.files.headers import differing, is_pickled, read_headers, read_tensors
from specdec_cli.lm.files.merging import merged
from specdec_cli.lm.files.quantization import check_finite, give_dtype, is_dequantized, settings_of
from specdec_cli.lm.files.reading import other_shape
from specdec_cli.lm.files.weights_files import weights_files
from specdec_cli.lm.forward.implementations import attention_of

if TYPE_CHECKING:
    from specdec_cli.lm.files.gguf_weights import Progress
    from specdec_cli.lm.plan import ModelPlan

FAKE_EXPERTS = "batched_mm"  # experts in one product each, with no branch on what a router chose


def registered_attention(config: Any) -> str:
    """The attention that a family takes (`attention_of`), known to transformers from now on."""
    import specdec_cli.lm.forward.registration  # noqa: F401  # which registers when it is imported

    return attention_of(config)


def fake_model(plan: ModelPlan) -> Any:
    """The model that a plan would decode with, as its checks see it; asked within `fake_tensors`.

    Raises:
        WeightsError: the files do not hold the model that the configuration describes.
    """
    if plan.is_plain_torch:
        return plan.outline
    if plan.is_complete and plan.header is None:
        return model_from_files(plan, is_fake=True).eval()
    return fake_model_of(plan.config, plan.dtype, plan.trust_remote_code)


def fake_model_of(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model of a configuration in plain numbers, in evaluation mode; asked within `fake_tensors`."""
    model = auto_class_of(config).from_config(
        copy.deepcopy(config),
        dtype=dtype,
        attn_implementation=registered_attention(config),
        experts_implementation=FAKE_EXPERTS,
        trust_remote_code=trust_remote_code,
    )
    return model.eval()


def model_from_files(
    plan: ModelPlan,
    *,
    is_fake: bool = False,
    has_our_attention: bool = True,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Any:
    """The transformers model in plain numbers, every weight of which came from its files.

    Args:
        plan: of the model, whose weights are on this machine.
        is_fake: headers are read in the place of numbers; asked within `fake_tensors`.
        has_our_attention: attention is replaced by ours where it can be; else it is transformers' default.
        dtype: of the numbers; None is the plan's.
        progress: told how many bytes of a GGUF file are dequantized, and of how many.

    Raises:
        WeightsError: the files do not hold the model that the configuration describes.
        RunError: an adapter does not fit it.
    """
    name, folder, config, dtype, form = plan.name, plan.folder, plan.config, dtype or plan.dtype, plan.undone
    settings, has_bfloat16 = settings_of(config), is_dequantized(config)  # transformers may take the form out
    how: dict[str, Any] = {
        "dtype": dtype,
        **({"attn_implementation": registered_attention(config)} if has_our_attention else {}),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, by name
    }
    if plan.header is not None:
        from specdec_cli.lm.files.gguf_tensors import tensor_names
        from specdec_cli.lm.files.gguf_weights import load_gguf

        model, report = load_gguf(plan, partial(tensor_names, plan.header, plan.outline), how, progress)
    elif is_fake or form is not None or (folder / ADAPTER).is_file():  # transformers would apply an adapter in it
        outline = plan.outline
        files = [folder / file for file in weights_files(name, folder)]
        own_config = copy.deepcopy(outline.config)
        tensors = _tied_headers(outline, own_config, files, dtype) if is_fake else read_tensors(files)
        if form is not None:
            tensors = plain_weights(name, tensors, form, descriptions(files), dtype)
        how |= {"config": own_config} | ({"experts_implementation": FAKE_EXPERTS} if is_fake else {})
        model, report = type(outline).from_pretrained(None, state_dict=tensors, **how)
    else:
        how |= {"trust_remote_code": plan.trust_remote_code, "local_files_only": True}
        how["use_safetensors"] = not is_pickled(weights_files(name, folder)[0])
        model, report = auto_class_of(config).from_pretrained(folder, config=config, **how)
    unread = _unread_beside_weights(model, report["unexpected_keys"]) if settings is None else []
    wrong = [f"`{key}` is missing" for key in sorted(report["missing_keys"])]
    wrong += [other_shape(*mismatch) for mismatch in sorted(report["mismatched_keys"])]
    wrong += [f"`{key}` is not read" for key in unread]
    if wrong:
        message = f"the weights of `{name}` do not match its `config.json`: {wrong[0]}"
        raise WeightsError(message, "copy or download the model again")
    if has_bfloat16:
        give_dtype(model, dtype)
    if (has_bfloat16 or form is not None) and not is_fake:
        check_finite(name, model)
    return merged(plan.checkpoint, model, is_fake)


def _tied_headers(outline: Any, config: Any, files: list[Path], dtype: torch.dtype) -> dict[str, Any]:
    """A checkpoint's tensors as fake ones, where transformers cannot ask whether two that a model ties are one.

    It ties what is equal, and otherwise keeps both whatever the configuration says, which says so afterwards.
    """
    headers, pairs = read_headers(files), outline.all_tied_weights_keys
    own = differing(files, pairs, dtype)
    if own:
        for its in (config, config.get_text_config()):
            its.tie_word_embeddings = False
        return headers
    return {key: header for key, header in headers.items() if pairs.get(key) not in headers}


def _unread_beside_weights(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Tensors that a file holds of a layer and that the layer does not read: a scale, a bias, a part of the weight."""
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | Conv1D)}
    return sorted(key for key in unexpected if key.rpartition(".")[0] in layers)
