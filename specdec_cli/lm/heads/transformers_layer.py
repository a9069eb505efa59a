"""A decoder layer of transformers behind a draft head: a model of one layer that is fed embeddings.

The layer is the target's own kind (multi-head latent attention, a mixture of experts, whatever it is): a decoder of the
target's class with a single layer runs it, with its masks and rotary positions. Keys and values lie where the head's
sequences keep theirs (`LayerFeed`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import specdec_cli.lm.forward.registration  # noqa: F401  # attention functions are registered
from specdec_cli.errors import UsageError
from specdec_cli.libraries import blamed
from specdec_cli.lm.cache.cache import BlockCache, LayerStore, cache_parameter
from specdec_cli.lm.cache.layout import KEY_GRAIN, Layout, Span
from specdec_cli.lm.families.latent_attention import keep_latents
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.reading import first_line, other_shape, quiet
from specdec_cli.lm.forward.implementations import NAME, attention_of
from specdec_cli.lm.from_files import FAKE_EXPERTS
from specdec_cli.lm.heads.head_layer import LayerFeed
from specdec_cli.lm.heads.recorded_feed import RecordedFeed
from specdec_cli.lm.kernels.kinds import Kind
from specdec_cli.lm.kernels.packing import pack_model

_HINT = "choose another draft"


class TransformersLayer:
    """The layer of a decoder of transformers that has one.

    Args:
        name: of the target, for messages.
        decoder: as `decoder_of_one_layer` makes it; the norm behind its layer is taken out.
        kind: of its products, which are packed as a model's are.

    Attributes:
        key_shape: key heads and numbers in each, as they are kept.
        value_shape: the same of values.

    Raises:
        UsageError: it does not run on these keys and values.
    """

    def __init__(self, name: str, decoder: Any, kind: Kind) -> None:
        keep_latents(decoder)
        decoder.norm = nn.Identity()
        self._decoder = decoder
        self._cache_name = cache_parameter(decoder.forward) or "past_key_values"
        pack_model(decoder, kind)
        self.key_shape, self.value_shape = self._probe(name)

    def run(self, hidden: Tensor, positions: Tensor, feeds: list[LayerFeed]) -> Tensor:
        """The layer's output [n, hidden], before the norm.

        Args:
            hidden: what it reads [n, hidden] of all new slots, sequence after sequence.
            positions: [n] int64 in their texts.
            feeds: the sequences.
        """
        whole = feeds[0]
        if isinstance(whole, RecordedFeed):
            return self._forward(hidden, _FeedCache(_RecordedStore(whole)), whole.layout(positions))
        spans: list[Span] = []
        owners: dict[int, LayerFeed] = {}
        for feed in feeds:
            for span in _spans(feed, spans[-1].stop if spans else 0):
                spans.append(span)
                owners[span.start] = feed
        return self._forward(hidden, _FeedCache(_FeedStore(owners)), _layout(positions.tolist(), spans, hidden.device))

    def _forward(self, inputs: Tensor, cache: BlockCache, layout: Layout) -> Tensor:
        with torch.inference_mode(), cache.running(layout):
            output = self._decoder(
                inputs_embeds=inputs[None],
                position_ids=layout.position_ids,
                use_cache=True,
                **{self._cache_name: cache},
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _probe(self, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of a slot's keys and values, by running one."""
        weight = next(self._decoder.parameters())
        cache, inputs = BlockCache(1 + KEY_GRAIN), weight.new_zeros(1, self._decoder.config.hidden_size)
        try:
            self._forward(inputs, cache, _layout([0], [Span(0, 1, 1, 0, None)], weight.device))
        except Exception as error:
            raise _not_run(name, first_line(error)) from error
        if list(cache.stores) != [0] or cache.states:
            raise _not_run(name, "it keeps more than keys and values")
        keys, values = cache.stores[0].keys, cache.stores[0].values
        return (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])


def _not_run(name: str, why: str) -> UsageError:
    return UsageError(*blamed(f"the MTP modules of `{name}` do not run: {why}", _HINT))


def _layout(positions: list[int], spans: list[Span], device: torch.device) -> Layout:
    num = len(positions)
    return Layout([0] * num, positions, spans, [(0, num, 0)], [], num, device=device)


