"""transformers beside our engine, greedy, the same token ids in: `generate`, its assistant, continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager

from specdec_cli.errors import RunError
from specdec_cli.lm.decoders import TRANSFORMERS
from specdec_cli.lm.files.checkpoint import clear_errors
from specdec_cli.lm.files.reading import first_line, quiet
from specdec_cli.lm.from_files import model_from_files
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.settings import ModelSettings

_PAGE_TOKENS = 32
_MOST_BATCH_TOKENS = 2048  # of one step of continuous batching; longer prompts enter in pieces
_POLL_SECONDS = 1.0  # between two looks at whether its thread still lives, not a wait for a result


@dataclass(frozen=True, slots=True)
class PeerRun:
    """A peer's result for a group of prompts.

    Args:
        token_ids: each prompt's new tokens, the end token included.
        first_seconds: until every prompt's first new token was there.
        total_seconds: until the last.
        num_first: new tokens of all prompts that were there at first (an assistant brings several).
    """

    token_ids: list[list[int]]
    first_seconds: float
    total_seconds: float
    num_first: int


class _Peer:
    """A transformers model that decodes greedily."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def version(self) -> str:
        """Its name in reports."""
        return f"transformers {transformers.__version__}"

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self._model.device)


class TransformersPeer(_Peer):
    """A transformers model, decoding greedily with its own loop and cache.

    Args:
        model: the target, as transformers loads it.
        assistant: its draft model, or None for plain decoding.
        num_assistant_tokens: k, kept constant.
    """

    def __init__(self, model: Any, assistant: Any = None, num_assistant_tokens: int = 0) -> None:
        super().__init__(model)
        self._assistant = assistant
        if assistant is not None:
            settings = assistant.generation_config
            settings.num_assistant_tokens = num_assistant_tokens
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> PeerRun:
        """Decode prompts together; shorter ones are padded on the left.

        Raises:
            RunError: transformers gave up.
        """
        assert self._assistant is None or len(prompts) == 1, "transformers' assistant takes one prompt at a time"
        ids, mask = self._padded(prompts)
        clock = _FirstTokenClock()
        more = {} if self._assistant is None else {"assistant_model": self._assistant}
        begin = perf_counter()
        with _failing_as("generate"), torch.inference_mode(), quiet():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                min_new_tokens=None,
                eos_token_id=list(stop_ids) or None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **more,
            )
        end = perf_counter()
        assert clock.first is not None, "transformers asks its stopping criteria after every step"
        tokens = [_cut(row, stop_ids) for row in out[:, ids.shape[1] :].tolist()]
        num_first = sum(min(clock.num_tokens - ids.shape[1], len(row)) for row in tokens)
        return PeerRun(tokens, clock.first - begin, end - begin, num_first)

    def close(self) -> None:
        """Nothing of it runs between two calls."""

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and mask [B, longest] int64."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return ids.to(self._model.device), mask.to(self._model.device)


