"""The preflight of a pair: everything that can be known to go wrong before a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from specdec_cli import drafters
from specdec_cli.drafters import universal
from specdec_cli.engine.draft_check import check_draft_numbers, draft_weights
from specdec_cli.engine.draft_tokenizer import UNIVERSAL
from specdec_cli.engine.heads import own_modules, published_draft, published_fields
from specdec_cli.engine.loading import model_settings
from specdec_cli.errors import ExitCode, SpecdecError
from specdec_cli.files import given_path
from specdec_cli.lm.decoders import decoder_when
from specdec_cli.lm.facts import ModelFacts, describe, describe_tokenizer, small_files
from specdec_cli.lm.files.generation import Generation, read_generation
from specdec_cli.lm.heads.draft_vocabulary import target_ids
from specdec_cli.lm.heads.head_shapes import check_shapes
from specdec_cli.lm.heads.head_tensors import finite_tensors, has_head_weights, head_bytes, read_head_shapes
from specdec_cli.lm.heads.mtp import kv_bytes_per_token
from specdec_cli.lm.load import DTYPES, check_target
from specdec_cli.measure.machine.figures import figure
from specdec_cli.measure.machine.memory_plan import HeadFacts, Memory, check_rooms, pair_memory, plan_memory
from specdec_cli.measure.machine.outlook import Outlook, outlook
from specdec_cli.text.chat_template import chat_tokenizer
from specdec_cli.text.overlap import Overlap
from specdec_cli.text.shared_vocabulary import SharedVocabulary, shared_vocabulary
from specdec_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec_cli.lm.door import Tap
    from specdec_cli.lm.heads.published import PublishedDraft
    from specdec_cli.lm.self_draft import SelfDraft
    from specdec_cli.measure.machine.machine import Machine
    from specdec_cli.recipe.schema import Draft, Recipe, Target


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or that one should know.

    Args:
        severity: an error keeps the pair from running, a warning does not.
        message: one sentence.
        hint: what to do, or None.
        exit_code: of an error: incompatible (2), or cannot run (1).
    """

    severity: Literal["error", "warning"]
    message: str
    hint: str | None = None
    exit_code: ExitCode = ExitCode.DONE

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"severity": self.severity, "message": self.message, "hint": self.hint}


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A model's tokenizer."""

    num_tokens: int
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(slots=True)
class Preflight:
    """Facts about a pair.

    Args:
        target: None where it could not be described.
        draft: None where it could not be described, or is no model.
        draft_method: the method's name, `model` for a draft model; behind a plus sign where another is asked first.
        taps: the target's hidden states that the draft reads.
        head: what the draft is where it was published as one, in words.
        self_draft: what the draft is where it is made of the target.
        one_pass: whether the draft gives all tokens of a step in one pass.
        tokenizers: by role.
        overlap: of the two tokenizers; None without two.
        shared: the tokens with the same text in both, where the tokenizers differ.
        max_context: the longest context that the engine will decode; None without a target.
        head_facts: sizes of the draft where it is a head; None where its files are not here.
        draft_max_context: past which it decodes on without the draft; None without a limit.
        memory: by role.
        generation: what the target's generation configuration asks for; None without a target.
        outlook: what the pair can give at best; None without a draft model.
        problems: errors first.
    """

    draft_method: str
    taps: tuple[Tap, ...] = ()
    head: str | None = None
    head_facts: HeadFacts | None = None
    self_draft: SelfDraft | None = None
    one_pass: bool = False
    target: ModelFacts | None = None
    draft: ModelFacts | None = None
    tokenizers: dict[str, TokenizerFacts] = field(default_factory=dict)
    overlap: Overlap | None = None
    shared: SharedVocabulary | None = None
    max_context: int | None = None
    draft_max_context: int | None = None
    memory: dict[str, Memory] = field(default_factory=dict)
    generation: Generation | None = None
    outlook: Outlook | None = None
    problems: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The problems that keep the pair from running."""
        return [problem for problem in self.problems if problem.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "target": self.target.as_dict() if self.target else None,
            "draft": self.draft.as_dict() if self.draft else None,
            "draft_method": self.draft_method,
            "taps": list(self.taps),
            "head": self.head,
            "self_draft": self.self_draft.words if self.self_draft else None,
            "tokenizers": {role: asdict(facts) for role, facts in self.tokenizers.items()},
            "overlap": asdict(self.overlap) | {"reason": self.overlap.reason} if self.overlap else None,
            "shared_vocabulary": None if self.shared is None else self.shared.as_dict(),
            "max_context": self.max_context,
            "draft_max_context": self.draft_max_context,
            "memory": {role: asdict(memory) for role, memory in self.memory.items()},
            "generation": self.generation.as_dict() if self.generation else None,
            "outlook": self.outlook.as_dict() if self.outlook else None,
            "problems": [problem.as_dict() for problem in self.problems],
        }


def preflight(recipe: Recipe, machine: Machine, *, trust_remote_code: bool = False) -> Preflight:
    """Look at a recipe's pair; whatever is wrong is among the problems, nothing is raised.

    Args:
        recipe: resolved.
        machine: where it would run.
        trust_remote_code: run Python code that comes with a configuration or a tokenizer.
    """
    found = Preflight(recipe.draft.method or "model")
    models: dict[str, Target | Draft] = {"target": recipe.target}
    head = _read_draft(found, recipe)
    is_read = not found.problems
    if recipe.draft.model is not None and is_read and (head is None or not head.runs_as_target):
        models["draft"] = recipe.draft
    decoder = decoder_when(recipe.engine.decoder, recipe.engine.compile is True)
    found.target = _describe(found, recipe.target, trust_remote_code, decoder)
    if "draft" in models:
        found.draft = _describe_draft(found, recipe.draft, trust_remote_code, decoder)
    if found.self_draft is not None and found.target is not None:
        found.draft = _describe(found, recipe.target, trust_remote_code, decoder, found.self_draft)
    if head is not None and head.runs_as_target and found.target is not None:
        _check_head(found, head, found.target)
    if found.target is not None and found.target.is_complete:
        _look_at_own_modules(found, recipe, trust_remote_code)
    _read_generation(found, recipe, trust_remote_code)
    _compare_tokenizers(found, recipe.target, models, trust_remote_code)
    _check_shared(found, recipe)
    _check_target(found, recipe, trust_remote_code)
    missing: list[str] = []
    figure("the memory that it takes", lambda: _estimate_memory(found, recipe, machine), missing)
    if found.target is not None and found.draft is not None:
        target, draft = found.target, found.draft
        is_whole = found.one_pass
        found.outlook = figure("the outlook", lambda: outlook(target, draft, recipe, one_pass=is_whole), missing)
    if recipe.draft.first is not None:
        found.draft_method = f"{recipe.draft.first}+{found.draft_method}"
    found.problems += [Finding("warning", sentence) for sentence in missing]
    found.problems.sort(key=lambda problem: problem.severity)
    return found


def _describe(
    found: Preflight,
    model: Target | Draft,
    trust_remote_code: bool,
    decoder: str,
    self_draft: SelfDraft | None = None,
    is_draft: bool = False,
) -> ModelFacts | None:
    assert model.model is not None, "only a named model is described"
    try:
        with draft_weights() if is_draft else nullcontext():
            facts = describe(
                model.model,
                revision=model.revision,
                dtype=model.dtype,
                trust_remote_code=trust_remote_code,
                load_format=model.load_format,
                quantize=model.quantize,
                compute=model.compute,
                device=model.device,
                decoder=decoder,
                self_draft=self_draft,
            )
    except SpecdecError as error:
        found.problems.append(_as_problem(error))
        return None
    if facts.kv_bytes_per_token is None and self_draft is None:
        message = (
            f"architecture `{facts.architecture}` of `{facts.name}` goes by the numbers that it computes, and could "
            "not be tried without its weights: its KV cache is not known before it is loaded"
        )
        found.problems.append(Finding("warning", message))
    return facts


def _describe_draft(found: Preflight, draft: Draft, trust_remote_code: bool, decoder: str) -> ModelFacts | None:
    """A draft model, whose weights are read to see that they are numbers."""
    facts = _describe(found, draft, trust_remote_code, decoder, is_draft=True)
    if facts is None or not facts.is_complete:
        return facts
    try:
        check_draft_numbers(facts.name, draft.revision, trust_remote_code)
    except SpecdecError as error:
        found.problems.append(_as_problem(error))
    return facts


def _read_draft(found: Preflight, recipe: Recipe) -> PublishedDraft | None:
    """The hidden states that the draft reads, and its configuration where it is a head on them."""
    fields, target = recipe.draft_fields(), recipe.target
    try:
        assert target.model is not None, "a recipe has a target"
        config = published_draft(fields, model_settings(recipe.draft), target.model, model_settings(target), False)
        if config is not None:
            fields = published_fields(config, recipe.draft.first)
            found.head, found.draft_method = str(config), config.method
        made = drafters.from_fields(fields)
        found.taps, found.one_pass = tuple(dict.fromkeys(made.taps)), made.one_pass
        found.self_draft = next(iter(made.self_drafts), None)
    except SpecdecError as error:
        found.problems.append(_as_problem(error))
        return None
    return config


def _check_head(found: Preflight, head: PublishedDraft, target: ModelFacts) -> None:
    try:
        if target.hidden_size is not None:
            head.check_fits(target.name, target.hidden_size, target.embedding_size)
        if has_head_weights(type(head), head.folder) or given_path(head.name).is_dir():  # else they are not fetched yet
            shapes = read_head_shapes(head)
            check_shapes(head, shapes)
            target_ids(head, finite_tensors(head), target.name, target.embedding_size)
            if head.kv_numbers is not None:
                dtype = DTYPES[target.dtype]
                found.head_facts = HeadFacts(
                    dtype=target.dtype,
                    weights_bytes=head_bytes(shapes, dtype),
                    kv_bytes_per_token=head.kv_numbers * dtype.itemsize,
                    max_context=target.max_context,
                    embedding_size=target.embedding_size,
                )
    except SpecdecError as error:
        found.problems.append(_as_problem(error))


def _look_at_own_modules(found: Preflight, recipe: Recipe, trust_remote_code: bool) -> None:
    """Sizes of the target's own modules, where these are the draft."""
    target = found.target
    assert target is not None, "a target that was described"
    try:
        modules = own_modules(recipe.draft_fields(), target.name, model_settings(recipe.target), trust_remote_code)
        if modules is None:
            return
        found.head = f"{modules} of the target's checkpoint"
        found.head_facts = HeadFacts(
            dtype=target.dtype,
            weights_bytes=target.mtp_bytes or 0,
            kv_bytes_per_token=kv_bytes_per_token(modules, DTYPES[target.dtype]),
            max_context=target.max_context,
            embedding_size=target.embedding_size,
        )
    except SpecdecError as error:
        found.problems.append(_as_problem(error))


