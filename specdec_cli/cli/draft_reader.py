"""The draft of a sweep whose text comes from elsewhere: the models that this machine loads to read that text with it.

The text is the same whatever reads it. A draft that looks up text needs no model, a language model needs itself, and a
draft on the target's hidden states needs the target as well.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_cli.drafters import from_fields, lookups
from specdec_cli.drafters.elsewhere import ELSEWHERE, TRACED
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.export.draft_kind import DRAFT_MODEL, draft_kind
from specdec_cli.export.settings import is_gguf

if TYPE_CHECKING:
    from specdec_cli.measure.predict.trace import Trace
    from specdec_cli.recipe import Recipe

Watch = Callable[[int, int], None]

_TOGETHER = 8
"""Prompts that are read at a time."""
_NO_MODEL = "use one without: {lookups}; or name its server with --draft-endpoint"
_NO_STATES = "use one without: {lookups}; or sweep with --engine, where the target's folder is on this machine"
_OTHER_FORM = "sweep with the folders that target and draft were converted from, or measure k with bench --engine"


@dataclass(frozen=True, slots=True)
class DraftReader:
    """Reads a trace's text with a recipe's draft."""

    recipe: Recipe

    @property
    def name(self) -> str:
        """The draft's name in traces: its folder, hub id or method with its options."""
        return _name(self.recipe)

    @property
    def has_confidence(self) -> bool:
        """Whether the draft has probabilities, which p-min bounds."""
        return True

    def check(self) -> None:
        """Refuse what cannot be loaded here, before a server is started or asked; most drafts load as the engine's do.

        Raises:
            SpecdecError: a model is not here, or the draft does not fit the target.
        """

    def read(self, trace: Trace, k_max: int, watch: Watch) -> None:
        """Load the models and add the draft to a trace.

        Args:
            trace: takes it.
            k_max: most tokens drafted at a start.
            watch: told how many of all prompts are done.

        Raises:
            UsageError: the text has tokens that the draft has not.
            RunError: a model does not load.
        """
        raise NotImplementedError


def draft_reader(recipe: Recipe, *, trust_remote_code: bool = False) -> DraftReader:
    """The reader of a recipe's draft; nothing is loaded yet.

    Args:
        recipe: with the draft.
        trust_remote_code: run code that comes with a checkpoint.

    Raises:
        UsageError: there is no draft, or one whose acceptance no text tells.
    """
    draft = recipe.draft
    if draft.method == "none":
        raise UsageError("there is no draft to sweep", "name one with --draft")
    if draft.method == "prediction":
        raise UsageError("the draft `prediction` reads one prompt's text, and a sweep has many", "choose another")
    kind = draft_kind(draft.model, draft.method, draft.options)
    method = kind.method
    if method in lookups() or method == TRACED:
        return LookupReader(recipe)
    if method in ELSEWHERE:
        hint = "measure it: compare-drafts --engine llamacpp"
        raise UsageError(f"no trace tells what the draft `{method}` would guess", hint)
    if method == "universal":
        message = (
            f"the draft `{_name(recipe)}` has another tokenizer, and engines match its tokens in ways of their own"
        )
        raise UsageError(message, "measure it: bench --engine")
    if method == DRAFT_MODEL:
        return ModelReader(recipe)
    file = recipe.target.model if method == "mtp" and draft.model is None else draft.model
    if file is not None and is_gguf(str(file)):
        message = f"a sweep runs {kind.what} on the text itself, and does not read it from the GGUF file `{file}`"
        raise UsageError(message, _OTHER_FORM)
    return PairReader(recipe, trust_remote_code, reads_states=method != "pard")


def reader_without_models(recipe: Recipe) -> DraftReader:
    """The reader of a draft that looks up text.

    Raises:
        UsageError: the draft needs a model, its own or the target.
    """
    reader = draft_reader(recipe)
    if isinstance(reader, LookupReader):
        return reader
    known = ", ".join(f"-d {name}" for name in lookups())
    if isinstance(reader, PairReader) and reader.reads_states:
        message = f"the draft `{reader.name}` reads the target's hidden states, which no server gives"
        raise UsageError(message, _NO_STATES.format(lookups=known))
    message = f"the draft `{reader.name}` needs a model, which is not loaded here"
    raise UsageError(message, _NO_MODEL.format(lookups=known))


def _name(recipe: Recipe) -> str:
    from specdec_cli.measure.predict.traced import draft_name

    return draft_name(recipe)


@dataclass(frozen=True, slots=True)
class LookupReader(DraftReader):
    """A draft that looks up text."""

    @property
    def has_confidence(self) -> bool:
        """Whether the draft has probabilities: it has none."""
        return False

    def read(self, trace: Trace, k_max: int, watch: Watch) -> None:
        """Ask it along the text."""
        from specdec_cli.drafters.contract import Resources
        from specdec_cli.measure.predict.tracing import trace_draft

        def no_model(model: str) -> Any:
            raise AssertionError(f"a draft without a model asks for {model}")

        drafter = from_fields(self.recipe.draft_fields())
        drafter.load(Resources(no_model, None, trace.num_tokens))
        trace.drafts[self.name] = trace_draft(trace, drafter, k_max, watch)


