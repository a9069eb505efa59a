"""transformers' own forward over a block cache, and the probe that tells whether a family runs on one.

The probe is the one test that the engine and `doctor` share: the engine runs it on the loaded model, `doctor` on the
model of fake tensors (`lm.files.fake_tensors`), where it costs no memory and reads no weight.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.libraries import blamed
from specdec_cli.lm.cache.cache import BlockCache, cache_parameter
from specdec_cli.lm.cache.layout import KEY_GRAIN, Layout, Span, Stretch
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.files.architecture import carries_state
from specdec_cli.lm.files.checkpoint import FAMILIES
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.forward.attention import RowMasks, causal
from specdec_cli.lm.forward.forward import CacheShape, on_its_device
from specdec_cli.lm.forward.implementations import APART, JOINED, NAME
from specdec_cli.lm.forward.taps import TapHooks, decoder_layers
from specdec_cli.lm.hidden_states import HiddenStates
from specdec_cli.transfer import sent


@dataclass(frozen=True, slots=True)
class Patches:
    """The replaced parts of a model that does not run on a block cache through transformers' interfaces alone.

    Args:
        runs_apart: its attention runs once for each span of a forward.
        has_biases: positions reach it as biases of its keys.
        has_state: layers carry a state.
    """

    runs_apart: bool
    has_biases: bool
    has_state: bool


class PackedForward:
    """Rows of several sequences in one forward pass of a transformers model.

    Args:
        model: a causal LM, its attention set as `lm.load` does; of fake tensors too.
        name: the model's, for messages.
        patches: what `lm.families` replaced in it.
        is_bitwise: a row must get the same bits in any company.

    """

    def __init__(self, model: Any, name: str, patches: Patches, is_bitwise: bool = False) -> None:
        self.model = model
        self.patches = patches
        self._name = name
        self.device: torch.device = model.device
        attention = model.config.get_text_config()._attn_implementation
        self.has_joined_keys = attention != NAME
        known = inspect.signature(model.forward).parameters
        self._cache_name = cache_parameter(model.forward)
        self._is_given_mask = self._cache_name is not None and attention not in (NAME, JOINED, APART)
        self.is_bitwise = is_bitwise
        self._takes_positions = "position_ids" in known
        self.hooks = TapHooks(model)
        self._keeps_logits = "logits_to_keep" in known
        # Gemma 4 cuts inputs and masks to the last tokens before layers that share keys, where it is given a number.
        self._takes_numbers = not getattr(model.config.get_text_config(), "num_kv_shared_layers", None)

    def run(self, cache: BlockCache, layout: Layout) -> Tensor:
        """The wanted logits [len(wanted), V] float32; states go into the cache, tapped ones to the layout."""
        if layout.is_tapped:
            with self.hooks.copying() as states:
                logits = self._run(cache, layout)
            layout.states = HiddenStates(states(), 0, layout.num_written)
            return logits
        return self._run(cache, layout)

    def _run(self, cache: BlockCache, layout: Layout) -> Tensor:
        num_wanted = len(layout.wanted)
        keep, rows = self._logits_to_keep(len(layout.tokens), layout.wanted)
        options: dict[str, Any] = {"logits_to_keep": keep} if self._keeps_logits else {}
        if self._takes_positions:
            options["position_ids"] = layout.position_ids
        with torch.inference_mode(), cache.running(layout):
            mask = RowMasks(layout, causal).block_diagonal(self.model.dtype) if self._is_given_mask else None
            logits: Tensor = self.model(
                input_ids=sent([layout.tokens], torch.int64, self.device),
                attention_mask=mask,
                use_cache=True,
                **options,
                **({} if self._cache_name is None else {self._cache_name: cache}),
            ).logits[0]
            if not self._keeps_logits:
                logits = logits[self._index(layout.wanted)]
            elif rows is not None:
                logits = logits[self._index(rows)]
        logits = logits[:num_wanted].float()
        # Callers may write into what they get, outside inference mode too.
        return logits.clone() if logits.is_inference() and not torch.is_inference_mode_enabled() else logits

    def _logits_to_keep(self, num_tokens: int, wanted: list[int]) -> tuple[int | Tensor, list[int] | None]:
        """The `logits_to_keep` of transformers, and the rows of its result to use (None: the first ones)."""
        if not self._takes_numbers:
            return self._index(wanted or [num_tokens - 1]), None
        if not wanted:
            return 1, None
        if self.is_bitwise and len(wanted) == 1:
            # The output layer is a product too, and must not see one row alone.
            wanted = wanted * 2
            return (0, None) if num_tokens == 2 and wanted[0] == 0 else (self._index(wanted), None)
        if wanted[0] == num_tokens - len(wanted):
            return (0 if wanted[0] == 0 else len(wanted)), None
        return self._index(wanted), None

    def _index(self, places: list[int]) -> Tensor:
        return sent(places, torch.int64, self.device)

    def attempt(self, cache: BlockCache, num_tokens: int) -> Tensor:
        """Logits [num_tokens, V] of a sequence of the first token alone, on a cache of its own."""
        span, piece = Span(0, num_tokens, num_tokens, 0, None), (0, num_tokens, 0)
        places = list(range(num_tokens))
        tokens, device = [0] * num_tokens, self.device
        layout = Layout(tokens, places, [span], [piece], wanted=places, num_written=num_tokens, device=device)
        layout.stretches = [Stretch(0, num_tokens, 0, Snapshots(0, 1))] if self.patches.has_state else []
        return self.run(cache, layout)

    @on_its_device
    def probe(self) -> CacheShape:
        """Run two tokens on a cache of their own.

        Raises:
            UsageError: the forward does not run on a block cache, or leaves it untouched.
        """
        if not (self._takes_positions or self.patches.has_biases or self.patches.has_state):
            raise not_running(self.model, self._name, "it takes no position ids")
        cache = BlockCache(2 + KEY_GRAIN, self.has_joined_keys)
        try:
            logits = self.attempt(cache, 2)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise not_running(self.model, self._name, _own_words(error)) from error
        if not cache.stores and not cache.states:
            raise not_running(self.model, self._name, "it keeps keys and values elsewhere")
        config = self.model.config
        if not cache.states and carries_state(config) and len(cache.stores) < len(decoder_layers(self.model)):
            raise not_running(
                self.model, self._name, "no patch in `specdec_cli.lm.families` fits its layers that carry a state"
            )
        return CacheShape(
            sum(store.bytes_per_token for store in cache.stores.values()),
            logits.shape[1],
            sum(store.slot_bytes for store in cache.states.values()),
            sum(store.slot_bytes * store.width for store in cache.states.values()),
        )


def not_running(model: Any, name: str, why: str) -> UsageError:
    """The refusal of a model whose forward does not run on a block cache."""
    it = f"architecture `{model.config.model_type}` of `{name}`"
    message = f"{it} is not supported: its forward does not run on a block cache ({why})"
    return UsageError(*blamed(message, f"choose a model of another family ({FAMILIES})"))


def _own_words(error: Exception) -> str:
    """The message of an error, or its meaning if it only names the block cache's classes."""
    message = first_line(error)
    if "LayerStore" in message:
        return "its attention reads keys and values itself"
    if "RowMasks" in message or "Layout" in message:
        return "it makes or changes attention masks itself"
    return message