class _FirstTokenClock(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when transformers first asks, which is when the first new tokens are there."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.num_tokens = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """One answer for each sequence of input_ids [B, length] int64: no."""
        if self.first is None:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            self.first = perf_counter()
            self.num_tokens = int(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class ContinuousPeer(_Peer):
    """A transformers model, decoding greedily by its continuous batching, whose thread lives until `close`.

    Its own defaults size its cache and its steps by the machine's memory, and on a CPU its steps are slow then; here
    both are as large as a group needs. It keeps the attention the model was loaded with, and no prefixes.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._manager: Any = None
        self._room = (0, 0, 0)

    @property
    def version(self) -> str:
        """Its name in reports."""
        return f"{super().version}, continuous batching"

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> PeerRun:
        """Decode prompts together; all are there before its loop takes the first.

        Raises:
            RunError: transformers gave up.
        """
        with _failing_as("continuous batching"), quiet():
            room = _room(prompts, max_new_tokens)
            if self._manager is None or any(need > have for need, have in zip(room, self._room, strict=True)):
                self._open(room)
                self._decode([prompts[0]], 2, stop_ids)  # a thread's first step is a slow one
            return self._decode(prompts, max_new_tokens, stop_ids)

    def close(self) -> None:
        """End its thread and free its cache; a later call starts again."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            with quiet():
                manager.stop(block=True, hard_stop=True)
                manager.destroy()

    def _open(self, room: tuple[int, int, int]) -> None:
        """A manager with room for (requests, blocks, tokens of a step), in place of a smaller one."""
        self.close()
        num_requests, num_blocks, num_tokens = map(max, room, self._room)
        self._room = num_requests, num_blocks, num_tokens
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=num_blocks,
                max_batch_tokens=num_tokens,
                max_requests_per_batch=num_requests,
                safety_margin=0.0,
                allow_block_sharing=False,
                auto_switch_to_flash=False,
            ),
        )
        self._manager.start()

    def _decode(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> PeerRun:
        manager = self._manager
        with manager.pause():
            begin = perf_counter()
            names = [
                manager.add_request(
                    list(prompt),
                    max_new_tokens=max_new_tokens,
                    record_timestamps=True,
                    eos_token_id=list(stop_ids) or [-1],
                )
                for prompt in prompts
            ]
        results: dict[str, Any] = {}
        while len(results) < len(names):
            result = manager.get_result(timeout=_POLL_SECONDS)
            if result is None and not manager.is_running():
                raise RuntimeError(f"its thread ended: {manager.background_thread_status.fatal_error}")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                results[result.request_id] = result
        end = perf_counter()
        first = max(results[name].timestamps[0] for name in names)
        num_first = sum(moment <= first for name in names for moment in results[name].timestamps)
        return PeerRun([list(results[name].generated_tokens) for name in names], first - begin, end - begin, num_first)


def _room(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[int, int, int]:
    """Requests, blocks of `_PAGE_TOKENS` tokens, and tokens of the widest step that a group needs."""
    blocks = sum(-(-(len(prompt) + max_new_tokens) // _PAGE_TOKENS) + 1 for prompt in prompts)
    tokens = min(max(sum(map(len, prompts)), _PAGE_TOKENS), _MOST_BATCH_TOKENS)
    return len(prompts), blocks, max(tokens, len(prompts))


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Say of any error that it was transformers' own."""
    try:
        yield
    except Exception as error:
        raise RunError(f"transformers' {what} failed: {first_line(error)}", "leave it out of --against") from error


Peer = TransformersPeer | ContinuousPeer


def load_peer(
    target: str,
    assistant: str | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    assistant_revision: str | None = None,
    assistant_dtype: str = "auto",
    assistant_device: str = "auto",
    num_assistant_tokens: int = 0,
    trust_remote_code: bool = False,
    is_continuous: bool = False,
) -> Peer:
    """Load transformers' own form of a target, and of a draft model as its assistant, or for continuous batching.

    Raises:
        RunError: a model that does not load, or an older transformers' continuous batching.
    """
    assert assistant is None or not is_continuous, "transformers' continuous batching takes no assistant"
    if is_continuous and not hasattr(ContinuousBatchingManager, "pause"):
        raise RunError(
            f"transformers `{transformers.__version__}` has another continuous batching than `transformers-cb` drives",
            "install transformers 5.23",
        )
    model = _load(target, revision, dtype, device, trust_remote_code)
    if is_continuous:
        return ContinuousPeer(model)
    if assistant is None:
        return TransformersPeer(model)
    draft = _load(assistant, assistant_revision, assistant_dtype, assistant_device, trust_remote_code)
    return TransformersPeer(model, draft, num_assistant_tokens)


def _load(name: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """transformers' model of the same numbers as ours, dequantized and merged as they are, with its own attention."""
    plan = ModelPlan(name, ModelSettings(revision, dtype, device), TRANSFORMERS, trust_remote_code=trust_remote_code)
    for obstacle in plan.obstacles:
        raise obstacle
    with quiet(), clear_errors(name):
        model = model_from_files(plan, has_our_attention=False).to(plan.device).eval()
    settings = model.generation_config
    for name_of in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_length"):
        setattr(settings, name_of, None)  # a checkpoint's own sampling defaults are not ours
    return model


def _cut(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Up to and with the first end token; what follows is padding."""
    end = next((place for place, token in enumerate(tokens) if token in stop_ids), None)
    return tokens if end is None else tokens[: end + 1]
