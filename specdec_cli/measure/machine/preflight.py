"""The preflight of a pair: everything that can be known to go wrong before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PlainSerializer

from specdec_cli.document import Count, VocabularyResult
from specdec_cli.drafters import universal
from specdec_cli.engine.drafts import UNIVERSAL, DraftPlan, check_draft_numbers, read_draft
from specdec_cli.engine.loading import LoadSettings, model_settings
from specdec_cli.errors import ExitCode, SpecdecError, UsageError, WeightsError
from specdec_cli.files import given_path
from specdec_cli.lm.door import Tap
from specdec_cli.lm.facts import ModelFacts, model_facts
from specdec_cli.lm.files.generation import Generation
from specdec_cli.lm.files.names import NONE
from specdec_cli.lm.gguf_blocks import check_file_numbers
from specdec_cli.lm.heads.head_tensors import finite_tensors, has_head_weights, head_bytes, stored_tensors
from specdec_cli.lm.heads.mtp_files import read_mtp
from specdec_cli.lm.load_memory import check_plan_room
from specdec_cli.lm.model_tokenizer import tokenizer_of
from specdec_cli.lm.plan import DTYPES, ModelPlan
from specdec_cli.lm.plan_checks import check_target
from specdec_cli.lm.self_draft import SelfDraft
from specdec_cli.measure.machine.figures import figure
from specdec_cli.measure.machine.memory_plan import HeadFacts, Memory, check_rooms, pair_memory, plan_memory
from specdec_cli.measure.machine.outlook import Outlook, outlook
from specdec_cli.text.chat_template import chat_tokenizer
from specdec_cli.text.overlap import Overlap
from specdec_cli.text.shared_vocabulary import SharedVocabulary, shared_vocabulary
from specdec_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec_cli.lm.heads.published import PublishedDraft
    from specdec_cli.measure.machine.machine import Machine
    from specdec_cli.recipe.schema import Draft, Recipe, Target


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a pair.

    Args:
        severity: an error keeps the pair from running, a warning does not.
        message: one sentence.
        hint: what to do, or None.
        exit_code: of an error: incompatible (2), or cannot run (1).
    """

    severity: Literal["error", "warning"]
    message: str
    hint: str | None = None
    exit_code: Annotated[ExitCode, Field(exclude=True)] = ExitCode.DONE


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A model's tokenizer."""

    num_tokens: Count
    special_tokens: dict[str, str]
    eos_token_ids: tuple[Count, ...]
    has_chat_template: bool


@dataclass(slots=True)
class Preflight:
    """Facts about a pair, from configurations and headers alone.

    Args:
        target: None where it could not be described.
        draft: None where it could not be described, or is no model.
        draft_method: the method's name, `model` for a draft model; behind a plus sign where another is asked first.
        taps: layers of the target, from 0, or `final`, whose output the draft reads.
        head: the draft in words, where it was published as a head or is the target's own modules.
        head_facts: sizes of the draft where it is a head; None where its files are not here.
        self_draft: what the draft is where it is made of the target.
        one_pass: whether the draft gives all tokens of a step in one pass.
        tokenizers: by role.
        overlap: of the two tokenizers; None without two.
        shared_vocabulary: the tokens with the same text in both, where the tokenizers differ.
        max_context: the longest context that the engine will decode; None without a target.
        draft_max_context: past which it decodes on without the draft; None without a limit.
        memory: by role.
        generation: what the target's generation configuration asks for; None without a target.
        outlook: what the pair can give at best; None without a draft model.
        problems: errors first.
    """

    target: ModelFacts | None = None
    draft: ModelFacts | None = None
    draft_method: str = "model"
    taps: tuple[Tap, ...] = ()
    head: str | None = None
    head_facts: Annotated[HeadFacts | None, Field(exclude=True)] = None
    self_draft: Annotated[SelfDraft | None, PlainSerializer(lambda draft: draft and draft.words, str | None)] = None
    one_pass: Annotated[bool, Field(exclude=True)] = False
    tokenizers: dict[str, TokenizerFacts] = field(default_factory=dict)
    overlap: Overlap | None = None
    shared_vocabulary: Annotated[
        SharedVocabulary | None,
        PlainSerializer(lambda shared: shared and shared.result(), VocabularyResult | None),
    ] = None
    max_context: Count | None = None
    draft_max_context: Count | None = None
    memory: dict[str, Memory] = field(default_factory=dict)
    generation: Generation | None = None
    outlook: Outlook | None = None
    problems: list[Finding] = field(default_factory=list)

    def warn(self, message: str, hint: str | None = None) -> None:
        """Add a warning."""
        self.problems.append(Finding("warning", message, hint))

    @property
    def errors(self) -> list[Finding]:
        """The problems that keep the pair from running."""
        return [problem for problem in self.problems if problem.severity == "error"]


