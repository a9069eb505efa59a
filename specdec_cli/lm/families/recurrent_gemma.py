"""RecurrentGemma's recurrent blocks. Tested with transformers 5.23 to 5.24."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from specdec_cli.lm.families.recurrences import convolve, linear

if TYPE_CHECKING:
    from specdec_cli.lm.families.mixer import Mixer


def recurrent_gemma(mixer: Mixer, module: Any, input_states: Tensor, position_ids: Tensor, **_: Any) -> Any:
    """`RecurrentGemmaRecurrentBlock`: a short convolution, then a real-gated linear recurrent unit (RG-LRU)."""
    convolution, unit = module.conv_1d, module.rg_lru
    inputs = module.linear_x(input_states)[0]
    weight = convolution.weight[:, 0]
    store, order = mixer.next_states(inputs.shape[1:], inputs.dtype, weight.shape[1] - 1)
    convolved = convolve(order, store, inputs, weight, convolution.bias).to(inputs.dtype)

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: Any) -> tuple[Tensor, None]:
        store, order = mixer.next_states(hidden_states.shape[2:])
        decay, update = order.turn((recurrent_gate * ~reset)[0].float()), order.turn(hidden_states[0].float())
        output = linear(order, store, decay, lambda rows: update[rows], lambda states, _: states)
        return output[None].to(hidden_states.dtype), None

    unit._rnn_scan = scan
    try:
        hidden_states = unit(convolved[None], position_ids)
    finally:
        del unit._rnn_scan
    return module.linear_out(hidden_states * module.act_fn(module.linear_y(input_states))), None


CLASSES = {"RecurrentGemmaRecurrentBlock": recurrent_gemma}
