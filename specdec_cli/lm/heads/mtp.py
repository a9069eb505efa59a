"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): modules of a target's own checkpoint.

Module m projects [norm(embedding of token t + m); norm(state of module m - 1 at t)], runs one of the target's layers,
and predicts the token at t + m + 1; module 0 is the target itself, its state that behind the final norm.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specdec_cli.errors import UsageError
from specdec_cli.lm.files.fake_tensors import fake_tensors
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.stacks import layer_of, product_of
from specdec_cli.lm.heads.transformers_layer import TransformersLayer, decoder_of_one_layer

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM
    from specdec_cli.lm.heads.head_layer import LayerFeed
    from specdec_cli.lm.heads.mtp_files import MtpModules


class MtpHead(Head):
    """One MTP module, with the target's embedding and output layer.

    Args:
        modules: of the target's checkpoint.
        module: which of them.
        target: the loaded target, in whose dtype the module computes.
        recycles_normed: what comes next reads the output behind the module's norm, not before it.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or a layer that does not run here.
    """

    def __init__(self, modules: MtpModules, module: int, target: LM, recycles_normed: bool) -> None:
        tensors = modules.read(module, target.dtype)
        own = {name: tensors.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")}
        decoder = decoder_of_one_layer(modules.name, modules.config, tensors, target.dtype, modules.trusts_code)
        decoder = decoder.to(target.device)
        self._norm: nn.Module = decoder.norm
        state = decoder.state_dict()
        weights = {name: tensor.to("meta") for name, tensor in state.items() if name.startswith("layers.")}
        del state
        self._layer = layer_of(modules.name, decoder, target)
        hidden = target.embed([0]).shape[-1]
        for name, wanted in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("eh_proj", (hidden, 2 * hidden))):
            if own[name].shape != wanted:
                message = (
                    f"the tensor `{modules.published(module, name + '.weight')}` of `{modules.name}` has the shape "
                )
                message += f"{list(own[name].shape)}, where {list(wanted)} is expected"
                raise UsageError(message, "copy or download the model again")
        self._norms = [_alike(self._norm, own[name]) for name in ("enorm", "hnorm")]
        self._hidden_first, self._recycles_normed = modules.naming.hidden_first, recycles_normed
        weights["eh_proj.weight"] = own["eh_proj"].to(target.device, target.dtype)
        self._projection = product_of(weights, "eh_proj")
        norms = zip(("enorm", "hnorm", "norm"), (*self._norms, self._norm), strict=True)
        weights |= {f"{name}.weight": next(norm.parameters()).data for name, norm in norms}
        super().__init__(target, weights, self._layer.key_shape, self._layer.value_shape)

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The layer's output, before the module's norm."""
        token, state = (norm(given) for norm, given in zip(self._norms, (embedded, feature), strict=True))
        return self._layer.run(self._projection(self._joined(token, state)).to(token.dtype), positions, feeds)

    def _joined(self, token: Tensor, state: Tensor) -> Tensor:
        """The input of the projection [n, 2 * hidden], in the family's order."""
        return torch.cat([state, token] if self._hidden_first else [token, state], -1)

    def recycled(self, output: Tensor) -> Tensor:
        """The output, behind the module's norm or before it."""
        return self._normed(output) if self._recycles_normed else output

    def logits(self, output: Tensor) -> Tensor:
        """The target's output layer of the normalized output."""
        return self._target.head(self._normed(output))

    def _normed(self, output: Tensor) -> Tensor:
        normed: Tensor = self._norm(output)
        return normed


def kv_bytes_per_token(modules: MtpModules, dtype: torch.dtype) -> int:
    """Memory of one token's keys and values in all modules, by running their layers with fake tensors.

    Args:
        modules: of a target's checkpoint, which `check` passed.
        dtype: that they compute in.

    Raises:
        UsageError: their layers are not those of the configuration, or do not run here.
        RunError: files that cannot be read.
    """
    numbers = 0
    with fake_tensors():
        for tensors in modules.headers(dtype):
            its = {name: tensor for name, tensor in tensors.items() if name.startswith(("layers.", "norm."))}
            decoder = decoder_of_one_layer(modules.name, modules.config, its, dtype, modules.trusts_code, is_fake=True)
            layer = TransformersLayer(modules.name, decoder, "plain")
            numbers += sum(heads * size for heads, size in (layer.key_shape, layer.value_shape))
    return numbers * dtype.itemsize


def _alike(norm: nn.Module, weight: Tensor) -> nn.Module:
    """A norm of the same kind with another weight."""
    made = copy.deepcopy(norm)
    own = next(made.parameters())
    own.data = weight.to(own.device, own.dtype)
    return made