def _as_problem(error: SpecdecError) -> Finding:
    return Finding("error", error.message, error.hint, error.exit_code)


def _read_generation(found: Preflight, recipe: Recipe, trust_remote_code: bool) -> None:
    """The target's generation configuration, its end tokens before those of the model's configuration."""
    target = found.target
    if target is None or target.load_format == "dummy":
        return
    try:
        folder = small_files(target.name, recipe.target.revision, trust_remote_code)
        found.generation = read_generation(folder, recipe.target.generation_config)
    except SpecdecError as error:
        found.problems.append(_as_problem(error))
        return
    if found.generation.eos_token_ids:
        found.target = replace(target, eos_token_ids=found.generation.eos_token_ids)
    for key, value in found.generation.unused.items():
        message = f"`{found.generation.source}` asks for `{key}: {value}`, which is not applied"
        found.problems.append(Finding("warning", message))


def _compare_tokenizers(
    found: Preflight, target: Target, models: Mapping[str, Target | Draft], trust_remote_code: bool
) -> None:
    """Load both tokenizers as the engine does, where a draft's conversations are the target's."""
    loaded: dict[str, Tokenizer] = {}
    for role, model in models.items():
        facts = found.target if role == "target" else found.draft
        if facts is None:
            continue
        try:
            hf = describe_tokenizer(
                facts.name,
                revision=model.revision,
                trust_remote_code=trust_remote_code,
                load_format=model.load_format,
            )
            is_target = role == "target"
            conversations = (target.chat_template, target.default_chat_template_kwargs) if is_target else (None, None)
            tokenizer = loaded[role] = chat_tokenizer(hf, *conversations)
        except SpecdecError as error:
            found.problems.append(_as_problem(error))
            continue
        found.tokenizers[role] = _tokenizer_facts(tokenizer)
        _check_padding(found, role, facts, tokenizer)
    if len(loaded) == 2 and not any(one.is_stand_in for one in loaded.values()):
        _compare(found, loaded["target"], loaded["draft"])
    if "target" in loaded and not found.tokenizers["target"].has_chat_template:
        found.problems.append(
            Finding(
                "warning", "the target has no chat template", "prompts are continued as they are; --chat is refused"
            )
        )