def preflight(recipe: Recipe, machine: Machine, *, trust_remote_code: bool = False) -> Preflight:
    """Look at a recipe's pair; whatever is wrong is among the problems, nothing is raised.

    Args:
        recipe: resolved.
        machine: where it would run.
        trust_remote_code: run Python code that comes with a configuration or a tokenizer.
    """
    pair = Preflight(draft_method=recipe.draft.method or "model")
    decoder = recipe.engine.decoder

    def plan_of(model: Target | Draft, generation_config: str) -> ModelPlan:
        assert model.model is not None, "only a named model has a plan"
        its = model_settings(model)
        return ModelPlan(model.model, its, decoder, generation_config, trust_remote_code, fetches_weights=False)

    plans = {"target": plan_of(recipe.target, recipe.target.generation_config)}
    draft = _read_draft(pair, recipe, plans["target"])
    head = None if draft is None else draft.published
    if recipe.draft.model is not None and not pair.problems and (head is None or not head.runs_as_target):
        plans["draft"] = plan_of(recipe.draft, NONE)
    target = plans["target"]
    pair.target = _describe(pair, target)
    if "draft" in plans:
        pair.draft = _describe(pair, plans["draft"], is_draft=True)
    if pair.self_draft is not None and pair.target is not None:
        pair.draft = _describe(pair, target, pair.self_draft)
    if head is not None and head.runs_as_target and pair.target is not None:
        _check_head(pair, head, pair.target)
    _look_at_own_modules(pair, recipe, trust_remote_code)
    if pair.target is not None and not target.is_dummy:
        pair.generation = target.generation
        for key, value in target.generation.unused.items():
            pair.warn(f"`{target.generation.source}` asks for `{key}: {value}`, which is not applied")
    _compare_tokenizers(pair, recipe.target, plans)
    _check_shared(pair, recipe)
    _check_target(pair, recipe, target)
    missing: list[str] = []
    figure("the memory that it takes", lambda: _estimate_memory(pair, recipe, machine), missing)
    if pair.target is not None and pair.draft is not None:
        its, other, is_whole = pair.target, pair.draft, pair.one_pass
        pair.outlook = figure("the outlook", lambda: outlook(its, other, recipe, one_pass=is_whole), missing)
    if recipe.draft.first is not None:
        pair.draft_method = f"{recipe.draft.first}+{pair.draft_method}"
    pair.problems += [Finding("warning", sentence) for sentence in missing]
    pair.problems.sort(key=lambda problem: problem.severity)
    return pair


@contextmanager
def _noted(pair: Preflight, is_draft: bool = False) -> Iterator[None]:
    """Make an error of loading a problem of the pair."""
    try:
        yield
    except SpecdecError as error:
        pair.problems.append(_as_problem(error, is_draft))


def _as_problem(error: SpecdecError, is_draft: bool = False) -> Finding:
    """An error of loading; weights that are not a draft's are an input error, as a draft head's are."""
    exit_code = ExitCode.USAGE if is_draft and isinstance(error, WeightsError) else error.exit_code
    return Finding("error", error.message, error.hint, exit_code)


def _describe(
    pair: Preflight, plan: ModelPlan, self_draft: SelfDraft | None = None, *, is_draft: bool = False
) -> ModelFacts | None:
    """The facts of a plan, whose obstacles become problems; a draft's weights are read to see that they are numbers."""
    if self_draft is None:
        pair.problems += [_as_problem(error, is_draft) for error in plan.obstacles]
    if plan.faults:
        return None
    facts = None
    with _noted(pair, is_draft):
        facts = model_facts(plan, self_draft)
    if facts is not None and facts.kv_bytes_per_token is None and self_draft is None:
        pair.warn(
            f"architecture `{facts.architecture}` of `{facts.name}` goes by the numbers that it computes, and could "
            "not be tried without its weights: its KV cache is not known before it is loaded"
        )
    if facts is not None and self_draft is None:
        with _noted(pair):
            check_plan_room(plan)
        if is_draft:
            with _noted(pair, is_draft=True):
                check_draft_numbers(plan)
                if plan.header is not None:
                    check_file_numbers(plan.name, plan.header)
    return facts


