"""Read a checkpoint into transformers' model: plain numbers, whatever form its files have.

What is quantized or in a GGUF file is dequantized, an adapter is merged, and a weight that is missing or left over is
an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec_cli.errors import WeightsError
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.classes import auto_class_of
from specdec_cli.lm.files.dequantize import descriptions, plain_weights
from specdec_cli.lm.files.gguf_folder import gguf_of
from specdec_cli.lm.files.headers import differing, is_pickled, read_headers, read_tensors
from specdec_cli.lm.files.merging import merged
from specdec_cli.lm.files.quantization import check_finite, give_dtype, is_dequantized, settings_of
from specdec_cli.lm.files.weights_files import weights_files
from specdec_cli.lm.forward.implementations import attention_of

if TYPE_CHECKING:
    from specdec_cli.lm.files.gguf_weights import Progress

ON_PAPER = "batched_mm"  # experts in one product each, with no branch on what a router chose
Form = dict[str, Any] | None
"""The `quantization_config` of weights that `files.dequantize` undoes; None for others."""
_NO_ADAPTER = {"subfolder": "none"}
"""Where transformers looks for an adapter beside a whole model, which it would apply: nowhere."""


def registered_attention(config: Any) -> str:
    """The attention that a family takes (`attention_of`), known to transformers from now on."""
    import specdec_cli.lm.forward.apart  # noqa: F401  # it and the two that it imports register themselves

    return attention_of(config)


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
        WeightsError: the files do not hold the model that the configuration describes.
    """
    if folder is not None and gguf_of(folder) is None:
        model = model_from_files(name, folder, config, dtype, trust_remote_code, form, is_on_paper=True)
    else:
        model = auto_class_of(config).from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=registered_attention(config),
            experts_implementation=ON_PAPER,
            trust_remote_code=trust_remote_code,
        )
    return model.eval()


def model_from_files(
    name: str,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    form: Form = None,
    *,
    is_on_paper: bool = False,
    has_our_attention: bool = True,
    progress: Progress | None = None,
) -> Any:
    """The transformers model in plain numbers, every weight of which came from its files.

    Args:
        name: for messages.
        folder: of the model, with its weights.
        config: of the model.
        dtype: of the weights.
        trust_remote_code: run Python code that comes with the model.
        form: settings of quantized weights that are undone here.
        is_on_paper: headers are read in the place of numbers; asked within `paper.on_paper`.
        has_our_attention: attention is replaced by ours where it can be; else it is transformers' default.
        progress: told how many bytes of a GGUF file are dequantized, and of how many.

    Raises:
        WeightsError: the files do not hold the model that the configuration describes.
        RunError: an adapter does not fit it.
    """
    settings, has_bfloat16 = settings_of(config), is_dequantized(config)  # transformers may take the form out
    how: dict[str, Any] = {
        "dtype": dtype,
        **({"attn_implementation": registered_attention(config)} if has_our_attention else {}),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, by name
        "adapter_kwargs": _NO_ADAPTER,
    }
    if gguf_of(folder) is not None:
        from specdec_cli.lm.files.gguf_weights import load_gguf

        model, report = load_gguf(name, folder, config, how, progress)
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
        raise WeightsError(said, "copy or download the model again")
    if has_bfloat16:
        give_dtype(model, dtype)
    if (has_bfloat16 or form is not None) and not is_on_paper:
        check_finite(name, model)
    return merged(name, folder, model, is_on_paper)


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
