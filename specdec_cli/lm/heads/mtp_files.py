"""Multi-token-prediction modules in a target's own checkpoint: how families name their tensors, and which are there.

Sources: transformers (`MtpModel`), vLLM (`deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_next_mtp.py`, `mimo_mtp.py`) and
MiMo's own code. A module's embedding and output layer are the target's: copies of them in its checkpoint are not read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.checkpoint import find_checkpoint
from specdec_cli.lm.files.dequantize import descriptions, plain_weights
from specdec_cli.lm.files.draft_formats import tensor_names
from specdec_cli.lm.files.gguf_folder import gguf_header_of
from specdec_cli.lm.files.headers import read_headers, read_tensors
from specdec_cli.lm.files.quantization import is_dequantized, method_of, stays_quantized, take_form
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.files.weights_files import weights_files

_AGAIN = "copy or download the model again"
_HINT = "name a draft model or a draft head, or `--draft ngram`"
_QWEN_PARTS = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
_LAYER_PARTS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
_MIMO_PARTS = {
    "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm",
}  # fmt: skip
_COPIES = ("embed_tokens", "shared_head.head")


@dataclass(frozen=True, slots=True)
class MtpNaming:
    """How a family names the tensors of its modules.

    Args:
        family: for people.
        pattern: of a name, with the groups `index` (of a module; without it the tensor is shared by all) and `part`.
        parts: of a module beside its layer, by their published names.
        hidden_first: its projection reads [hidden state; embedding], not [embedding; hidden state].
        counts_on: modules are numbered behind the target's layers.
    """

    family: str
    pattern: re.Pattern[str]
    parts: Mapping[str, str]
    hidden_first: bool = False
    counts_on: bool = False


_START = r"(?:model\.|language_model\.)*"
_NAMINGS = (
    MtpNaming("Qwen", re.compile(rf"{_START}mtp\.(?:layers\.(?P<index>\d+)\.)?(?P<part>.+)"), _QWEN_PARTS),
    MtpNaming("MiMo", re.compile(rf"{_START}mtp_layers\.(?P<index>\d+)\.(?P<part>.+)"), _MIMO_PARTS, hidden_first=True),
    MtpNaming(
        "DeepSeek", re.compile(rf"{_START}layers\.(?P<index>\d+)\.(?P<part>.+)"), _LAYER_PARTS, counts_on=True
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MtpModules:
    """The modules of a checkpoint.

    Args:
        name: of the target, for messages.
        folder: of the checkpoint.
        config: of the target, quantization taken out.
        naming: of its tensors.
        tensors: of each module in order, the published name by the common one: `enorm`, `hnorm`, `eh_proj`, `norm`, and
            the layer's below `layers.0.`.
        form: settings of quantized weights that are undone here; None for plain ones.
        trusts_code: the target's classes may be code of its own.
    """

    name: str
    folder: Path
    config: Any
    naming: MtpNaming
    tensors: tuple[dict[str, str], ...]
    form: dict[str, Any] | None
    trusts_code: bool

    def __str__(self) -> str:
        """For people: how many there are."""
        return f"{len(self.tensors)} MTP module{'s' if len(self.tensors) > 1 else ''}"

    def read(self, module: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a module by common names, quantized ones undone.

        Raises:
            RunError: files that cannot be read, or quantized weights whose parts do not fit each other.
            UsageError: a number that is not finite.
        """
        tensors = self._plain(module, read_tensors(self._files, set(self.tensors[module].values())), dtype)
        for common, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                message = (
                    f"the tensor `{self.published(module, common)}` of `{self.name}` holds numbers that are not finite"
                )
                raise UsageError(message, _AGAIN)
        return tensors

    def published(self, module: int, common: str) -> str:
        """The published name of a tensor, for messages."""
        return self.tensors[module].get(common, common)

    def check(self) -> None:
        """Refuse modules that lack a tensor beside their layer, or are quantized in a form that is not undone here.

        Raises:
            UsageError: they are or do.
        """
        form = stays_quantized(self.config) or (method_of(self.config) if is_dequantized(self.config) else None)
        if form is not None:
            raise UsageError(f"the MTP modules of `{self.name}` are quantized by `{form}`, which is not read", _HINT)
        for module in self.tensors:
            for published, common in self.naming.parts.items():
                if not any(name.startswith(f"{common}.") for name in module):
                    message = f"the MTP modules of `{self.name}` lack the tensor `{published}.weight`"
                    raise UsageError(message, _AGAIN)

    def num_bytes(self, itemsize: int) -> int:
        """Memory of all modules' weights once they are loaded, in numbers of `itemsize` bytes."""
        from specdec_cli.lm.files.fake_tensors import fake_tensors  # torch's fake tensors take a second to import

        with fake_tensors():
            modules = self.headers(torch.float32)
            numbers = {
                self.published(i, name): tensor.numel() for i, its in enumerate(modules) for name, tensor in its.items()
            }
        return sum(numbers.values()) * itemsize

    def headers(self, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """The tensors of each module by common names, as fake tensors; asked within `fake_tensors`.

        Raises:
            RunError: files that cannot be read, or quantized weights whose parts do not fit each other.
        """
        headers = read_headers(self._files)
        return [self._plain(module, headers, dtype) for module in range(len(self.tensors))]

    @property
    def _files(self) -> list[Path]:
        return [self.folder / file for file in weights_files(self.name, self.folder)]

    def _plain(self, module: int, found: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """A module's tensors by common names, from those of the files."""
        names = self.tensors[module]
        tensors = {name: found[name] for name in names.values()}
        if self.form is not None:
            tensors = plain_weights(self.name, tensors, self.form, descriptions(self._files), dtype)
        layers = {name.rpartition(".")[0]: common.rpartition(".")[0] for common, name in names.items()}
        parts = {name: name.rpartition(".") for name in tensors}
        return {f"{layers[parts[name][0]]}.{parts[name][2]}": tensor for name, tensor in tensors.items()}


def read_mtp(
    name: str, revision: str | None = None, trust_remote_code: bool = False, has_weights: bool = True
) -> MtpModules:
    """The modules in a target's checkpoint.

    Args:
        name: of the target: a local folder or a hub id.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: its classes may be code of its own.
        has_weights: fetch its weights too.

    Raises:
        UsageError: it has none, lacks one of their tensors, or they are in a form that is not read.
        RunError: its files cannot be read.
    """
    checkpoint = find_checkpoint(name, revision, trust_remote_code, has_weights)
    with quiet():
        config = checkpoint.config(trust_remote_code)
    modules = find_mtp(name, checkpoint.folder, config, trust_remote_code)
    header = gguf_header_of(name, checkpoint.folder)
    if header is not None and header.has_mtp:
        hint = "run it with --engine llamacpp, or give the model's folder with safetensors"
        raise UsageError(f"the MTP modules of `{name}` are in a GGUF file, from which they are not read", hint)
    if modules is None:
        raise UsageError(f"`{name}` has no MTP modules, which `--draft mtp` guesses with", _HINT)
    modules.check()
    return modules


def find_mtp(name: str, folder: Path, config: Any, trust_remote_code: bool = False) -> MtpModules | None:
    """The modules in a checkpoint, by its index or the header of its file; None without any.

    Args:
        name: of the target, for messages.
        folder: of its files.
        config: of the target, left as it is.
        trust_remote_code: its classes may be code of its own.
    """
    names = tensor_names(folder)
    num_layers = int(config.get_text_config().num_hidden_layers)
    for naming in _NAMINGS:
        modules = _modules(naming, names, num_layers)
        if modules:
            plain = copy.deepcopy(config)
            form = take_form(plain)
            return MtpModules(name, folder, plain, naming, modules, form, trust_remote_code)
    return None


def _modules(naming: MtpNaming, names: list[str], num_layers: int) -> tuple[dict[str, str], ...]:
    """The tensors of each module, in order."""
    own: dict[int, dict[str, str]] = {}
    shared: dict[str, str] = {}
    for name in names:
        match = naming.pattern.fullmatch(name)
        if match is None:
            continue
        index = match["index"]
        place = None if index is None else int(index) - (num_layers if naming.counts_on else 0)
        common = _common(naming, match["part"])
        if common is not None and (place is None or place >= 0):
            (shared if place is None else own.setdefault(place, {}))[common] = name
    return tuple(shared | own[place] for place in sorted(own) if _is_module(naming, shared | own[place]))


def _is_module(naming: MtpNaming, tensors: Mapping[str, str]) -> bool:
    """Whether tensors are a module's: a layer without anything before it is none."""
    return any(name.startswith(f"{common}.") for name in tensors for common in naming.parts.values())


def _common(naming: MtpNaming, part: str) -> str | None:
    """A tensor's common name; None for a copy of the target's."""
    layer, _, kind = part.rpartition(".")
    if layer in _COPIES:
        return None
    # A quantized weight has several parts: its scales go where it goes.
    own = naming.parts.get(layer)
    return f"layers.0.{part}" if own is None else f"{own}.{kind}"
