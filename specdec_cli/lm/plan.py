"""The plan of a model: its files, configuration, dtype, form and obstacles, each read once."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.lm.decoders import AUTO as AUTO_DECODER
from specdec_cli.lm.decoders import own_obstacle
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import adapter_of
from specdec_cli.lm.files.checkpoint import Checkpoint, find_checkpoint
from specdec_cli.lm.files.generation import Generation, read_generation
from specdec_cli.lm.files.gguf_folder import gguf_header_of
from specdec_cli.lm.files.gguf_header import GgufHeader
from specdec_cli.lm.files.headers import first_dtype
from specdec_cli.lm.files.names import AUTO, BUILTIN, DRAFT_TOKENS, is_local, native_error
from specdec_cli.lm.files.plain_config import CONFIGS, PlainConfig
from specdec_cli.lm.files.quantization import (
    forget_quantization,
    is_dequantized,
    take_form,
)
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.files.weights_files import check_weights, weights_files
from specdec_cli.lm.kernels.kinds import Kind, kind_for
from specdec_cli.lm.llama.native import missing
from specdec_cli.lm.llama.plain_modules import is_plain, plain_on_meta
from specdec_cli.lm.machine.devices import device_named, device_of
from specdec_cli.lm.plan_checks import faults_of, raised_by
from specdec_cli.lm.settings import ModelSettings

if TYPE_CHECKING:
    from specdec_cli.lm.integer_blocks import IntegerWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NATIVE, DEQUANTIZED = "native", "dequantized"


@dataclass(frozen=True)
class ModelPlan:
    """A model as it will be loaded. What it says of the model is read when it is first asked for, and once.

    Args:
        name: a local folder, a GGUF file, a hub id, a built-in name or a shape.
        settings: how it is loaded.
        decoder: auto (our own where it knows the shape; on a GPU graphs where they can be recorded), transformers, or
            graphs (transformers', recorded, on a GPU).
        generation_config: auto (the model's own), none (only its end tokens), or a folder with another.
        trust_remote_code: run Python code that comes with the model.
        fetches_weights: fetch a hub id's weights; without them the configuration tells the sizes.
    """

    name: str
    settings: ModelSettings = field(default_factory=ModelSettings)
    decoder: str = AUTO_DECODER
    generation_config: str = AUTO
    trust_remote_code: bool = False
    fetches_weights: bool = True

    # What it is.

    @cached_property
    def is_dummy(self) -> bool:
        """Whether its weights are random numbers, of which nothing is read."""
        return dummy.is_dummy(self.name, self.settings.load_format)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Its files on this machine."""
        its, fetches = self.settings.revision, self.fetches_weights
        return find_checkpoint(self.name, its, self.trust_remote_code, not self.is_dummy, fetches_weights=fetches)

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.checkpoint.folder

    @cached_property
    def header(self) -> GgufHeader | None:
        """The header of the GGUF file with its weights; None without one."""
        return None if self.is_dummy else gguf_header_of(self.name, self.folder)

    @cached_property
    def stored_config(self) -> Any:
        """Its configuration, which describes the weights as the files hold them; transformers', but for plain torch."""
        return self.plain_config if self.is_plain_torch else self.checkpoint.config(self.trust_remote_code)

    @cached_property
    def _plain(self) -> tuple[Any, dict[str, Any] | None]:
        """The configuration of its weights as they are loaded, and the settings of a form that is undone for that."""
        config = copy.deepcopy(self.stored_config)
        if not self.is_dummy:
            return config, take_form(config)
        forget_quantization(config)
        return config, None

    @property
    def config(self) -> Any:
        """Its configuration, without a quantization that is undone when it is loaded."""
        return self._plain[0]

    @property
    def undone(self) -> dict[str, Any] | None:
        """The `quantization_config` of weights that `files.dequantize` undoes; None for others."""
        return self._plain[1]

    @property
    def drafted_tokens(self) -> Any:
        """The tokens of a draft that has not all of its tokenizer's, by its configuration; None of other models."""
        return None if self.is_dummy else self.checkpoint.content.get(DRAFT_TOKENS)

    @cached_property
    def plain_config(self) -> PlainConfig | None:
        """The configuration of a model in plain torch, of the built-in pair for every decoder; None of others."""
        if self.name not in BUILTIN and not self.is_plain_torch:
            return None
        content = self.checkpoint.content
        config: PlainConfig = CONFIGS[content["model_type"]].from_dict(content)
        return config

    @property
    def text_config(self) -> Any:
        """The part of its configuration that describes the language model, for its numbers alone."""
        return self.plain_config or self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Its decoder layers."""
        return int(self.text_config.num_hidden_layers)

    @cached_property
    def is_complete(self) -> bool:
        """Whether its weights are on this machine; a local folder must have them, a hub id's may be fetched later."""
        if self.is_dummy:
            return False
        try:
            check_weights(self.name, self.folder)
        except SpecdecError:
            if self.fetches_weights or self.name.startswith("builtin:") or is_local(self.name):
                raise
            return False
        return True

    @cached_property
    def device(self) -> torch.device:
        """Where it runs, whether that is here or not."""
        return device_of(self.settings.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that it runs in: the one asked for, else its configuration's, its first weights', or float32.

        Where weights stay as they are in their files, it is bfloat16 instead of float16.
        """
        named = DTYPES.get(self.settings.dtype)
        if named is not None:
            return named
        config = self.plain_config or self.config
        given = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        if given is None and self.is_complete:
            given = first_dtype([self.folder / file for file in weights_files(self.name, self.folder)])
        own = str(given or "float32").removeprefix("torch.")
        if own == "float16" and (self.settings.quantize == "int4" or self._float16_obstacle() is None):
            own = "bfloat16"  # what our own decoder has for the rest of a model in blocks
        if own not in DTYPES:
            message = f"`{self.name}` is in `{own}`, which the engine does not support"
            raise UsageError(message, f"use --dtype with {', '.join(DTYPES)}")
        return DTYPES[own]

    @cached_property
    def outline(self) -> Any:
        """The model on the meta device: every size, no memory. It must not be changed."""
        return self._outline_in(self.dtype)

    def _outline_in(self, dtype: torch.dtype) -> Any:
        if self.is_plain_torch:
            return plain_on_meta(self.config, dtype)
        return dummy.on_meta(self.config, dtype, self.trust_remote_code)

    @cached_property
    def is_plain_torch(self) -> bool:
        """Whether transformers' model is not needed: our own decoder runs one of the pair, or a GGUF file's blocks."""
        its = self.settings
        is_usual = self.decoder == AUTO_DECODER and self.device.type == "cpu" and its.dtype != "float16"
        if self.is_dummy or not is_usual:
            return False
        if self.name in BUILTIN:
            return its.compute != NATIVE and missing() is None
        if its.compute == DEQUANTIZED or its.quantize != "none" or self.header is None or missing() is not None:
            return False
        from specdec_cli.lm.gguf_blocks import blocks_obstacle

        is_whole = adapter_of(self.folder) is None and blocks_obstacle(self.header) is None
        return is_whole and is_plain(self.checkpoint.content)

    @cached_property
    def is_native(self) -> bool:
        """Whether its products take the blocks of its GGUF file, or those that hold its quantized weights' numbers.

        Raises:
            UsageError: that was asked for, and is not possible.
        """
        compute = self.settings.compute
        is_plain = not self.is_dummy and self.header is None and self.undone is None
        if compute == DEQUANTIZED or not self.is_complete or (compute == AUTO and is_plain):
            return False
        obstacle = self._native_obstacle(self.outline)
        if obstacle is not None and compute == NATIVE:
            raise native_error(self.name, obstacle)
        return obstacle is None

    @property
    def is_in_blocks(self) -> bool:
        """Whether its products take blocks: those that hold its quantized weights' numbers, or that are made in 4 bits.

        Raises:
            UsageError: native blocks were asked for, and are not possible.
        """
        return self.is_native or self.settings.quantize == "int4"

    def kind(self, dtype: torch.dtype) -> Kind:
        """The kind of its linear layers, if its weights are loaded in some dtype."""
        return "blocks" if self.is_in_blocks else kind_for(dtype, self.device, self.settings.quantize)

    def _native_obstacle(self, outline: Any) -> str | None:
        if self.header is None and self.integers.reason is not None:
            return self.integers.reason
        if adapter_of(self.folder) is not None:
            return "an adapter is merged into plain numbers"
        if self.settings.quantize != "none":
            return f"its weights are to be quantized again, to {self.settings.quantize}"
        obstacle = own_obstacle(outline, self.decoder, self.device)
        if obstacle is None and self.header is not None:
            from specdec_cli.lm.gguf_blocks import blocks_obstacle

            return blocks_obstacle(self.header)
        return obstacle or self.integers.obstacle(outline)

    @property
    def dequantized_because(self) -> str | None:
        """Why its weights in whole numbers are dequantized under `auto`; None if they are not."""
        its = self.settings
        is_asked = its.compute == AUTO and its.quantize == "none" and self.undone is not None and self.is_complete
        return self._native_obstacle(self.outline) if is_asked and self.integers.layers and not self.is_native else None

    @cached_property
    def integers(self) -> IntegerWeights:
        """Its quantized weights in whole numbers."""
        from specdec_cli.lm.integer_blocks import integer_weights

        return integer_weights(self)

    def _float16_obstacle(self) -> str | None:
        """Why weights cannot stay as their files hold them beside bfloat16; asked of a model in float16."""
        is_plain = self.undone is None and self.header is None
        if is_plain or self.settings.compute == DEQUANTIZED or not self.is_complete:
            return "its weights are plain"
        return self._native_obstacle(self._outline_in(torch.bfloat16))

    @cached_property
    def generation(self) -> Generation:
        """The sampling parameters and end tokens that its files suggest."""
        return Generation() if self.is_dummy else read_generation(self.folder, self.generation_config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the generation configuration, else by the model's; nothing ends random text."""
        config = self.plain_config or self.config
        given = (
            self.generation.eos_token_ids or None,
            *(getattr(part, "eos_token_id", None) for part in _both(config)),
        )
        eos = None if self.is_dummy else next((ids for ids in given if ids is not None), None)
        return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)

    # What keeps it from running.

    @cached_property
    def faults(self) -> tuple[SpecdecError, ...]:
        """Errors of the model or its settings on any machine, in the order in which loading raises them."""
        return faults_of(self)

    @cached_property
    def obstacles(self) -> tuple[SpecdecError, ...]:
        """Reasons why the model does not run here: its faults, and a device that this machine lacks."""
        return self.faults or tuple(raised_by(self, [lambda: device_named(self.settings.device)]))

    def check(self) -> None:
        """Refuse a model that cannot run anywhere, by its first fault.

        Raises:
            UsageError: an architecture that cannot be a target or a draft, or settings that do not fit it.
            RunError: no such model, or files that are broken or do not belong together.
        """
        for fault in self.faults:
            raise fault

    @property
    def is_mapped(self) -> bool:
        """Whether its files hold plain numbers, which are not copied before a decoder takes them."""
        is_undone = self.header is not None or self.undone is not None
        return not (self.is_dummy or is_undone or (not self.is_plain_torch and is_dequantized(self.config)))

    def quietly(self) -> AbstractContextManager[None]:
        """A `quiet` context; transformers is imported first if it reads this model."""
        if not self.is_plain_torch:
            import transformers  # noqa: F401  # `quiet` is for one that is imported
        return quiet()


def _both(config: Any) -> tuple[Any, Any]:
    return config, config.get_text_config()
