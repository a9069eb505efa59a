"""The check at load: a few tokens' logits through our path against those of transformers' untouched forward.

The reference is computed once, before our own decoder, packed layers or replaced attention take the weights. It goes
through torch's plain products and transformers' eager attention, in float32 whatever the weights' dtype
(`lm.reference`), so rounding is in our path alone. Our path is then asked for the same positions the way an engine
asks: in pieces, beside another sequence, and one token alone.

The measure is the relative error: the distance between the two sets of logits, each position's mean taken off, divided
by the size of the reference; of a text the median position counts. Equal logits give 0, unrelated ones about 1.4. How
much of it 16 bits explain depends on the model: the reference's own forward is rounded to them, twice and each time
otherwise, and its relative errors are the measure. A model whose rounding hides a fault is judged in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.files.checkpoint import FAMILIES
from specdec_cli.lm.files.quantization import stays_quantized
from specdec_cli.lm.files.reading import first_line, quiet
from specdec_cli.lm.forward.implementations import APART, JOINED, NAME
from specdec_cli.lm.reference import reference_logits

if TYPE_CHECKING:
    from specdec_cli.lm.transformers_lm import TransformersLM

_NUM_TOKENS = 10
_NUM_ALONE = 3
_STRIDE = 7919  # prime, so that no token comes twice
# The relative error that a precision explains in any model; float32 amplified by the worst of random models.
_ALLOWED = {torch.float32: 0.001, torch.float16: 0.02, torch.bfloat16: 0.1}
# Weights and activations in whole numbers: of real models up to 0.35, of random ones of 24 layers 0.39.
_ALLOWED_QUANTIZED = 0.6
# Two rounded forwards of one model are this many times as far apart at most, of so few positions.
_AS_ROUNDED = 4.0
# From here on logits look like unrelated ones: rounding may explain it, but it may hide a fault as well.
_HIDES_FAULTS, _UNRELATED = 0.6, 0.9


class RoundingError(RunError):
    """A 16-bit model's logits differ by so much that only float32 tells whether rounding is the reason."""


