"""transformers' own `generate` beside our engine: the same token ids in, greedy, with and without its assistant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from specdec_cli.errors import RunError
from specdec_cli.lm import load


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What a peer gave for a group of prompts.

    Args:
        token_ids: each prompt's new tokens, the end token included.
        first_seconds: until the first new tokens were there.
        total_seconds: until the last.
        num_first: new tokens of each prompt that were there at first (an assistant brings several).
    """

    token_ids: list[list[int]]
    first_seconds: float
    total_seconds: float
    num_first: int


class TransformersPeer:
    """A transformers model, decoding greedily with its own loop and cache.

    Args:
        model: the target, as transformers loads it.
        assistant: its draft model, or None for plain decoding.
        num_assistant_tokens: k, kept constant.
    """

    def __init__(self, model: Any, assistant: Any = None, num_assistant_tokens: int = 0) -> None:
        self._model = model
        self._assistant = assistant
        if assistant is not None:
            settings = assistant.generation_config
            settings.num_assistant_tokens = num_assistant_tokens
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    @property
    def version(self) -> str:
        """What a report names it."""
        return f"transformers {transformers.__version__}"

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> PeerRun:
        """Decode prompts together; shorter ones are padded on the left.

        Args:
            prompts: token ids.
            max_new_tokens: most new tokens of each.
            stop_ids: tokens that end an output.

        Raises:
            RunError: transformers gave up.
        """
        assert self._assistant is None or len(prompts) == 1, "transformers' assistant takes one prompt at a time"
        ids, mask = self._padded(prompts)
        clock = _Clock()
        more = {} if self._assistant is None else {"assistant_model": self._assistant}
        begin = perf_counter()
        try:
            with torch.inference_mode(), load._quiet():
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
        except Exception as error:
            raise RunError(
                f"transformers' generate failed: {load._first_line(error)}", "leave it out of --against"
            ) from error
        end = perf_counter()
        assert clock.first is not None, "transformers asks its stopping criteria after every step"
        tokens = [_cut(row, stop_ids) for row in out[:, ids.shape[1] :].tolist()]
        return PeerRun(tokens, clock.first - begin, end - begin, clock.num_tokens - ids.shape[1])

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and mask [B, longest] int64."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return ids.to(self._model.device), mask.to(self._model.device)


class _Clock(StoppingCriteria):  # type: ignore[misc]
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
) -> TransformersPeer:
    """Load transformers' own form of a target, and of a draft model as its assistant.

    Raises:
        RunError: a model that does not load.
    """
    model = _load(target, revision, dtype, device, trust_remote_code)
    if assistant is None:
        return TransformersPeer(model)
    draft = _load(assistant, assistant_revision, assistant_dtype, assistant_device, trust_remote_code)
    return TransformersPeer(model, draft, num_assistant_tokens)


def _load(name: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool) -> Any:
    folder = load._model_folder(name, revision, trust_remote_code)
    with load._quiet(), load._clear_errors(name):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=load._dtype(dtype),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
        model = model.to(load._device(device)).eval()
    settings = model.generation_config
    for name_of in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_length"):
        setattr(settings, name_of, None)  # a checkpoint's own sampling defaults are not ours
    return model


def _cut(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """Up to and with the first end token; what follows is padding."""
    end = next((place for place, token in enumerate(tokens) if token in stop_ids), None)
    return tokens if end is None else tokens[: end + 1]
