"""The check at load of weights in blocks: the decoder's logits beside those of their numbers.

The first layers decode a few tokens here and in transformers' own forward pass in float32, on weights that the gguf
package dequantized, or `files.dequantize` where they are in safetensors, or on what blocks of 4 bits mean. There the
inputs of each product are rounded to whole numbers as the decoder rounds them, so what is left between the two is the
order of sums and the cache's dtype.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdec_cli.errors import RunError
from specdec_cli.lm.door import Row
from specdec_cli.lm.gguf_blocks import empty_model
from specdec_cli.lm.llama.file_rows import BLOCKS_HINT, FileRows
from specdec_cli.lm.machine.threads import fixed_threads
from specdec_cli.lm.oracle import relative_error, spread_tokens
from specdec_cli.lm.self_draft import SelfDraft

if TYPE_CHECKING:
    from specdec_cli.lm.transformers_lm import TransformersLM

_NUM_LAYERS = 2
_NUM_TOKENS = 12
_NUM_TOKENS_OF_MIXTURES = 4  # each takes experts, whose dequantized numbers take seconds
_NUM_OUTPUTS = 512  # of the vocabulary, whose logits are compared
# The largest relative error between the two.
_ALLOWED = 0.15


class BlocksOracle:
    """The logits that the first layers of a model in blocks must give, computed before the decoder takes the weights.

    Args:
        model: with its matrices as `file_rows`.
    """

    def __init__(self, model: Any) -> None:
        vocab_size = int(model.config.vocab_size)
        is_mixture = any(hasattr(module, "expert_rows") for module in model.modules())
        most = _NUM_TOKENS_OF_MIXTURES if is_mixture else _NUM_TOKENS
        num_tokens = max(2, min(most, model.config.max_position_embeddings))
        self._tokens = spread_tokens(num_tokens, vocab_size)
        self._outputs = torch.linspace(0, vocab_size - 1, min(_NUM_OUTPUTS, vocab_size)).long()
        # On one thread: a dozen rows are few, and threads that wait for each other on a busy machine cost more.
        with torch.no_grad(), fixed_threads(1):
            self._logits = self._reference(model)

    def check(self, lm: TransformersLM) -> None:
        """Refuse a model whose first layers decode otherwise here.

        Raises:
            RunError: they do.
        """
        error = self.error(lm)
        if not error <= _ALLOWED:
            raise RunError(
                f"`{lm.name}` gives other logits with its weights in blocks than dequantized: the relative error of "
                f"its first {_NUM_LAYERS} layers is {error:.2g}, and rounding explains {_ALLOWED}",
                BLOCKS_HINT,
            )

    def error(self, lm: TransformersLM) -> float:
        """The relative error between the logits here and those of transformers."""
        is_short = lm.config.num_hidden_layers <= _NUM_LAYERS
        shown = lm if is_short else lm.self_draft(SelfDraft(layers=_NUM_LAYERS))
        if not is_short:
            shown.hold(-(-_NUM_TOKENS // lm.block_size) + 1)
        half = len(self._tokens) // 2
        rows = [Row(0, self._tokens[:half], half)]
        rows += [Row(0, self._tokens[: place + 1], 1) for place in range(half, len(self._tokens))]
        logits = torch.cat([shown.score([row])[:, self._outputs] for row in rows])
        shown.release(0)
        return relative_error(logits, self._logits)

    def _reference(self, model: Any) -> Tensor:
        """Logits of the outputs [tokens, outputs] float32, by transformers."""
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = min(_NUM_LAYERS, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        config._attn_implementation = "eager"
        made = empty_model(type(model), config, torch.float32)
        known = dict(model.named_modules())
        for name, module in list(made.named_modules()):
            if hasattr(known[name], "expert_rows"):
                made.set_submodule(name, _DequantizedExperts(known[name]))
                continue
            for part, _ in list(module.named_parameters(recurse=False)):
                own, rows = getattr(known[name], part), getattr(known[name], "file_rows", None)
                if part == "weight" and rows is not None:
                    own = rows[self._rows_of(name, model)].reference()
                elif part == "weight" and isinstance(module, nn.Linear | nn.Embedding):
                    own = own[self._rows_of(name, model)]
                setattr(module, part, nn.Parameter(own.detach().float(), requires_grad=False))
            if isinstance(module, nn.Linear) and hasattr(known[name], "file_rows"):
                size = known[name].file_rows.scale_inputs
                module.register_forward_pre_hook(lambda _, inputs, size=size: (_rounded(inputs[0], size),))
        made.get_input_embeddings().padding_idx = None  # one of those that are not needed
        ids = torch.arange(len(self._tokens))[None]
        logits: Tensor = made.eval()(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def _rows_of(self, name: str, model: Any) -> Tensor | slice:
        """The rows of a weight that are needed: the tokens' of an embedding, and of the output layer some."""
        module = model.get_submodule(name)
        if module is model.get_input_embeddings():
            return torch.tensor(self._tokens)
        return self._outputs if module is model.get_output_embeddings() else slice(None)


class _DequantizedExperts(nn.Module):
    """Experts as transformers has them, of which those that a token takes are dequantized when it does.

    Args:
        experts: transformers' module, with its weights as `expert_rows`.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._experts = (experts,)  # no submodule

    def forward(self, hidden: Tensor, taken: Tensor, shares: Tensor) -> Tensor:
        """The outputs [n, hidden] of states [n, hidden], by the experts [n, k] and their shares that each row takes."""
        (experts,), added = self._experts, torch.zeros_like(hidden)
        for expert in sorted(set(taken.flatten().tolist())):
            places, which = torch.where(taken == expert)
            gate, up, down = experts.expert_rows[expert]
            parts = [_product(hidden[places], rows) for rows in (gate, up)]
            is_mixed = hasattr(experts, "limit")  # gpt-oss has gate and up number by number
            joined = torch.stack(parts, -1).flatten(-2) if is_mixed else torch.cat(parts, -1)
            if is_mixed:
                joined += experts.gate_up_proj_bias[expert]
            outputs = _product(experts._apply_gate(joined), down)
            if is_mixed:
                outputs += experts.down_proj_bias[expert]
            added.index_add_(0, places, outputs * shares[places, which, None])
        return added


def _product(inputs: Tensor, rows: FileRows) -> Tensor:
    """Rounded inputs [n, in] times the numbers of a weight in blocks."""
    return _rounded(inputs, rows.scale_inputs) @ rows.reference().t()


def _rounded(inputs: Tensor, size: int) -> Tensor:
    """Inputs [..., in] as whole numbers mean them that have a scale for so many, or for what is left of them."""
    filled = nn.functional.pad(inputs, (0, -inputs.shape[-1] % size))
    parts = filled.view(*inputs.shape[:-1], -1, size)
    scales = parts.abs().amax(-1, keepdim=True) / 127
    codes = (parts / scales.clamp(min=torch.finfo(torch.float32).tiny) + 128.5).floor() - 128
    rounded: Tensor = codes * scales
    return rounded.view(filled.shape)[..., : inputs.shape[-1]]