def _read_draft(pair: Preflight, recipe: Recipe, target: ModelPlan) -> DraftPlan | None:
    """The draft and the hidden states that it reads."""
    trusted = target.trust_remote_code
    settings = LoadSettings(target.settings, model_settings(recipe.draft), trust_remote_code=trusted)
    with _noted(pair):
        plan = read_draft(recipe.draft_fields(), target, settings, has_weights=False)
        pair.draft_method = plan.method
        pair.head = None if plan.published is None else str(plan.published)
        made = plan.drafter()
        pair.taps, pair.one_pass = tuple(dict.fromkeys(made.taps)), made.one_pass
        pair.self_draft = next(iter(made.self_drafts), None)
        return plan
    return None


def _check_head(pair: Preflight, head: PublishedDraft, target: ModelFacts) -> None:
    with _noted(pair):
        if target.hidden_size is not None:
            head.check_fits(target.name, target.hidden_size, target.embedding_size)
        if has_head_weights(head.source) or given_path(head.name).is_dir():  # else they are not fetched yet
            shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(head).items()}
            head.check_shapes(shapes)
            head.target_ids(finite_tensors(head), target.name, target.embedding_size)
            if head.kv_numbers is not None:
                bytes_per_token = head.kv_numbers * DTYPES[target.dtype].itemsize
                pair.head_facts = _head_facts(target, head_bytes(head, shapes, DTYPES[target.dtype]), bytes_per_token)


def _look_at_own_modules(pair: Preflight, recipe: Recipe, trust_remote_code: bool) -> None:
    """Sizes of the target's own modules, where these are the draft."""
    target = pair.target
    if target is None or not target.is_complete or recipe.draft.method != "mtp":
        return
    from specdec_cli.lm.heads.mtp import kv_bytes_per_token  # transformers' models behind it take seconds to import

    with _noted(pair):
        modules = read_mtp(target.name, recipe.target.revision, trust_remote_code)
        pair.head = f"{modules} of the target's checkpoint"
        bytes_per_token = kv_bytes_per_token(modules, DTYPES[target.dtype])
        pair.head_facts = _head_facts(target, target.mtp_bytes or 0, bytes_per_token)


def _head_facts(target: ModelFacts, weights_bytes: int, kv_bytes_per_token: int) -> HeadFacts:
    """Sizes of a draft that computes as its target does."""
    return HeadFacts(target.dtype, weights_bytes, kv_bytes_per_token, target.max_context, target.embedding_size)


def _compare_tokenizers(pair: Preflight, target: Target, plans: Mapping[str, ModelPlan]) -> None:
    """Load both tokenizers as the engine does, where a draft's conversations are the target's."""
    loaded: dict[str, Tokenizer] = {}
    for role, plan in plans.items():
        facts = pair.target if role == "target" else pair.draft
        if facts is None:
            continue
        try:
            is_target = role == "target"
            conversations = (target.chat_template, target.default_chat_template_kwargs) if is_target else (None, None)
            tokenizer = loaded[role] = chat_tokenizer(tokenizer_of(plan), *conversations)
        except SpecdecError as error:
            pair.problems.append(_as_problem(error))
            continue
        pair.tokenizers[role] = _tokenizer_facts(tokenizer)
        if plan.drafted_tokens is None:
            _check_padding(pair, role, facts, tokenizer)
    if len(loaded) == 2 and not any(tokenizer.is_stand_in for tokenizer in loaded.values()):
        _compare(pair, loaded["target"], loaded["draft"])
    if "target" in loaded and not pair.tokenizers["target"].has_chat_template:
        pair.warn("the target has no chat template", "prompts are continued as they are; --chat is refused")
    elif "target" in loaded:
        try:
            loaded["target"].template_reads()
        except UsageError as error:
            pair.warn(error.message, error.hint)