def _tokenizer_facts(tokenizer: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(
        num_tokens=tokenizer.num_tokens,
        special_tokens={str(role): str(token) for role, token in tokenizer.hf.special_tokens_map.items()},
        eos_token_ids=tokenizer.eos_token_ids,
        has_chat_template=tokenizer.has_chat_template,
    )


def _check_padding(found: Preflight, role: str, facts: ModelFacts, tokenizer: Tokenizer) -> None:
    if facts.embedding_size < tokenizer.num_tokens and role == "draft":
        message = (
            f"draft `{facts.name}` knows `{facts.embedding_size}` tokens, its tokenizer has `{tokenizer.num_tokens}`"
        )
        found.problems.append(Finding("error", message, "choose a draft made for this tokenizer", ExitCode.USAGE))
    elif facts.embedding_size < tokenizer.num_tokens:
        message = (
            f"the tokenizer of `{facts.name}` has `{tokenizer.num_tokens}` tokens, the model `{facts.embedding_size}`: "
            "those beyond are refused in prompts"
        )
        found.problems.append(Finding("warning", message))


def _compare(found: Preflight, target: Tokenizer, draft: Tokenizer) -> None:
    overlap = found.overlap = target.compare(draft)
    if not overlap.equal:
        sizes = [facts.embedding_size for facts in (found.target, found.draft) if facts is not None]
        found.shared, found.draft_method = shared_vocabulary(target, draft, *sizes), UNIVERSAL
        message = f"the tokenizers of target and draft differ ({overlap.reason}): the draft is run as `{UNIVERSAL}`"
        hint = "a draft of the same family accepts more"
        found.problems.append(Finding("warning", message, hint))
    for role, first, second in overlap.special_differences:
        message = f"`{role}` is `{first}` in the target's tokenizer and `{second}` in the draft's: the target's is used"
        found.problems.append(Finding("warning", message))
    if found.target and found.draft and set(found.target.eos_token_ids) != set(found.draft.eos_token_ids):
        target_ids, draft_ids = list(found.target.eos_token_ids), list(found.draft.eos_token_ids)
        message = (
            f"the end tokens are `{target_ids}` for the target and `{draft_ids}` for the draft: the target's are used"
        )
        found.problems.append(Finding("warning", message))


def _check_shared(found: Preflight, recipe: Recipe) -> None:
    """Refuse to match guesses in a way for which the tokenizers have too little in common."""
    if found.shared is None:
        return
    try:
        universal.ways_of(str(recipe.draft.model), recipe.draft.options.get("match", universal.AUTO), found.shared)
    except SpecdecError as error:
        found.problems.append(_as_problem(error))


def _check_target(found: Preflight, recipe: Recipe, trust_remote_code: bool) -> None:
    """Limit the contexts, and refuse what the target cannot give."""
    if found.target is None:
        return
    limit = recipe.engine.max_model_len
    found.max_context = min(found.target.max_context, limit or found.target.max_context)
    try:
        check_target(
            found.target.name,
            limit,
            found.taps,
            revision=recipe.target.revision,
            trust_remote_code=trust_remote_code,
            load_format=recipe.target.load_format,
        )
    except SpecdecError as error:
        found.problems.append(_as_problem(error))
    if found.draft is None:
        return
    ratio = 1.0 if found.shared is None else max(found.shared.draft_tokens_per_token, 1.0)
    found.draft_max_context = min(int(found.draft.max_context / ratio), found.max_context)
    if found.draft_max_context < found.max_context:
        message = (
            f"the draft reads `{found.draft_max_context}` tokens, the target `{found.max_context}`: "
            "beyond that the engine continues without a draft"
        )
        found.problems.append(Finding("warning", message))


def _estimate_memory(found: Preflight, recipe: Recipe, machine: Machine) -> None:
    models, places = dict[str, ModelFacts | HeadFacts](), {}
    draft = recipe.draft if found.head_facts is None and found.self_draft is None else recipe.target
    for role, facts, model in (
        ("target", found.target, recipe.target),
        ("draft", found.draft or found.head_facts, draft),
    ):
        if facts is None or found.max_context is None:
            continue
        device = machine.device(model.device)
        if device is None:
            message = f"device `{model.device}` of the {role} is not here"
            found.problems.append(Finding("error", message, "use auto or cpu", ExitCode.COULD_NOT_RUN))
            continue
        models[role], places[role] = facts, device
        if device.dtypes[facts.dtype] == "emulated":
            message = f"`{facts.dtype}` is emulated on `{device.name}`: correct, and slow"
            found.problems.append(Finding("warning", message, "try --dtype float32"))
    ratio = 1.0 if found.shared is None else found.shared.draft_tokens_per_token
    found.memory = pair_memory(models, places, recipe, found.max_context or 0, found.taps, ratio)
    try:
        for device in {place.name: place for place in places.values()}.values():
            plan_memory(found.memory, device, recipe, ratio)
            _warn_of_little_room(found, device.name)
        check_rooms(found.memory, recipe, ratio)
    except SpecdecError as error:
        found.problems.append(_as_problem(error))


def _warn_of_little_room(found: Preflight, name: str) -> None:
    parts = [memory for memory in found.memory.values() if memory.device == name]
    wanted = sum(memory.kv_wanted or 0 for memory in parts)
    planned = sum(memory.kv_planned or 0 for memory in parts)
    if all(memory.kv_planned is not None for memory in parts) and planned < wanted:
        message = (
            f"the KV cache for every sequence at full context would take {wanted / 1e9:.2f} GB of `{name}`, and "
            f"{planned / 1e9:.2f} GB are planned: fewer long sequences will run together"
        )
        found.problems.append(Finding("warning", message, "lower max_num_seqs or max_model_len to reserve less"))
