"""DFlash drafts (arXiv 2602.06036) and DSpark's: a block of mask rows that reads a context made of the target's states.

Every layer's keys and values of the context come from one vector of each position, which joins the target's hidden
states there. A block's rows attend to these and to each other, and each gives one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.reading import first_line
from specdec_cli.lm.heads.dflash_files import MASK_EMBEDDING, DFlashConfig
from specdec_cli.lm.heads.draft_vocabulary import spread, target_ids
from specdec_cli.lm.heads.head import Head
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.head_shapes import check_shapes
from specdec_cli.lm.heads.head_tensors import read_head_tensors
from specdec_cli.lm.heads.layer_stack import positions_of
from specdec_cli.lm.heads.stacks import product_of, stack_of

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


class BlockHead(Head):
    """A DFlash draft, with DSpark's heads where it has them.

    Args:
        config: of the draft.
        target: the loaded target, in whose dtype it computes.

    Attributes:
        config: of the draft.

    Raises:
        RunError: weights that cannot be read.
        UsageError: weights that are missing or of other shapes, or a draft for another target.
    """

    def __init__(self, config: DFlashConfig, target: LM) -> None:
        config.check_fits(target.name, target.embed([0]).shape[-1], target.vocab_size)
        weights = read_head_tensors(config, target.dtype, target.device)
        check_shapes(config, {name: tuple(value.shape) for name, value in weights.items()})
        self._stack = stack_of(config.layer, weights, target, config.block_layers)
        super().__init__(target, weights, self._stack.key_shape, self._stack.key_shape)
        self.config, self._join = config, product_of(weights, "fc")
        names = ("lm_head", "markov_head.markov_w2")
        self._products = {name: product_of(weights, name) for name in names if f"{name}.weight" in weights}
        self._ids = target_ids(config, weights, target.name, target.vocab_size)
        mask = _mask_embedding(config)
        self._mask = self.embed([config.mask_token]) if mask is None else mask.to(target.device, target.dtype)

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embeddings [n, hidden] by its own table, or the target's where it has none."""
        table = self.weights.get("embed_tokens.weight")
        if table is None:
            return super().embed(tokens)
        return functional.embedding(torch.as_tensor(tokens, dtype=torch.long, device=table.device), table)

    def mix(self, features: Tensor) -> Tensor:
        """One vector [n, hidden] of the target's states, normalized."""
        return self._norm(self._join(features.flatten(1)).to(features.dtype), "hidden_norm.weight")

    def run(self, embedded: Tensor, feature: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """File the keys and values of further context in every layer; the vectors themselves come back."""
        self._stack.remember(feature, positions, feeds)
        return feature

    def recycled(self, output: Tensor) -> Tensor:
        """The vectors themselves: a block reads no output of its own."""
        return output

    def rows(self, anchors: Sequence[int], feeds: list[LayerFeed]) -> Tensor:
        """States [sequences, B, hidden] of a block behind each context, behind the final norm.

        Args:
            anchors: each context's last token, which the first row reads.
            feeds: the sequences; their new slots are the block's rows.
        """
        masks = self._mask.expand(self.config.block_size - 1, -1)
        hidden = torch.cat([torch.cat([one[None], masks]) for one in self.embed(anchors)]) * self.config.embedding_scale
        states = self._stack.run(hidden, positions_of(feeds, hidden.device), feeds)
        return self._norm(states, "norm.weight").view(len(anchors), self.config.block_size, -1)

    def logits(self, output: Tensor) -> Tensor:
        """Logits [n, drafted vocabulary] float32 of rows' states [n, hidden], before DSpark's Markov head."""
        head = self._products.get("lm_head", self._target.head)
        found = head(output).float()
        found = found * self.config.logit_scale if self.config.logit_scale != 1 else found
        cap = self.config.softcap
        return found if cap is None else torch.tanh(found / cap) * cap

    def behind(self, logits: Tensor, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] float32 behind given tokens.

        Args:
            logits: as `logits` gives them [n, drafted vocabulary].
            states: of the rows [n, hidden].
            tokens: what stands before each row's token.
        """
        if self.config.dspark.rank:
            latent = self._before(tokens)
            if self.config.dspark.is_gated:
                latent = latent * self._linear(torch.cat([states, latent], -1), "markov_head.gate_proj").sigmoid()
            logits = logits + self._products["markov_head.markov_w2"](latent).float()
        return self.spread(logits)

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [n, V] float32 of the target's tokens."""
        return spread(logits, self._ids, self.vocab_size)

    def confidence(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """P [n] that rows' tokens are accepted if those before them are; arguments as for `behind`."""
        reads = self.config.dspark.confidence_reads_token
        features = torch.cat([states, self._before(tokens)], -1) if reads else states
        return self._linear(features, "confidence_head.proj").float().sigmoid()[:, 0]

    def _before(self, tokens: Sequence[int]) -> Tensor:
        table = self.weights["markov_head.markov_w1.weight"]
        return functional.embedding(torch.as_tensor(tokens, dtype=torch.long, device=table.device), table)

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return functional.linear(inputs, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return self._stack.norm(hidden, self.weights[name])


def has_mask_embedding(config: DFlashConfig) -> bool:
    """Whether mask rows read an embedding of a file of its own."""
    return (config.folder / MASK_EMBEDDING).is_file()


def _mask_embedding(config: DFlashConfig) -> Tensor | None:
    """Embedding that mask rows read, if a file beside the weights has it; nothing of the pickle is run.

    Raises:
        RunError: the file cannot be read.
        UsageError: it holds something else.
    """
    path = config.folder / MASK_EMBEDDING
    if not has_mask_embedding(config):
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(f"`{path}` cannot be read: {first_line(error)}", "copy or download the draft again") from error
    if isinstance(found, dict):
        found = next((one for one in found.values() if isinstance(one, Tensor)), None)
    if not isinstance(found, Tensor) or found.numel() != config.layer.hidden_size or not found.isfinite().all():
        raise UsageError(f"`{path}` is no embedding of {config.layer.hidden_size} numbers", "download the draft again")
    return found.reshape(1, -1)
