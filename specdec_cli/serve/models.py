"""The models of one server: each with its engine, bridge and numbers, loaded when it is wanted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from specdec_cli.engine.jobs.bridge import Bridge
from specdec_cli.engine.jobs.snapshot import Snapshot
from specdec_cli.errors import Unavailable, UsageError
from specdec_cli.lm.files.generation import Generation
from specdec_cli.sampling.grammar import read_tokenizer
from specdec_cli.serve.errors import unknown_model
from specdec_cli.serve.metrics import Metrics
from specdec_cli.serve.request.parameters import Defaults
from specdec_cli.serve.request.prepare import ModelInfo

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.recipe.schema import Serve

logger = logging.getLogger(__name__)

State = Literal["idle", "loading", "ready", "failed"]


class Model:
    """One served model.

    Args:
        name: in requests and answers.
        aliases: more names that requests may use.
        load: loads its engine; called on a thread of its own.
        serve: the server's limits, and the model's formats of tool calls and of thinking.
        root: what is loaded under that name, for `/v1/models`.
        draft: what guesses, in words; None decodes without a draft.
        num_speculative_tokens: k.
        tree: shape of the drafted trees; None drafts chains.
        sampling: what absent sampling fields of a request take.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Engine],
        serve: Serve,
        *,
        aliases: Sequence[str] = (),
        root: str | None = None,
        draft: str | None = None,
        num_speculative_tokens: int = 0,
        tree: str | None = None,
        sampling: Defaults | None = None,
    ) -> None:
        self.name = name
        self.names = (name, *aliases)
        self.root = root or name
        self.draft = draft if num_speculative_tokens else None
        self.num_speculative_tokens = num_speculative_tokens
        self.tree = tree if num_speculative_tokens else None
        self.created = int(time.time())
        self.metrics = Metrics(name, serve.metrics_prefix)
        self.state: State = "idle"
        self.failure: BaseException | None = None
        self.on_failure: Callable[[Model, BaseException], None] | None = None
        self.settled = threading.Event()
        self.num_preparing = 0
        self.suggested = ""
        self._load = load
        self._serve = serve
        self._sampling = sampling or Defaults()
        self._bridge: Bridge | None = None
        self._info: ModelInfo | None = None
        self._lock = threading.Lock()

    def begin_loading(self) -> None:
        """Load it on a thread of its own, unless that was begun already."""
        with self._lock:
            if self.state != "idle":
                return
            self.state = "loading"
        threading.Thread(target=self.load, name=f"load-{self.name}", daemon=True).start()

    def load(self) -> None:
        """Load it now; what goes wrong is kept in `failure` and told."""
        self.state = "loading"
        begin = time.monotonic()
        try:
            engine = self._load()
        except BaseException as error:
            self.state = "failed"
            self._fail(error)
        else:
            self._begin_serving(engine)
            facts = {"model": self.name, "seconds": time.monotonic() - begin}
            applies = {"generation_config": self.suggested} if self.suggested else {}
            if (form := self.info.tool_call_format) is not None:
                applies["tool_calls"] = form
            logger.info("model is ready", extra=facts | applies)
        self.settled.set()

    def _begin_serving(self, engine: Engine) -> None:
        self.suggested = self._suggested(engine)
        self._info = self._describe(engine)
        _warm_up(self._info)
        self.metrics.draft_failures = lambda: engine.drafters.num_failures
        self._bridge = Bridge(
            engine,
            [self.metrics],
            max_waiting=self._serve.max_waiting,
            max_queue_delay_seconds=self._serve.max_queue_delay_microseconds / 1e6,
            on_death=self._fail,
        )
        self._bridge.start()
        self.state = "ready"

    @property
    def bridge(self) -> Bridge:
        """The bridge to its engine; asking for an idle model begins to load it.

        Raises:
            Unavailable: it is not loaded yet, or could not be.
        """
        if self._bridge is not None:
            return self._bridge
        if self.state == "failed":
            raise Unavailable(f"the model `{self.name}` could not be loaded: {self.failure}", "model_failed")
        self.begin_loading()
        raise Unavailable(f"the model `{self.name}` is loading", "model_loading")

    @property
    def info(self) -> ModelInfo:
        """Properties of the model for the preparation of requests. Raises the same errors as `bridge`."""
        if self._info is None:
            assert self.bridge, "a loaded model has its info"
        assert self._info is not None, "a loaded model has its info"
        return self._info

    @property
    def loaded(self) -> Bridge | None:
        """The bridge, or None before it is loaded."""
        return self._bridge

    @property
    def drafting(self) -> str:
        """Draft and k in words."""
        if self.draft is None:
            return "no draft"
        tree = "" if self.tree is None else f", tree {self.tree}"
        return f"draft {self.draft}, k = {self.num_speculative_tokens}{tree}"

    @property
    def max_model_len(self) -> int | None:
        """Context limit in tokens, once it is known."""
        return None if self._info is None else self._info.max_context

    def _describe(self, engine: Engine) -> ModelInfo:
        longest, own = _longest_context(engine, self._serve.max_speculative_tokens), engine.target.max_context
        if longest < own:
            message = (
                "the KV cache holds `%d` tokens of one sequence, fewer than the context of `%d`: that is the limit"
            )
            logger.warning(message, longest, own, extra={"model": self.name})
        return ModelInfo(
            tokenizer=engine.tokenizer,
            num_tokens=engine.num_tokens,
            max_context=longest,
            names=self.names,
            planner=engine.planner,
            sampling=self._sampling.over(engine.generation),
            num_speculative_tokens=engine.options.num_speculative_tokens,
            drafters=tuple(engine.drafters.by_name),
            serve=self._serve,
        )

    def _suggested(self, engine: Engine) -> str:
        """The part of the checkpoint's generation configuration that applies, in words; empty without one."""
        generation = engine.generation
        for key, value in generation.unused.items():
            message = "`%s` asks for `%s: %s`, which is not applied"
            logger.warning(message, generation.source, key, value, extra={"model": self.name})
        if generation.source is None:
            return ""
        ends = [f"end tokens {' '.join(map(str, engine.eos_token_ids))}"] if engine.eos_token_ids else []
        words = Generation(self._sampling.taken(generation)).words
        return "; ".join([words, *ends] if words else ends)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        if self.on_failure is not None:
            self.on_failure(self, error)


