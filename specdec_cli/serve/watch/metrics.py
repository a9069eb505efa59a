"""The server's counters: as Prometheus text under vLLM's names, and as plain values for the terminal's table.

The engine's thread adds to plain numbers; nothing is formatted before it is requested.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specdec_cli.events import SpeculativeCounts
from specdec_cli.report.serve import Snapshot
from specdec_cli.serve.watch.histogram import HISTOGRAMS, Histogram

if TYPE_CHECKING:
    from specdec_cli.engine.jobs.records import JobRecord
    from specdec_cli.events import Stepped

FINISHED_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """The numbers of one model's engine; an `Observer`. Every method may be called from any thread.

    Args:
        model_name: the label `model_name` of every series.
        prefix: stands before each name with a colon; `vllm` serves dashboards that were made for vLLM.

    Attributes:
        draft_failures: gives how many steps each drafter failed in; the engine counts those itself.
    """

    def __init__(self, model_name: str, prefix: str = "specdec") -> None:
        self.model_name = model_name
        self.prefix = prefix
        self.lock = threading.Lock()
        self.speculative = SpeculativeCounts()
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.num_finished = Counter(dict.fromkeys(FINISHED_REASONS, 0))
        self.num_refused: Counter[int] = Counter()
        self.draft_failures: Callable[[], Mapping[str, int]] = dict
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_generation_tokens = 0
        self.num_running = 0
        self.num_queued = 0
        self.num_engine_waiting = 0
        self.num_blocks_used = 0
        self.num_blocks = 0
        self._num_open = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait, in the bridge or in the engine."""
        return self.num_queued + self.num_engine_waiting

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that are taken, 0 to 1."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0

    def queued(self, num_waiting: int) -> None:
        """A job waits; `num_waiting` with it."""
        with self.lock:
            self._num_open += 1
            self.num_queued = num_waiting

    def stepped(self, event: Stepped, num_queued: int) -> None:
        """Count a step's tokens and drafts, and take over the engine's state."""
        with self.lock:
            num_tokens = 0
            for emitted in event.emitted:
                self.speculative.add(emitted)
                num_tokens += len(emitted.tokens)
            self.speculative.add_seconds(event)
            self.num_generation_tokens += num_tokens
            self.num_preemptions += event.num_preemptions
            self.histograms["iteration_tokens_total"].observe(event.num_prefill_tokens + num_tokens)
            self.num_running, self.num_engine_waiting = event.num_running, event.num_waiting
            self.num_queued = num_queued
            self.num_blocks_used, self.num_blocks = event.num_blocks_used, event.num_blocks

    def emitted(self, record: JobRecord, num_tokens: int, seconds_since_last: float | None) -> None:
        """A job got tokens: its first ones, which its prompt counts with, or more after an interval."""
        del num_tokens  # counted with the step
        with self.lock:
            if seconds_since_last is not None:
                self.histograms["inter_token_latency_seconds"].observe(seconds_since_last)
                return
            self.num_prompt_tokens += record.num_prompt_tokens
            self.num_cached_tokens += record.num_cached_tokens
            if record.first_token is not None:
                self.histograms["time_to_first_token_seconds"].observe(record.first_token - record.arrived)

    def ended(self, record: JobRecord) -> None:
        """A job finished, was aborted or failed: its times and sizes."""
        with self.lock:
            self.num_finished[record.finish_reason or "error"] += 1
            for name, value in intervals(record).items():
                self.histograms[name].observe(value)
            self.histograms["request_prompt_tokens"].observe(record.num_prompt_tokens)
            self.histograms["request_generation_tokens"].observe(record.num_output_tokens)
            self._close(record)

    def refused(self, status: int) -> None:
        """A request was answered with an error status instead of being queued."""
        with self.lock:
            self.num_refused[status] += 1

    def snapshot(self) -> Snapshot:
        """The numbers of this moment, for the terminal's table."""
        with self.lock:
            counts = self.speculative
            return Snapshot(
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                kv_cache_usage=self.kv_cache_usage,
                num_finished=self.num_finished["stop"] + self.num_finished["length"],
                num_aborted=self.num_finished["abort"],
                num_failed=self.num_finished["error"],
                num_refused=self.num_refused.total(),
                num_prompt_tokens=self.num_prompt_tokens,
                num_generation_tokens=self.num_generation_tokens,
                num_drafts=counts.num_drafts,
                num_draft_tokens=counts.num_draft_tokens,
                num_draft_nodes=counts.num_draft_nodes,
                num_accepted_tokens=counts.num_accepted_tokens,
                num_draft_failures=sum(self.draft_failures().values()),
            )

    def render(self, others: Sequence[Metrics] = ()) -> tuple[bytes, str]:
        """The page that Prometheus scrapes.

        Args:
            others: of further models in this process, under the same prefix.

        Returns:
            The body and its content type.
        """
        from specdec_cli.serve.watch.exposition import exposition

        return exposition([self, *others], self.prefix)

    def _close(self, record: JobRecord) -> None:
        """Take a job that ended out of the running and waiting ones; the next step says how many there are."""
        self._num_open = max(0, self._num_open - 1)
        if not self._num_open:
            self.num_running = self.num_queued = self.num_engine_waiting = self.num_blocks_used = 0
        elif record.first_token is not None:
            self.num_running = max(0, self.num_running - 1)


def intervals(record: JobRecord) -> dict[str, float]:
    """A job's times in seconds by their series' names; what it did not come to is left out."""
    times: dict[str, float] = {}
    if record.finished is not None:
        times["e2e_request_latency_seconds"] = record.finished - record.arrived
    if record.scheduled is None:
        return times
    times["request_queue_time_seconds"] = record.scheduled - record.arrived
    if record.first_token is None or record.last_token is None:
        return times
    decode = record.last_token - record.first_token
    times["request_prefill_time_seconds"] = record.first_token - record.scheduled
    times["request_decode_time_seconds"] = decode
    times["request_inference_time_seconds"] = record.last_token - record.scheduled
    if record.num_output_tokens > 1:
        times["request_time_per_output_token_seconds"] = decode / (record.num_output_tokens - 1)
    return times