class Oracle:
    """Logits of transformers' own forward pass for two short texts."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.is_quantized = stays_quantized(model.config) is not None
        num_tokens = max(2, min(_NUM_TOKENS, getattr(config, "max_position_embeddings", None) or _NUM_TOKENS))
        num_ids = int(config.vocab_size)
        tokens = spread_tokens(2 * num_tokens, num_ids)
        self.texts = tokens[0::2], tokens[1::2]
        self._failure: Exception | None = None
        self._rounded: Tensor | None = None
        try:
            with torch.no_grad(), quiet(), _own_attention(config):  # a quantizer may make its weights in here
                ids = torch.tensor(self.texts, device=model.device)
                self.logits, self._rounded = self._reference(model, ids)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whether our path runs is asked first: it names what is not supported
            self._failure = error

    def _reference(self, model: Any, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [2, n, V] of both texts, and of both by a forward that is rounded to the weights' 16 bits."""
        if not self.is_quantized and model.dtype in (torch.bfloat16, torch.float16):
            with suppress(TypeError, ValueError, RuntimeError):  # its code wants all tensors in the weights' dtype
                return reference_logits(model, ids)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits.float()
        return logits, None

    def check_reference(self, name: str) -> None:
        """Refuse a model that transformers itself cannot decode, before our path is asked.

        Raises:
            RunError: transformers' own forward fails.
        """
        if self._failure is not None:
            message = f"transformers' own forward pass of `{name}` fails: {first_line(self._failure)}"
            raise RunError(message, "try another --dtype, or choose another checkpoint") from self._failure

    def error(self, lm: TransformersLM) -> float:
        """The largest relative error of our path, NaN before any; 0 where transformers' own logits are no numbers."""
        errors = torch.tensor([relative_error(logits, right) for logits, right in self._pieces(lm)])
        return float(errors.max()) if self.logits.isfinite().all() else 0.0  # sampling refuses the token that meets it

    def check(self, lm: TransformersLM) -> None:
        """Refuse a model whose path through this engine gives other logits.

        Raises:
            UsageError: its attention is not replaced and cannot take several rows in one forward.
            RoundingError: a difference in 16 bits that float32 has to judge.
            RunError: any other difference, or transformers' own forward fails.
        """
        self.check_reference(lm.name)
        error, allowed = self.error(lm), self.allowed(lm)
        if error <= allowed:
            return
        if lm.config.get_text_config()._attn_implementation != NAME:
            raise UsageError(
                f"architecture `{lm.config.model_type}` of `{lm.name}` is not supported: it cannot decode several rows "
                "in one forward",
                f"choose a causal LM of another family ({FAMILIES})",
            )
        precision = "int8" if lm.kind == "int8" else str(lm.dtype).removeprefix("torch.")
        is_halved = precision in ("bfloat16", "float16") and not self.is_quantized
        is_hidden = is_halved and error <= max(_UNRELATED, _AS_ROUNDED * self.rounding)
        raise (RoundingError if is_hidden else RunError)(
            f"`{lm.name}` gives other logits here than in transformers' own forward pass: the relative error is "
            f"{error:.2g}, and {precision} explains {allowed:.2g}",
            "please report it; `--decoder transformers` may decode it, engine.check_at_load: false skips this check",
        )

    def _pieces(self, lm: TransformersLM) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [n, V] by our path and by transformers', of as many tokens as the cache has room for.

        The first text comes in two pieces, the second beside it, the second's end token by token.
        """
        room = min(lm.max_context, lm.num_blocks // 2 * lm.block_size, len(self.texts[0]))
        is_small = room < _NUM_ALONE + 1  # a cache of one block, or a context of a few tokens
        room = min(lm.max_context, lm.num_blocks * lm.block_size, len(self.texts[0])) if is_small else room
        first, second = (text[:room] for text in self.texts)
        right, beside = self.logits[:, :room]
        if is_small:
            yield lm.score([Row(0, first, room)]), right
        else:
            half, alone = room // 2, room - _NUM_ALONE
            begun = lm.score([Row(0, first[:half], half)])
            both = lm.score([Row(0, first, room - half), Row(1, second[:alone], alone)])
            yield torch.cat((begun, both[: room - half])), right
            yield both[room - half :], beside[:alone]
            ends = [lm.score([Row(1, second[: place + 1], 1)]) for place in range(alone, room)]
            yield torch.cat(ends), beside[alone:]
        lm.release(0)
        lm.release(1)

    def allowed(self, lm: TransformersLM) -> float:
        """The largest relative error that a model's precision explains."""
        is_coarse = lm.kind == "int8" or self.is_quantized
        least = _ALLOWED_QUANTIZED if is_coarse else _ALLOWED.get(lm.dtype, _ALLOWED_QUANTIZED)
        return max(least, min(_AS_ROUNDED * self.rounding, _HIDES_FAULTS))

    @property
    def rounding(self) -> float:
        """The relative error of a forward that is rounded to the weights' 16 bits; 0 where none was made."""
        if self._rounded is None:
            return 0.0
        return max(relative_error(logits, right) for logits, right in zip(self._rounded, self.logits, strict=True))


def spread_tokens(count: int, num_ids: int) -> list[int]:
    """So many tokens from all over a vocabulary, none of them twice if it has enough."""
    return [(1 + i * _STRIDE % max(num_ids - 1, 1)) % num_ids for i in range(count)]


def relative_error(found: Tensor, right: Tensor) -> float:
    """The median position's distance between logits [n, V], means taken off, by the size of the right ones.

    One position may be far off where a mixture's router chose another expert by a rounding.
    """
    found, right = (logits.float() - logits.float().mean(1, keepdim=True) for logits in (found, right))
    size = right.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found - right).norm(dim=1) / size).median())


@contextmanager
def _own_attention(config: Any) -> Iterator[None]:
    """transformers' eager attention in the place of ours."""
    given = config._attn_implementation
    if given in (NAME, JOINED, APART):
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = given