def _warm_up(info: ModelInfo) -> None:
    """Import and read what tool calls and grammars need, which would hold up every request for seconds."""
    _ = info.tool_call_format
    if info.tokenizer is not None:
        with suppress(UsageError):  # a grammar is refused then, by the same words
            read_tokenizer(info.tokenizer)


def _longest_context(engine: Engine, most_drafted: int) -> int:
    """Most tokens of one sequence: the target's context, or what its KV cache holds beside the drafted ones.

    A chain never drafts past the context; siblings in a tree share positions, so a tree may need more blocks.

    Args:
        engine: loaded.
        most_drafted: the largest k that a request may ask for.
    """
    target = engine.target
    num_drafted = max(engine.options.most_nodes, most_drafted)
    held = target.num_blocks * target.block_size
    beyond = 0 if engine.options.tree is None else engine.options.most_nodes
    return target.max_context if held >= target.max_context + beyond else max(held - num_drafted, 1)


class Models:
    """The models by name, and how they are together.

    Args:
        models: at least one; the first is the default for requests.
        hang_timeout_seconds: a step longer than this counts as stuck.
    """

    def __init__(self, models: Iterable[Model], hang_timeout_seconds: float = 120.0) -> None:
        self.all = list(models)
        self.is_draining = False
        self._by_name = {name: model for model in self.all for name in model.names}
        self._hang_timeout_seconds = hang_timeout_seconds

    @property
    def names(self) -> tuple[str, ...]:
        """Every model's name."""
        return tuple(self._by_name)

    @property
    def bridges(self) -> Sequence[Bridge]:
        """Bridges of the models that are loaded."""
        return [model.loaded for model in self.all if model.loaded is not None]

    @property
    def is_loading(self) -> bool:
        """Whether any of them is being loaded now."""
        return any(model.state == "loading" for model in self.all)

    def find(self, name: str | None) -> Model:
        """The model that a request means.

        Raises:
            ApiError: 404, there is none of that name.
        """
        if name is None:
            return self.all[0]
        model = self._by_name.get(name)
        if model is None:
            raise unknown_model(name, self.names)
        return model

    def health(self) -> str:
        """`ok`, or why the server should get no requests: draining, dead, failed, stuck or loading."""
        if self.is_draining:
            return "draining"
        if any(not bridge.is_alive for bridge in self.bridges):
            return "dead"
        if any(bridge.busy_seconds > self._hang_timeout_seconds for bridge in self.bridges):
            return "stuck"
        states = {model.state for model in self.all}
        if states == {"failed"}:
            return "failed"
        return "ok" if len(self.all) > 1 or states == {"ready"} else "loading"

    async def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests and wait for those that run; whether all of them ended in time."""
        self.is_draining = True
        deadline = time.monotonic() + timeout_seconds
        for bridge in self.bridges:
            bridge.is_draining = True
        ended = [await bridge.drain(deadline - time.monotonic()) for bridge in self.bridges]
        return all(ended)

    def stop(self) -> bool:
        """End the engines' threads; whether all of them ended in time."""
        ended = [bridge.stop() for bridge in self.bridges]
        return all(ended)

    def snapshot(self) -> Snapshot:
        """The numbers of all models together; of the KV caches the fullest one's."""
        parts = [asdict(model.metrics.snapshot()) for model in self.all]
        sums = {name: sum(part[name] for part in parts) for name in parts[0]}
        return Snapshot(**sums | {"kv_cache_usage": max(part["kv_cache_usage"] for part in parts)})