@dataclass(frozen=True, slots=True)
class SyntheticReader(DraftReader):
    """A draft with synthetic acceptance, which no text and no model decides."""

    @property
    def has_confidence(self) -> bool:
        """Whether p-min can be predicted: the text is drawn at random, and how sure the draft is of it is not known."""
        return False

    def read(self, trace: Trace, k_max: int, watch: Watch) -> None:
        """Let every drafted token stand with the recipe's chance, by the rule `rejection` as q/p with p = 1."""
        from specdec_cli.engine.synthetic import at_depth, conditional, synthetic_rates
        from specdec_cli.measure.predict.draft_trace import DepthTrace

        rates = synthetic_rates(at_depth(self.recipe.speculation, k_max))
        assert rates is not None, "a synthetic recipe has rates"
        made = DepthTrace.empty(trace.num_output_tokens, k_max, None, None, None)
        with np.errstate(divide="ignore"):
            made.log_q[:] = np.log(conditional(rates))
        trace.log_p[:] = 0.0
        trace.drafts[self.name] = made


@dataclass(frozen=True, slots=True)
class ModelReader(DraftReader):
    """A language model, which reads the text by itself: the target need not load here."""

    def read(self, trace: Trace, k_max: int, watch: Watch) -> None:
        """Score the text with it."""
        from specdec_cli.drafters.contract import Resources
        from specdec_cli.lm.load import load_lm
        from specdec_cli.measure.predict.tracing import trace_draft

        draft = self.recipe.draft
        lm = load_lm(str(draft.model), revision=draft.revision, dtype=draft.dtype, max_num_seqs=1)
        _take_vocabulary(trace, f"the draft `{self.name}`", lm.vocab_size)
        drafter = from_fields(self.recipe.draft_fields())
        drafter.load(Resources(lambda _: lm, None, lm.vocab_size))
        trace.drafts[self.name] = trace_draft(trace, drafter, k_max, watch)


@dataclass(frozen=True, slots=True)
class PairReader(DraftReader):
    """A draft that runs beside its target here, as in plain decoding.

    Args:
        trust_remote_code: run code that comes with a checkpoint.
        reads_states: whether the draft reads the target's hidden states.
    """

    trust_remote_code: bool
    reads_states: bool

    def check(self) -> None:
        """Read the configurations of target and draft."""
        from specdec_cli.engine.drafts import check_recipe

        try:
            check_recipe(self.recipe, trust_remote_code=self.trust_remote_code)
        except SpecdecError as error:
            why = "reads the target's hidden states" if self.reads_states else "runs beside its target"
            message = f"the draft `{self.name}` {why}, so both must load here: {error.message}"
            raise type(error)(message, error.hint) from error

    def read(self, trace: Trace, k_max: int, watch: Watch) -> None:
        """Read the text with the target, and its hidden states with the draft."""
        from specdec_cli.engine.depth.draft_limit import cut_drafts
        from specdec_cli.engine.engine import Engine
        from specdec_cli.measure.predict.tracing import trace_draft

        engine = Engine.from_recipe(self._alone(k_max), trust_remote_code=self.trust_remote_code)
        _take_vocabulary(trace, f"the target `{engine.target.name}`", engine.num_tokens)
        trace.drafts[self.name] = trace_draft(trace, engine.drafter, k_max, watch, engine.target)
        trace.notices += cut_drafts(engine.drafter, k_max)
        del engine
        gc.collect()  # its parts know each other, and another engine is started next

    def _alone(self, k_max: int) -> Recipe:
        """The recipe with what loading both takes: memory and settings of decoding are the other engine's."""
        from specdec_cli.recipe.schema import Speculation

        recipe = self.recipe
        own = {"name": "specdec", "kv_cache_memory": "auto", "enable_prefix_caching": False, "max_num_seqs": _TOGETHER}
        changed = {
            "engine": recipe.engine.model_copy(update=own),
            "target": recipe.target.model_copy(update={"quantize": "none"}),
            "speculation": Speculation(num_speculative_tokens=k_max),
        }
        return recipe.model_copy(update=changed)


def _take_vocabulary(trace: Trace, whose: str, num_tokens: int) -> None:
    """Let a trace of a server's text, which knows no vocabulary, have that of a model which reads it.

    Raises:
        UsageError: the text has tokens beyond it.
    """
    if num_tokens < trace.num_tokens:
        message = f"{whose} has {num_tokens} tokens, and the target's text has token {trace.num_tokens - 1}"
        raise UsageError(message, "use a draft with the target's tokenizer")
    trace.num_tokens = num_tokens
