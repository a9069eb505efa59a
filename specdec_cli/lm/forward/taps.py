"""Hidden states that a forward gives beside its logits (`lm.door.Tap`), and transformers' output layer alone.

Hooks copy the states while transformers' forward runs; our own decoder copies its own. A model without taps has no
hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec_cli.errors import UsageError
from specdec_cli.lm.door import Tap
from specdec_cli.lm.files.lengths import long_rope_threshold


def decoder_layers(model: Any) -> Any:
    """The layers of a transformers model, in order.

    Raises:
        UsageError: they stand in no list.
    """
    lists = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)]
    if not lists:
        message = f"the layers of a `{model.config.model_type}` model stand in no list"
        raise UsageError(
            f"{message}, so its first layers cannot draft and their states cannot be read", "use another draft"
        )
    return max(lists, key=len)


def check_taps(name: str, taps: Sequence[Tap], config: Any, max_context: int) -> None:
    """Refuse taps that a model cannot give; its configuration tells, before its weights are read.

    Raises:
        UsageError: there is no such layer, states of two widths, or long rope whose frequencies change within the
            context.
    """
    hint, num_layers = "choose a draft that was made for this target", config.num_hidden_layers
    wrong = next((tap for tap in taps if tap != "final" and not (isinstance(tap, int) and 0 <= tap < num_layers)), None)
    if wrong is not None:
        message = (
            f"the draft reads hidden states of layer `{wrong}`, and `{name}` has {num_layers} layers, counted from 0"
        )
        raise UsageError(message, hint)
    width = getattr(config, "hidden_size", None)
    if "final" in taps and getattr(config, "word_embed_proj_dim", width) != width:
        raise UsageError(f"`{name}` projects its final hidden states to another width than its layers have", hint)
    short_context = long_rope_threshold(config)
    if taps and short_context is not None and short_context < max_context:
        message = f"hidden states of `{name}` change once a text outgrows {short_context} tokens (long rope)"
        raise UsageError(
            message, f"set max_model_len to at most {short_context}, or choose a draft without hidden states"
        )


class TapHooks:
    """Copies of hidden states while transformers' forward runs.

    Attributes:
        taps: whose hidden states are copied.
    """

    def __init__(self, model: Any) -> None:
        self.taps: tuple[Tap, ...] = ()
        self._model = model
        self._states: dict[Tap, Tensor] | None = None

    def add(self, taps: Sequence[Tap]) -> None:
        """Install hooks for taps that have none yet."""
        layers = decoder_layers(self._model) if taps else []
        for tap in taps:
            if tap not in self.taps:
                self.taps += (tap,)
                module = self._model.get_decoder() if tap == "final" else layers[tap]
                module.register_forward_hook(self._hook(tap))

    @contextmanager
    def copying(self) -> Iterator[Callable[[], Tensor]]:
        """Copy while a forward runs in here; afterwards the function gives the states [n, len(taps), hidden]."""
        states: dict[Tap, Tensor] = {}
        self._states = states
        try:
            yield lambda: torch.stack([states[tap] for tap in self.taps], 1)
        finally:
            self._states = None

    def _hook(self, tap: Tap) -> Callable[..., None]:
        def copy(_module: Any, _given: Any, output: Any) -> None:
            if self._states is not None:
                states = output if isinstance(output, Tensor) else output[0]
                self._states[tap] = states.detach().reshape(-1, states.shape[-1]).clone()

        return copy


class _Given:
    """A decoder's output that has nothing but its hidden states; all else that a family looks for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def output_layer(model: Any, hidden: Tensor) -> Tensor:
    """Logits [n, V] float32 of final hidden states [n, hidden], with whatever a family does to its logits.

    Two rows at least go through the product, whose kernels differ for one.
    """
    decoder, num_rows = model.get_decoder(), len(hidden)
    rows = hidden if num_rows > 1 else hidden.expand(2, -1)
    decoder.forward = lambda *_, **__: _Given(rows[None])
    try:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=torch.zeros(1, len(rows), dtype=torch.int64, device=rows.device)).logits
    finally:
        del decoder.forward
    return logits[0, :num_rows].float().clone()
