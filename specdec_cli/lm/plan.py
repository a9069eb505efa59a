"""The plan of a model: its files, configuration, dtype, form and obstacles, each read once, and how it is loaded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.lm.decoders import AUTO as AUTO_DECODER
from specdec_cli.lm.decoders import check_decoder, own_obstacle
from specdec_cli.lm.door import Tap
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import adapter_of, check_adapter, has_own_tokenizer
from specdec_cli.lm.files.architecture import check_architecture
from specdec_cli.lm.files.backend_tokenizer import BackendTokenizer
from specdec_cli.lm.files.checkpoint import Checkpoint, clear_errors, find_checkpoint, remote_code_error
from specdec_cli.lm.files.generation import Generation, read_generation
from specdec_cli.lm.files.gguf_folder import gguf_header_of, gguf_links, read_gguf_tokenizer
from specdec_cli.lm.files.gguf_header import GgufHeader
from specdec_cli.lm.files.headers import first_dtype
from specdec_cli.lm.files.lengths import max_context, own_context
from specdec_cli.lm.files.names import AUTO, BUILTIN, DRAFT_TOKENS, is_local, native_error
from specdec_cli.lm.files.origin import Origin, fingerprint
from specdec_cli.lm.files.plain_config import CONFIGS, PlainConfig
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
from specdec_cli.lm.int4_blocks import int4_bytes, quantize_model
from specdec_cli.lm.kernels.kinds import Kind, kind_for
from specdec_cli.lm.llama.native import missing
from specdec_cli.lm.llama.plain_modules import is_plain, plain_on_meta, read_builtin_model
from specdec_cli.lm.machine.device_memory import check_room
from specdec_cli.lm.oracle import Oracle, RoundingError
from specdec_cli.lm.reference import CHECKED_ROWS, OUTPUTS
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.lm.settings import ModelSettings
from specdec_cli.lm.transformers_lm import CacheArguments, TransformersLM

if TYPE_CHECKING:
    from specdec_cli.lm.blocks_check import BlocksOracle
    from specdec_cli.lm.files.gguf_weights import Progress
    from specdec_cli.lm.integer_blocks import IntegerWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NATIVE, DEQUANTIZED = "native", "dequantized"
_log = logging.getLogger(__name__)


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
        return _device(self.settings.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that it runs in: the one asked for, else its configuration's, its first weights', or float32.

        Where weights of safetensors are in blocks, it is bfloat16 instead of float16.
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
        if self.is_plain_torch:
            return plain_on_meta(self.config, self.dtype)
        return dummy.on_meta(self.config, self.dtype, self.trust_remote_code)

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
        obstacle = self._native_obstacle()
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

    def _native_obstacle(self) -> str | None:
        if self.header is None and self.integers.reason is not None:
            return self.integers.reason
        if adapter_of(self.folder) is not None:
            return "an adapter is merged into plain numbers"
        if self.settings.quantize != "none":
            return f"they are to be quantized again, to {self.settings.quantize}"
        obstacle = own_obstacle(self.outline, self.decoder, self.device)
        if obstacle is None and self.header is not None:
            from specdec_cli.lm.gguf_blocks import blocks_obstacle

            return blocks_obstacle(self.header)
        return obstacle or self.integers.obstacle(self.outline)

    @property
    def dequantized_because(self) -> str | None:
        """Why its weights in whole numbers are dequantized under `auto`; None if they are not."""
        its = self.settings
        is_asked = its.compute == AUTO and its.quantize == "none" and self.undone is not None and self.is_complete
        return self._native_obstacle() if is_asked and self.integers.layers and not self.is_native else None

    @cached_property
    def integers(self) -> IntegerWeights:
        """Its quantized weights in whole numbers."""
        from specdec_cli.lm.integer_blocks import integer_weights

        return integer_weights(self)

    def _float16_obstacle(self) -> str | None:
        """Why weights in safetensors cannot stay in blocks beside bfloat16; asked of a model in float16."""
        its = self.settings
        if self.undone is None or its.compute == DEQUANTIZED or its.quantize != "none" or not self.is_complete:
            return "its weights are plain"
        if adapter_of(self.folder) is not None or self.integers.reason is not None:
            return "they do not stay in blocks"
        outline = dummy.on_meta(self.config, torch.bfloat16, self.trust_remote_code)
        return own_obstacle(outline, self.decoder, self.device) or self.integers.obstacle(outline)

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
        first: list[Callable[[], object]] = [lambda: self.folder, self._check_architecture]
        first += [lambda: self.is_complete, lambda: self.dtype]
        more: list[Callable[[], object]] = [
            self._check_decoder,
            self._check_quantization,
            self._check_int4,
            self._check_gguf,
            self._check_adapter,
        ]
        more += [lambda: self.is_native, lambda: self.generation]
        faults = self._raised_by(first, stops=True)
        return tuple(faults or self._raised_by(more))

    @cached_property
    def obstacles(self) -> tuple[SpecdecError, ...]:
        """Reasons why the model does not run here: its faults, and a device that this machine lacks."""
        return (*self.faults, *(() if self.faults else self._raised_by([self._check_device])))

    def check(self) -> None:
        """Refuse a model that cannot run anywhere, by its first fault.

        Raises:
            UsageError: an architecture that cannot be a target or a draft, or settings that do not fit it.
            RunError: no such model, or files that are broken or do not belong together.
        """
        for fault in self.faults:
            raise fault

    def _raised_by(self, checks: Sequence[Callable[[], object]], *, stops: bool = False) -> list[SpecdecError]:
        raised: list[SpecdecError] = []
        for check in checks:
            try:
                with clear_errors(self.name), self._quiet():
                    check()
            except SpecdecError as error:
                raised.append(error.with_traceback(None))  # whose frames may hold a model
                if stops:
                    break
        return raised

    def _check_device(self) -> None:
        if self.device.type == "cuda" and (self.device.index or 0) >= torch.cuda.device_count():
            message = f"device `{self.settings.device}` is not here"
            raise RunError(message, "use --device cpu, or --device auto")

    def _check_architecture(self) -> None:
        if not self.is_plain_torch:
            check_architecture(self.name, self.config, self.trust_remote_code)

    def _check_decoder(self) -> None:
        if not self.is_plain_torch:
            check_decoder(self.name, self.decoder, self.config, self.device)

    def _check_quantization(self) -> None:
        if not self.is_dummy and not self.is_plain_torch:
            its_folder = self.folder if self.is_complete else None
            check_quantization(self.name, self.stored_config, its_folder, self.settings.quantize)

    def _check_int4(self) -> None:
        if self.settings.quantize != "int4" or self.is_plain_torch:
            return
        obstacle = own_obstacle(self.outline, self.decoder, self.device)
        if obstacle is not None:
            message = f"`{self.name}` cannot be quantized to int4, which takes our own decoder: {obstacle}"
            raise UsageError(message, "set quantize to int8 or none")

    def _check_gguf(self) -> None:
        if self.header is not None:
            from specdec_cli.lm.files.gguf_tensors import check_gguf_tensors

            check_gguf_tensors(self.name, self.header, self.outline)

    def _check_adapter(self) -> None:
        if self.is_complete and not self.is_plain_torch:
            check_adapter(self.name, self.folder, stays_quantized(self.config))

    def check_target(
        self, max_model_len: int | None, taps: Sequence[Tap] = (), drafts: Sequence[SelfDraft] = ()
    ) -> None:
        """Refuse what the model cannot give as a target, before its weights are read.

        Args:
            max_model_len: context limit.
            taps: hidden states that its draft reads.
            drafts: made of its weights.

        Raises:
            UsageError: a limit that is longer than its own, hidden states that it has not, a draft with all its
                layers, or a model that is a draft itself.
            RunError: the model's configuration cannot be read.
        """
        if self.drafted_tokens is not None:
            message = f"`{self.name}` is a draft: it has {len(self.drafted_tokens)} of its tokenizer's tokens alone"
            raise UsageError(message, f"name it as one: --draft {self.name}")
        if max_model_len is None and not taps and not drafts:
            return
        with clear_errors(self.name), self._quiet():
            config = self.text_config
        own = own_context(config)
        if own is not None and max_model_len is not None and max_model_len > own:
            raise UsageError(
                f"max_model_len is `{max_model_len}`, and `{self.name}` reads `{own}` tokens at most",
                f"lower --max-model-len (engine.max_model_len) to {own}, or leave it out",
            )
        check_taps(self.name, taps, config, max_context(config, max_model_len))
        for draft in drafts:
            draft.check(self.name, config.num_hidden_layers)

    # What is made of it.

    def load(
        self, *, check: bool = True, progress: Progress | None = None, **cache: Unpack[CacheArguments]
    ) -> TransformersLM:
        """Load the model.

        Args:
            check: compare the logits of a few tokens with transformers' own forward (see lm.oracle).
            progress: told how many bytes of a GGUF file are packed or dequantized, and of how many.
            cache: what sizes its cache, as TransformersLM takes it.

        Raises:
            UsageError: an architecture that cannot be a target or a draft, or settings that do not fit it.
            RunError: the model does not load.
        """
        for obstacle in self.obstacles:
            raise obstacle
        with clear_errors(self.name), self._quiet():
            self.check_room()
            model = self._model(progress).to(self.device).eval()
            oracle = _oracle(model, self.is_in_blocks) if check else None
            quantized = None if self.is_plain_torch else stays_quantized(self.config)
            if quantized is not None and self.settings.dtype != "auto" and model.dtype != self.dtype:
                message = f"`{self.name}` is quantized by `{quantized}` and runs in `{_word(model.dtype)}`"
                raise UsageError(f"{message}, not in `{self.settings.dtype}`", "leave --dtype at auto")
            if isinstance(oracle, Oracle) and oracle.is_quantized:  # its dtype may be none that its kernels take
                oracle.check_reference(self.name)
            lm = TransformersLM(
                model,
                self.name,
                eos_token_ids=self.eos_token_ids,
                decoder=self.decoder,
                kind=self.kind(model.dtype),
                **cache,
            )
            lm.generation, lm.origin = self.generation, self._origin(lm.dtype)
            doubt = None if oracle is None else _doubt(oracle, lm)
        if doubt is None:
            return lm
        del model, lm  # float32 takes their memory
        plan = replace(self, settings=replace(self.settings, dtype="float32"))
        try:
            lm = plan.load(check=check, progress=progress, **cache)
        except RunError as error:
            raise doubt from error
        _log.warning("%s: float32 agrees with it, so `%s` runs in float32", doubt.message, self.name)
        return lm

    def _model(self, progress: Progress | None) -> Any:
        """The modules with their weights, which the decoder makes blocks of 4 bits of if it is asked to."""
        if self.settings.quantize != "int4":
            return self._model_as_stored(progress)
        stored = None
        if self._is_mapped and not self.is_plain_torch:
            stored = first_dtype([self.folder / file for file in weights_files(self.name, self.folder)])
        model = self._model_as_stored(progress, DTYPES.get(stored or ""))
        return quantize_model(self.name, model, self.dtype)

    @property
    def _is_mapped(self) -> bool:
        """Whether its files hold plain numbers, which are not copied before a decoder takes them."""
        is_undone = self.header is not None or self.undone is not None
        return not (self.is_dummy or is_undone or (not self.is_plain_torch and is_dequantized(self.config)))

    def _model_as_stored(self, progress: Progress | None, dtype: torch.dtype | None = None) -> Any:
        """The modules with their weights: the built-in pair's, a GGUF file's blocks, random or plain numbers.

        Args:
            progress: as `load` takes it.
            dtype: of plain numbers in files; None is the plan's.
        """
        if self.is_plain_torch:
            self.config._attn_implementation = NAME
        if self.is_plain_torch and self.header is None:
            return read_builtin_model(self.folder, self.config, self.dtype)
        if self.is_native and self.header is not None:
            from specdec_cli.lm.gguf_blocks import model_in_blocks

            return model_in_blocks(self.name, self.header, self.outline, self.dtype, progress)
        if self.is_native:
            from specdec_cli.lm.integer_blocks import model_of_integers

            return model_of_integers(self, self.integers)
        from specdec_cli.lm.from_files import model_from_files, registered_attention

        if self.is_dummy:
            attention = registered_attention(self.config)
            return dummy.build(self.name, self.config, self.dtype, self.device, attention, self.trust_remote_code)
        return model_from_files(self, dtype=dtype, progress=progress)

    @property
    def load_bytes(self) -> int:
        """Memory of a CPU that loading takes at the least, beside files that are mapped.

        The numbers of a GGUF file or of a form that is undone are all there before one matrix after another moves into
        the decoder's layout. The check at load of weights that are not in blocks widens a part of them to float32.
        """
        num_bytes = stored_bytes(self.name, self.folder)
        dtype, quantize = self.settings.dtype, self.settings.quantize
        if self.header is not None or self.is_in_blocks:
            vocab_size, width = map(int, self.outline.get_input_embeddings().weight.shape)
            plain = (dummy.num_parameters(self.outline) + vocab_size * width) * self.dtype.itemsize
            if self.is_in_blocks:
                return self._bytes_in_blocks + (0 if self.is_native or self._is_mapped else plain)
            return plain + 4 * min(vocab_size, OUTPUTS) * width + 4 * vocab_size * CHECKED_ROWS
        if not self.is_plain_torch and (self.undone is not None or is_dequantized(self.config)):
            num_bytes = dummy.num_parameters(self.outline) * (4 if dtype != "auto" else self.dtype.itemsize)
        if quantize != "none":
            return num_bytes // 4  # the files may be float32
        return num_bytes if dtype == "auto" else num_bytes * self.dtype.itemsize // 4

    @property
    def block_bytes(self) -> Mapping[str, int]:
        """Bytes of the weights of a model in blocks that are not in its dtype, by transformers' names."""
        if not self.is_native:
            return int4_bytes(self.outline)
        if self.header is None:
            return self.integers.num_bytes
        from specdec_cli.lm.gguf_blocks import block_bytes

        return block_bytes(self.header, self.outline)

    @property
    def _bytes_in_blocks(self) -> int:
        """Memory for the weights of a model in blocks, without an embedding that stays in a GGUF file."""
        sizes, itemsize = self.block_bytes, self.dtype.itemsize
        table = self.outline.get_input_embeddings().weight
        has_own_head = self.outline.get_output_embeddings().weight is not table
        left = table if self.is_native and self.header is not None and has_own_head else None
        weights = self.outline.named_parameters()
        return sum(sizes.get(name, weight.numel() * itemsize) for name, weight in weights if weight is not left)

    def check_room(self) -> None:
        """Refuse a model that cannot be loaded into the RAM, whatever of its files' dtype is kept.

        Raises:
            RunError: it cannot.
        """
        if self.is_dummy or not self.is_complete or self.device.type != "cpu":
            return
        dtype, quantize = self.settings.dtype, self.settings.quantize
        kept = "its file's blocks" if self.is_native else "its own dtype" if dtype == "auto" else dtype
        what, hint = kept if quantize == "none" else quantize, "choose a smaller model or dtype"
        check_room(self.name, self.load_bytes, what, self.device, hint)

    def _origin(self, dtype: torch.dtype) -> Origin:
        files = None if self.is_dummy else all_files(self.name, self.folder)
        weights = None if files is None else fingerprint(self.checkpoint.config_bytes, self.folder, files)
        kept_as = NATIVE if self.is_native else self.settings.quantize
        return Origin(self.name, self.settings.revision, _word(dtype), kept_as, weights)

    def tokenizer(self) -> Any:
        """Its transformers tokenizer; where the weights are random, one stands in for none.

        Raises:
            RunError: there is none, or it is broken.
        """
        name, folder, trusted = self.name, self.folder, self.trust_remote_code
        if not any((folder / file).exists() for file in TOKENIZER_FILES) and not list(folder.glob("*.model")):
            with self._quiet():
                config = self.stored_config
            if self.is_dummy:
                return dummy.stand_in_tokenizer(config)
            raise RunError(f"model `{name}` has no tokenizer", "give a model folder that holds `tokenizer.json`")
        try:
            if name in BUILTIN:
                return BackendTokenizer.of_folder(folder, name)
            if gguf_links(folder) and not has_own_tokenizer(folder):
                tokenizer = read_gguf_tokenizer(folder)
                # An adapter's settings may have tokens of their own.
                return tokenizer if adapter_of(folder) is None else tokenizer.of_transformers
        except Exception as error:
            raise tokenizer_error(name, folder, error) from error
        import transformers

        from specdec_cli.lm.template_limits import limit_templates

        limit_templates()
        with quiet():
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    folder, trust_remote_code=trusted, local_files_only=True
                )
            except Exception as error:
                if (folder / "config.json").is_file():  # which transformers reads first; it may be the broken one
                    self.checkpoint.config(trusted)
                raise remote_code_error(name, error) or tokenizer_error(name, folder, error) from error
            check_tokenizer(name, folder, tokenizer)
        tokenizer.name_or_path = name  # messages name the model as the user does, and not the hub's cache
        return tokenizer

    def _quiet(self) -> AbstractContextManager[None]:
        """A `quiet` context; transformers is imported first if it reads this model."""
        if not self.is_plain_torch:
            import transformers  # noqa: F401  # `quiet` is for one that is imported
        return quiet()


def device_named(device: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here.

    Raises:
        UsageError: another word.
        RunError: it is not here.
    """
    plan = ModelPlan("", ModelSettings(device=device))
    plan._check_device()
    return plan.device


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _both(config: Any) -> tuple[Any, Any]:
    return config, config.get_text_config()


def _oracle(model: Any, is_in_blocks: bool) -> Oracle | BlocksOracle:
    if not is_in_blocks:
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
