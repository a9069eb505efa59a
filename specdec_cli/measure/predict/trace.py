"""The trace: a target's text, and for each of its tokens what a draft would have said there.

From it follows, for every k and every rule of verification, what would have been accepted (`replay`). It holds a few
numbers for each position, never a vocabulary's width. The rank of each token in a draft model's distribution predicts
every static tree at temperature 0; the draft's confidence there tells where p-min ends a draft of another engine.
Figures that it cannot know say so: our own `p_min` and adaptive depths, rules that change the text (`typical`), drafts
that sample and are not a language model of their own.

The file is one safetensors file: arrays by name, everything else as JSON in its header, with a version. Ranks and
confidences are optional in it: files of earlier versions lack them and predict chains of k tokens alone, and earlier
versions ignore them.

Letters: B prompts, N output tokens of all prompts one after another.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.files.origin import Origin
from specdec_cli.measure.predict.draft_trace import (
    DepthTrace,
    DraftTrace,
    Float32Array,
    GuessTrace,
    ModelTrace,
    UInt8Array,
)
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_cli.engine.decoding import Request
    from specdec_cli.text.tokenizer import Tokenizer

FORMAT = "specdec.trace/2"
_HEADER = "specdec.trace"
_HINT = "leave --trace out to trace again, or choose another file for it"
_PROBE = "The 3 quick brown foxes don't jump — 12.5 % of “lazy” dogs…\n\tnaïve Ärger 東京 🙂 return f(x) != None;"


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """One prompt and the target's continuation.

    Args:
        token_ids: the prompt.
        output: the target's own tokens, the first one (which prefill gives) included.
        max_tokens: longest that prompt and output could have grown.
        params: how it was sampled.
        task: what kind of prompt it is, or None.
        beyond: of the output's tokens, those that an engine does not emit: it drafts them near the end and counts them
            as accepted all the same.
    """

    token_ids: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    task: str | None = None
    beyond: int = 0

    @property
    def num_emitted(self) -> int:
        """Tokens that an engine emits."""
        return len(self.output) - self.beyond


_ORIGIN: TypeAdapter[Origin | None] = TypeAdapter(Origin | None)
_PARAMS = TypeAdapter(SamplingParams)
_KINDS: dict[str, type[DraftTrace]] = {"model": ModelTrace, "guesses": GuessTrace, "depths": DepthTrace}


@dataclass(slots=True)
class Trace:
    """A target's text over prompts, and drafts along it.

    Args:
        target: the target's name.
        num_tokens: V, the real vocabulary.
        eos_token_ids: the target's end tokens.
        tokenizer: fingerprint of the tokenizer, or None without one.
        prompts: B prompts.
        log_p: [N] float32, nats of each emitted token under p; 0 at temperature 0.
        drafts: by name.
        origin: the target as it was loaded.
        notices: for the reader of its figures; not in its file.
    """

    target: str
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer: str | None
    prompts: list[TracedPrompt]
    log_p: Float32Array
    drafts: dict[str, DraftTrace] = field(default_factory=dict)
    origin: Origin | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        """Number N of output tokens."""
        return sum(len(prompt.output) for prompt in self.prompts)

    @property
    def num_emitted_tokens(self) -> int:
        """Output tokens that an engine emits."""
        return sum(prompt.num_emitted for prompt in self.prompts)

    @property
    def is_greedy(self) -> bool:
        """Whether every prompt was decoded at temperature 0."""
        return all(prompt.params.temperature == 0 for prompt in self.prompts)

    @property
    def temperature(self) -> float:
        """The highest temperature of its prompts."""
        return max((prompt.params.temperature for prompt in self.prompts), default=0.0)

    def stop_ids(self, prompt: TracedPrompt) -> frozenset[int]:
        """Tokens that end a prompt's output."""
        eos = () if prompt.params.ignore_eos else self.eos_token_ids
        return frozenset(prompt.params.stop_token_ids) | frozenset(eos)

    def draft(self, name: str) -> DraftTrace:
        """A draft's trace by name.

        Raises:
            UsageError: it is not in the trace.
        """
        if name not in self.drafts:
            held = ", ".join(self.drafts) or "none"
            raise UsageError(f"the trace holds no draft `{name}`", f"it holds: {held}; trace the draft first")
        return self.drafts[name]

    def ranks(self, name: str) -> UInt8Array:
        """Ranks of the emitted tokens in a draft's distribution: [N], or [N, K] by start and depth.

        Raises:
            UsageError: the draft is not in the trace or has no distribution, or its trace has no ranks.
        """
        draft = self.draft(name)
        if isinstance(draft, GuessTrace):
            raise UsageError(
                f"the draft `{name}` has no distribution, so a trace cannot predict its trees",
                "predict chains, or trace a draft model",
            )
        if draft.rank is None:
            raise UsageError(
                f"the trace of the draft `{name}` has no ranks: an earlier version wrote it, and it predicts chains "
                "but not trees",
                _HINT,
            )
        return draft.rank

    def check(self, tokenizer: Tokenizer | None, requests: Sequence[Request]) -> None:
        """Refuse to stand for other prompts, other sampling or another tokenizer.

        Raises:
            UsageError: naming the first thing that differs.
        """
        hint = _HINT
        if tokenizer is not None and self.tokenizer not in (None, fingerprint(tokenizer)):
            raise UsageError(f"the trace of `{self.target}` was made with another tokenizer", hint)
        if len(requests) != len(self.prompts):
            raise UsageError(f"the trace has `{len(self.prompts)}` prompts, the workload `{len(requests)}`", hint)
        for place, (prompt, request) in enumerate(zip(self.prompts, requests, strict=True)):
            if prompt.token_ids != tuple(request.token_ids):
                raise UsageError(f"prompt `{place + 1}` of the trace is another one", hint)
            if prompt.params != request.params:
                name = next(n for n in asdict(prompt.params) if getattr(prompt.params, n) != getattr(request.params, n))
                was, now = getattr(prompt.params, name), getattr(request.params, name)
                raise UsageError(f"the trace was sampled with {name} `{was}`, not `{now}` (prompt {place + 1})", hint)

    def check_target(self, now: Origin) -> None:
        """Refuse to stand for another target, wherever its files lie; `notices` takes what may differ a little.

        Raises:
            UsageError: other weights, or the same ones quantized otherwise.
        """
        was = self.origin or Origin(self.target)
        if not was.has_weights_of(now):
            here = f"`{now.words}`" if now.words != was.words else "the same name's weights here"
            raise UsageError(f"the trace is of target `{was.words}`, not {here}: the weights differ", _HINT)
        if was.quantize != now.quantize:
            raise UsageError(f"the trace is of a target with quantize `{was.quantize}`, not `{now.quantize}`", _HINT)
        if was.dtype != now.dtype:
            self.notices.append(
                f"the trace was made with the target in {was.dtype}, and here it runs in {now.dtype}: where two tokens "
                "are nearly as likely the texts part, and predictions are of the trace's"
            )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            RunError: it cannot be written.
        """
        from safetensors.numpy import save

        data = save(self._arrays(), metadata={_HEADER: json.dumps(self._header())})
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise RunError(f"the trace `{path}` cannot be written: {error.strerror or error}") from error

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = {"log_p": self.log_p}
        for name in ("token_ids", "output"):
            parts = [getattr(prompt, name) for prompt in self.prompts]
            arrays[name] = np.array([token for part in parts for token in part], dtype=np.int32)
            arrays[f"{name}.lengths"] = np.array([len(part) for part in parts], dtype=np.int32)
        for place, draft in enumerate(self.drafts.values()):
            for name in _array_names(type(draft)):
                if (values := getattr(draft, name)) is not None:
                    arrays[f"draft.{place}.{name}"] = np.ascontiguousarray(values)
        return arrays

    def _header(self) -> dict[str, Any]:
        kinds = {kind: name for name, kind in _KINDS.items()}
        return {
            "format": FORMAT,
            "target": self.target,
            "num_tokens": self.num_tokens,
            "eos_token_ids": self.eos_token_ids,
            "tokenizer": self.tokenizer,
            "origin": _ORIGIN.dump_python(self.origin),
            "prompts": [
                {"max_tokens": p.max_tokens, "task": p.task, "params": asdict(p.params)}
                | ({"beyond": p.beyond} if p.beyond else {})
                for p in self.prompts
            ],
            "drafts": [
                {"name": name, "kind": kinds[type(draft)], "max_context": draft.max_context}
                | {"origin": _ORIGIN.dump_python(draft.origin)}
                | ({"limit": draft.limit} if isinstance(draft, DepthTrace) else {})
                for name, draft in self.drafts.items()
            ],
        }


def load(path: Path) -> Trace:
    """Read a trace; `check` then says whether it fits a workload.

    Raises:
        UsageError: no trace, one of another version, or a damaged one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"the trace `{path}` cannot be read: {error}", "trace again") from error
    if not isinstance(header, dict):
        raise UsageError(f"`{path}` is not a trace of specdec", "give a file that --trace wrote")
    if header.get("format") != FORMAT:
        raise UsageError(
            f"the trace `{path}` is `{header.get('format')}`, this version reads `{FORMAT}`", "trace again"
        )
    try:
        return _restore(header, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the trace `{path}` is damaged: {error!r}", "trace again") from error


def fingerprint(tokenizer: Tokenizer) -> str:
    """Fingerprint of a tokenizer: vocabulary size, end tokens, and the tokens of a mixed text."""
    message = [tokenizer.num_tokens, list(tokenizer.eos_token_ids), tokenizer.encode(_PROBE, add_special_tokens=False)]
    return hashlib.sha256(json.dumps(message).encode()).hexdigest()[:16]


def _array_names(kind: type[DraftTrace]) -> list[str]:
    return [name for name in kind.__slots__ if name not in ("max_context", "origin", "limit")]


def _restore(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Trace:
    prompts = [
        TracedPrompt(
            token_ids,
            output,
            int(entry["max_tokens"]),
            _PARAMS.validate_python(entry["params"]),
            entry["task"],
            int(entry.get("beyond", 0)),
        )
        for token_ids, output, entry in zip(
            _split(arrays, "token_ids"), _split(arrays, "output"), header["prompts"], strict=True
        )
    ]
    trace = Trace(
        header["target"],
        int(header["num_tokens"]),
        tuple(header["eos_token_ids"]),
        header["tokenizer"],
        prompts,
        arrays["log_p"],
        origin=_ORIGIN.validate_python(header["origin"]),
    )
    for place, entry in enumerate(header["drafts"]):
        kind = _KINDS[entry["kind"]]
        fields: dict[str, Any] = {name: _array(arrays, f"draft.{place}.{name}") for name in _array_names(kind)}
        fields["origin"] = _ORIGIN.validate_python(entry.get("origin") if kind is GuessTrace else entry["origin"])
        if kind is DepthTrace:
            fields["limit"] = entry["limit"]
        trace.drafts[entry["name"]] = kind(**fields, max_context=entry["max_context"])
    held = [getattr(draft, name) for draft in trace.drafts.values() for name in _array_names(type(draft))]
    lengths = [len(trace.log_p), *(len(values) for values in held if values is not None)]
    if any(length != trace.num_output_tokens for length in lengths):
        raise ValueError("arrays of different lengths")
    return trace


def _array(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any] | None:
    """An array of a file; None for one that files of earlier versions lack."""
    return arrays.get(name) if name.endswith((".rank", ".confidence")) else arrays[name]


def _split(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> list[tuple[int, ...]]:
    ends = np.cumsum(arrays[f"{name}.lengths"])
    return [tuple(part.tolist()) for part in np.split(arrays[name], ends[:-1])]