def _spans(feed: LayerFeed, start: int) -> list[Span]:
    """The queries of a sequence: all together where each sees what is before it, else each alone with what it sees."""
    if feed.visible is None:
        return [Span(start, start + len(feed.places), feed.end, 0, None, feed.places[0])]
    spans = []
    for i, seen in enumerate(feed.visible):
        slots = seen.nonzero().flatten()
        spans.append(Span(start + i, start + i + 1, len(slots), 0, slots, len(slots) - 1))
    return spans


class _FeedStore(LayerStore):
    """The layer's keys and values of the sequences that run.

    Args:
        owners: the sequence of each span, by the place of its first query.
    """

    def __init__(self, owners: Mapping[int, LayerFeed]) -> None:
        self._owners = owners

    def write(self, key: Tensor, value: Tensor, layout: Layout) -> None:
        """File new keys and values [1, heads, n, dim] with their sequences."""
        begin = 0
        for feed in {id(owner): owner for owner in self._owners.values()}.values():
            end = begin + len(feed.places)
            feed.write(key[0, :, begin:end], value[0, :, begin:end])
            begin = end

    def read(self, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values [1, heads, T, dim] that a span's queries see."""
        keys, values = self._owners[span.start].read()
        if span.slots is None:
            return keys[None], values[None]
        return keys.index_select(1, span.slots)[None], values.index_select(1, span.slots)[None]


class _RecordedStore(LayerStore):
    """The keys and values of all sequences of a recorded forward, which a layout reads and writes."""

    def __init__(self, feed: RecordedFeed) -> None:
        self.keys, self.values = feed.keys[None], feed.values[None]


class _FeedCache(BlockCache):
    """The cache object that the decoder gets."""

    def __init__(self, store: LayerStore) -> None:
        super().__init__(0)
        self._store = store

    def store_at(self, place: Any, key_states: Tensor, value_states: Tensor) -> LayerStore:
        """The sequences' own keys and values."""
        return self._store


def decoder_of_one_layer(
    name: str,
    config: Any,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    is_fake: bool = False,
) -> Any:
    """A decoder of the target's class with one layer, fed embeddings; its own table has one row.

    Args:
        name: of the target, for messages.
        config: of the target.
        tensors: of the layer, named from `layers.0.` on, and `norm.weight` of the norm behind it.
        dtype: of its weights.
        trust_remote_code: the target's class may be code of its own.
        is_fake: the tensors are fake, and so is the layer: it has sizes alone.

    Raises:
        UsageError: the tensors are not those of such a layer, or it cannot run on keys and values that are kept here.
    """
    if attention_of(config) != NAME:
        raise _not_run(name, f"the attention of `{config.model_type}` is fixed, or reads keys itself")
    whole = copy.deepcopy(config)
    text = whole.get_text_config()
    _keep_one_layer(text, has_experts=any(".mlp.experts." in key or ".mlp.gate." in key for key in tensors))
    made = type(dummy.on_meta(whole, dtype, trust_remote_code).get_decoder())
    text._attn_implementation = NAME
    state = dict(tensors) | {"embed_tokens.weight": torch.zeros(1, text.hidden_size, dtype=dtype)}
    with quiet():
        decoder, report = made.from_pretrained(
            None,
            config=text,
            state_dict=state,
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **({"experts_implementation": FAKE_EXPERTS} if is_fake else {}),
        )
    wrong = [f"`{key}` is missing" for key in sorted(report["missing_keys"])]
    wrong += [other_shape(*mismatch) for mismatch in sorted(report["mismatched_keys"])]
    wrong += [f"`{key}` is not read" for key in sorted(report["unexpected_keys"])]
    if wrong:
        message = f"an MTP module of `{name}` does not match its `config.json`: of its layer, {wrong[0]}"
        raise UsageError(message, "copy or download the model again")
    return decoder.eval()


def _keep_one_layer(text: Any, has_experts: bool) -> None:
    """Make a configuration that of one layer with full attention, and of a vocabulary of one token."""
    changes: dict[str, Any] = {
        "num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None, "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if has_experts else "dense"], "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0], "decoder_sparse_step": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    for key, value in changes.items():
        if key in ("num_hidden_layers", "vocab_size", "pad_token_id") or getattr(text, key, None) is not None:
            setattr(text, key, value)
