"""transformers' own forward over a block cache, and the probe that tells whether a family runs on one.

The probe is the one test that the engine and `doctor` share: the engine runs it on the loaded model, `doctor` on the
model on paper (`lm.paper`), where it costs no memory and reads no weight.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.libraries import blamed
from specdec_cli.lm.cache.cache import BlockCache, cache_parameter
from specdec_cli.lm.cache.latents import keep_latents
from specdec_cli.lm.cache.layout import KEY_GRAIN, Layout, Span, Stretch
from specdec_cli.lm.cache.snapshots import Snapshots
from specdec_cli.lm.files.checkpoint import FAMILIES
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.forward.apart import take_apart
from specdec_cli.lm.forward.attention import RowMasks, causal
from specdec_cli.lm.forward.forward import CacheShape, on_its_device
from specdec_cli.lm.forward.implementations import APART, JOINED, NAME
from specdec_cli.lm.forward.joined import attend_apart
from specdec_cli.lm.forward.positions import place_tokens, takes_position_ids
from specdec_cli.lm.forward.taps import TapHooks
from specdec_cli.lm.hidden_states import HiddenStates
from specdec_cli.lm.state.mixers import install


class PackedForward:
    """Rows of several sequences in one forward pass of a transformers model.

    Args:
        model: a causal LM, its attention set as `lm.load` does; on paper too.
        is_bitwise: a row must get the same bits in any company.
    """

    def __init__(self, model: Any, is_bitwise: bool = False) -> None:
        self.model = model
        self.device: torch.device = model.device
        attention = model.config.get_text_config()._attn_implementation
        self.has_joined_keys = attention != NAME
        known = inspect.signature(model.forward).parameters
        self._cache_name = cache_parameter(model.forward)
        self._is_given_mask = self._cache_name is not None and attention not in (NAME, JOINED, APART)
        self.is_bitwise = is_bitwise
        self.runs_apart = take_apart(model)
        if is_bitwise and self._is_given_mask and not self.runs_apart:
            attend_apart(model)
        keep_latents(model)
        _leave_images_out(model.config.get_text_config())
        self._has_positions = place_tokens(model)
        self.hooks = TapHooks(model)
        self.has_state = install(model)
        self._keeps_logits = "logits_to_keep" in known
        self._takes_positions = takes_position_ids(model)
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
                input_ids=torch.tensor([layout.tokens], device=self.device),
                attention_mask=mask,
                use_cache=True,
                **options,
                **({} if self._cache_name is None else {self._cache_name: cache}),
            ).logits[0]
            if not self._keeps_logits:
                logits = logits[layout.wanted]
            elif rows is not None:
                logits = logits[rows]
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
        return torch.tensor(places, device=self.device)

    def attempt(self, cache: BlockCache, num_tokens: int) -> Tensor:
        """Logits [num_tokens, V] of a sequence of the first token alone, on a cache of its own."""
        span, piece = Span(0, num_tokens, num_tokens, 0, None), (0, num_tokens, 0)
        places = list(range(num_tokens))
        tokens, device = [0] * num_tokens, self.device
        layout = Layout(tokens, places, [span], [piece], wanted=places, num_written=num_tokens, device=device)
        layout.stretches = [Stretch(0, num_tokens, 0, Snapshots(0, 1))] if self.has_state else []
        return self.run(cache, layout)

    @on_its_device
    def probe(self, name: str) -> CacheShape:
        """Run two tokens on a cache of their own.

        Args:
            name: the model's, for messages.

        Raises:
            UsageError: the forward does not run on a block cache, or leaves it untouched.
        """
        kind = self.model.config.model_type
        if not self._has_positions and not self.has_state:
            raise _refusal(name, kind, "it takes no position ids")
        cache = BlockCache(2 + KEY_GRAIN, self.has_joined_keys)
        try:
            logits = self.attempt(cache, 2)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise _refusal(name, kind, _own_words(error)) from error
        if not cache.stores and not cache.states:
            raise _refusal(name, kind, "it keeps keys and values elsewhere")
        return CacheShape(
            sum(store.bytes_per_token for store in cache.stores.values()),
            logits.shape[1],
            sum(store.slot_bytes for store in cache.states.values()),
            sum(store.slot_bytes * store.width for store in cache.states.values()),
        )


def _leave_images_out(text_config: Any) -> None:
    """Ask for no mask of images, whose parts see each other in both directions (Gemma 4): there is text alone."""
    if getattr(text_config, "use_bidirectional_attention", None) == "vision":
        text_config.use_bidirectional_attention = None


def _own_words(error: Exception) -> str:
    """The message of an error, or its meaning if it only names the block cache's classes."""
    said = first_line(error)
    if "LayerStore" in said:
        return "its attention reads keys and values itself"
    if "RowMasks" in said or "Layout" in said:
        return "it makes or changes attention masks itself"
    return said


def _refusal(name: str, kind: str, why: str) -> UsageError:
    message = f"architecture `{kind}` of `{name}` is not supported: its forward does not run on a block cache ({why})"
    return UsageError(*blamed(message, f"choose a model of another family ({FAMILIES})"))