def _tokenizer_facts(tokenizer: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(
        num_tokens=tokenizer.num_tokens,
        special_tokens={str(role): str(token) for role, token in tokenizer.hf.special_tokens_map.items()},
        eos_token_ids=tokenizer.eos_token_ids,
        has_chat_template=tokenizer.has_chat_template,
    )


def _check_padding(pair: Preflight, role: str, facts: ModelFacts, tokenizer: Tokenizer) -> None:
    if facts.embedding_size < tokenizer.num_tokens and role == "draft":
        message = (
            f"draft `{facts.name}` knows `{facts.embedding_size}` tokens, its tokenizer has `{tokenizer.num_tokens}`"
        )
        pair.problems.append(Finding("error", message, "choose a draft made for this tokenizer", ExitCode.USAGE))
    elif facts.embedding_size < tokenizer.num_tokens:
        pair.warn(
            f"the tokenizer of `{facts.name}` has `{tokenizer.num_tokens}` tokens, the model `{facts.embedding_size}`: "
            "those beyond are refused in prompts"
        )


def _compare(pair: Preflight, target: Tokenizer, draft: Tokenizer) -> None:
    overlap = pair.overlap = target.compare(draft)
    if not overlap.equal:
        sizes = [facts.embedding_size for facts in (pair.target, pair.draft) if facts is not None]
        pair.shared_vocabulary, pair.draft_method = shared_vocabulary(target, draft, *sizes), UNIVERSAL
        message = f"the tokenizers of target and draft differ ({overlap.reason}): the draft is run as `{UNIVERSAL}`"
        hint = "a draft of the same family accepts more"
        pair.warn(message, hint)
    for role, first, second in overlap.special_differences:
        pair.warn(
            f"`{role}` is `{first}` in the target's tokenizer and `{second}` in the draft's: the target's is used"
        )
    if pair.target and pair.draft and set(pair.target.eos_token_ids) != set(pair.draft.eos_token_ids):
        target_ids, draft_ids = list(pair.target.eos_token_ids), list(pair.draft.eos_token_ids)
        pair.warn(
            f"the end tokens are `{target_ids}` for the target and `{draft_ids}` for the draft: the target's are used"
        )


def _check_shared(pair: Preflight, recipe: Recipe) -> None:
    """Refuse to match guesses in a way for which the tokenizers have too little in common."""
    if pair.shared_vocabulary is None:
        return
    with _noted(pair):
        universal.ways_of(
            str(recipe.draft.model), recipe.draft.options.get("match", universal.AUTO), pair.shared_vocabulary
        )


def _check_target(pair: Preflight, recipe: Recipe, target: ModelPlan) -> None:
    """Limit the contexts, and refuse what the target cannot give."""
    if pair.target is None:
        return
    limit = recipe.engine.max_model_len
    pair.max_context = min(pair.target.max_context, limit or pair.target.max_context)
    with _noted(pair):
        check_target(target, limit, pair.taps)
    if pair.draft is None:
        return
    ratio = 1.0 if pair.shared_vocabulary is None else max(pair.shared_vocabulary.draft_tokens_per_token, 1.0)
    pair.draft_max_context = min(int(pair.draft.max_context / ratio), pair.max_context)
    if pair.draft_max_context < pair.max_context:
        pair.warn(
            f"the draft reads `{pair.draft_max_context}` tokens, the target `{pair.max_context}`: "
            "beyond that the engine continues without a draft"
        )


def _estimate_memory(pair: Preflight, recipe: Recipe, machine: Machine) -> None:
    models, places = dict[str, ModelFacts | HeadFacts](), {}
    draft = recipe.draft if pair.head_facts is None and pair.self_draft is None else recipe.target
    for role, facts, model in (
        ("target", pair.target, recipe.target),
        ("draft", pair.draft or pair.head_facts, draft),
    ):
        if facts is None or pair.max_context is None:
            continue
        device = machine.device(model.device)
        if device is None:  # an obstacle of the plan
            continue
        models[role], places[role] = facts, device
        is_own = isinstance(facts, ModelFacts) and facts.decoder.startswith("own")  # compiled for this processor
        if device.dtypes[facts.dtype] == "emulated" and not is_own:
            message = f"`{facts.dtype}` of the {role} is emulated on `{device.name}`: correct, and slow"
            pair.warn(message, "try --dtype float32")
    ratio = 1.0 if pair.shared_vocabulary is None else pair.shared_vocabulary.draft_tokens_per_token
    pair.memory = pair_memory(models, places, recipe, pair.max_context or 0, pair.taps, ratio)
    with _noted(pair):
        for device in {place.name: place for place in places.values()}.values():
            plan_memory(pair.memory, device, recipe)
            _warn_of_little_room(pair, device.name)
        check_rooms(pair.memory, recipe)


def _warn_of_little_room(pair: Preflight, name: str) -> None:
    parts = [memory for memory in pair.memory.values() if memory.device == name]
    wanted = sum(memory.kv_wanted or 0 for memory in parts)
    planned = sum(memory.kv_planned or 0 for memory in parts)
    if all(memory.kv_planned is not None for memory in parts) and planned < wanted:
        message = (
            f"the KV cache for every sequence at full context would take {wanted / 1e9:.2f} GB of `{name}`, and "
            f"{planned / 1e9:.2f} GB are planned: fewer long sequences will run together"
        )
        pair.warn(message, "lower max_num_seqs or max_model_len to reserve less")
