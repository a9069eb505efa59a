"""A typed request becomes jobs for the engine's thread and a plan of the answer. Pure, and off the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec_cli.engine.jobs.records import Job
from specdec_cli.recipe.schema import Serve
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.sampling.thinking import after_thinking
from specdec_cli.serve.constraint import Constraint
from specdec_cli.serve.errors import bad_field, unknown_model
from specdec_cli.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from specdec_cli.serve.request.constraint_fields import find_constraint
from specdec_cli.serve.request.conversation import Conversation, text_of
from specdec_cli.serve.request.parameters import Bound, Defaults, sampling_params
from specdec_cli.serve.request.prompts import Prompts, check_num_choices, echo, read_prompts
from specdec_cli.serve.request.reasoning import ReasoningPlan, plan_reasoning
from specdec_cli.serve.request.speculation import find_speculation
from specdec_cli.serve.tools.formats import PARSERS, find_format
from specdec_cli.serve.tools.tool_choice import choose_tools

if TYPE_CHECKING:
    from specdec_cli.engine.drafting_plan import DraftingPlanner
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.serve.tools.parser import ToolPlan
    from specdec_cli.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16
"""Tokens that OpenAI and vLLM generate for a completion without `max_tokens`."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a served model that preparing a request needs.

    Args:
        tokenizer: of the target; None takes token ids only.
        num_tokens: V, the engine's vocabulary.
        max_context: most tokens of prompt and output together.
        names: the model's names; the first is the one in answers.
        planner: checks a request's tree against the engine's drafters and rules.
        sampling: what absent sampling fields take.
        num_speculative_tokens: the server's k, as `num_spec_tokens` in answers.
        drafters: names that `speculative.draft` may have.
        serve: limits of a request, and the formats of the model's tool calls and of its thinking.
    """

    tokenizer: Tokenizer | None
    num_tokens: int
    max_context: int
    names: tuple[str, ...]
    planner: DraftingPlanner
    sampling: Defaults = field(default_factory=Defaults)
    num_speculative_tokens: int = 0
    drafters: tuple[str, ...] = ()
    serve: Serve = field(default_factory=Serve)

    @property
    def tool_call_format(self) -> str | None:
        """The format of its tool calls: as set, else that of its chat template; None if that writes no known one."""
        if (parser := self.serve.tool_call_parser) is not None:
            return PARSERS[parser]
        return None if self.tokenizer is None else find_format(self.tokenizer, self.tokenizer.chat_template)


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """The form of the answer.

    Args:
        request: the typed body; its fields say what the answer holds.
        model: which answers.
        prompts: token ids, one for each prompt; choice i belongs to prompt i // n.
        echoed: text put before each prompt's choices; empty without `echo`.
        skip_special: special tokens are left out of the text.
        tools: how tool calls are read out of the text; None for plain text.
        constraint: the field that says what the text must match, if one does.
        reasoning: how thinking is read out of the text; None takes it for content.
    """

    request: CompletionRequest | ChatCompletionRequest
    model: ModelInfo
    prompts: Prompts
    echoed: tuple[str, ...] = ()
    skip_special: bool = True
    tools: ToolPlan | None = None
    constraint: str | None = None
    reasoning: ReasoningPlan | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message, not a text."""
        return isinstance(self.request, ChatCompletionRequest)

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.request.n or 1

    @property
    def details(self) -> bool:
        """Whether streamed choices say which tokens were drafted."""
        return self.request.speculative is not None and self.request.speculative.details is True


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's jobs, one for each choice in the answer's order, and its plan.

    Args:
        body: as the client sent it.
        jobs: without their grammar, where there is a constraint.
        plan: of the answer.
        constraint: what every output must match; it is to be compiled.
    """

    body: GenerationBody
    jobs: tuple[Job, ...]
    plan: ResponsePlan
    constraint: Constraint | None = None

    def constrained(self, grammar: Grammar) -> Prepared:
        """Request with the compiled constraint."""
        reasoning = self.plan.reasoning
        if reasoning is not None:
            grammar = after_thinking(grammar, reasoning.markers, reasoning.begins)
        return replace(self, jobs=tuple(replace(job, grammar=grammar) for job in self.jobs), constraint=None)


def prepare_completion(request: CompletionRequest, model: ModelInfo, request_id: str, cache_salt: str = "") -> Prepared:
    """Jobs of `POST /v1/completions`.

    Args:
        request: the typed body.
        model: the served model.
        request_id: of the HTTP request.
        cache_salt: of the API key; the request's own is joined to it.

    Raises:
        ApiError: 404 for an unknown model, 400 naming the field.
    """
    _check_model(request.model, model)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_field("best_of", f"must be `n`, which is `{request.n or 1}`, not `{request.best_of}`")
    if request.max_tokens == 0 and not request.echo:
        raise bad_field("max_tokens", "may be 0 only with `echo`, to score the prompt")
    prompts = read_prompts(request, model)
    length = ("max_tokens", request.max_tokens)
    params = sampling_params(request, model, length, ("logprobs", request.logprobs))
    constraint = find_constraint(request)
    room = _room(prompts, length, "prompt", model)
    default = model.sampling.length(COMPLETION_TOKENS)
    params = _bounded(params, default if request.max_tokens is None else request.max_tokens or 1, room)
    jobs = _jobs(request, model, request_id, cache_salt, prompts, params, constraint)
    plan = _plan(request, model, prompts, constraint)
    if request.echo:
        scored = request.logprobs
        jobs = tuple(replace(job, prompt_logprobs=scored, decodes=request.max_tokens != 0) for job in jobs)
        plan = replace(plan, echoed=echo(request, prompts, model))
    return Prepared(request, jobs, plan, constraint)


def prepare_chat(request: ChatCompletionRequest, model: ModelInfo, request_id: str, cache_salt: str = "") -> Prepared:
    """Jobs of `POST /v1/chat/completions`; arguments and errors as `prepare_completion`."""
    _check_model(request.model, model)
    length = _chat_length(request)
    check_num_choices(1, request.n or 1, model)
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "needs `logprobs: true`")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = sampling_params(request, model, length, ("top_logprobs", logprobs))
    tools, forced = choose_tools(request, model)
    constraint = find_constraint(request, forced)
    if tools is not None and constraint is not None and forced is None:
        raise bad_field(constraint.param, "cannot go with `tools`, unless `tool_choice` is none")
    prompts = (_encode_chat(request, model),)
    room = _room(prompts, length, "messages", model)
    params = _bounded(params, model.sampling.length(room) if length[1] is None else length[1], room)
    reasoning = _reasoning(request, model, prompts[0])
    reads_marks = tools is not None and not tools.is_forced
    if reads_marks or (reasoning is not None and reasoning.has_special_marker):
        params = replace(params, skip_special_tokens=False)
    jobs = _jobs(request, model, request_id, cache_salt, prompts, params, constraint)
    plan = _plan(request, model, prompts, constraint)
    plan = replace(plan, tools=tools, reasoning=reasoning, skip_special=params.skip_special_tokens)
    return Prepared(request, jobs, plan, constraint)


def _reasoning(request: ChatCompletionRequest, model: ModelInfo, prompt: tuple[int, ...]) -> ReasoningPlan | None:
    """How the thinking of the answer is read."""
    if model.serve.reasoning_parser is None:
        if request.include_reasoning is False:
            raise bad_field("include_reasoning", "needs a server with --reasoning-parser")
        return None
    assert model.tokenizer is not None, "a conversation was encoded"
    last = request.messages[-1].content if request.continue_final_message else None
    continued = text_of(last, "messages") or ""
    return plan_reasoning(
        model.serve.reasoning_parser, prompt, continued, model.tokenizer, request.include_reasoning is not False
    )


def _check_model(name: str | None, model: ModelInfo) -> None:
    if name is not None and name not in model.names:
        raise unknown_model(name, model.names)


def _encode_chat(request: ChatCompletionRequest, model: ModelInfo) -> tuple[int, ...]:
    tools = () if request.tool_choice == "none" else request.tools or ()
    conversation = Conversation(request.messages, request, tools, request.reasoning_effort)
    tokens = conversation.encode(model, request.truncate_prompt_tokens)
    if not tokens:
        raise bad_field("messages", "have no tokens by the chat template")
    return tokens


def _chat_length(request: ChatCompletionRequest) -> Bound:
    """The field that bounds the output, and its value."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_field("max_tokens", f"is `{old}`, and `max_completion_tokens` is `{new}`: give one of them")
    bound, value = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    if value == 0:
        raise bad_field(bound, "must be at least 1")
    return bound, value


def _room(prompts: Prompts, length: Bound, prompt_field: str, model: ModelInfo) -> int:
    """Tokens that every choice may emit; a prompt that is only scored may fill the context."""
    bound, max_tokens = length
    longest = max(map(len, prompts))
    room = model.max_context - longest
    if room < (0 if max_tokens == 0 else 1):
        message = f"has `{longest}` tokens, and the model's context is {model.max_context}"
        raise bad_field(prompt_field, message, "context_length_exceeded")
    if max_tokens is not None and max_tokens > room:
        message = f"is `{max_tokens}`, and the context of {model.max_context} has room for {room} after the prompt"
        raise bad_field(bound, message, "context_length_exceeded")
    return room


def _bounded(params: SamplingParams, max_tokens: int, room: int) -> SamplingParams:
    """The parameters with their length; `min_tokens` alone raises a default."""
    most = max(min(max(max_tokens, params.min_tokens), room), 1)
    if params.min_tokens > most:
        raise bad_field("min_tokens", f"must be at most {most} after this prompt, not `{params.min_tokens}`")
    return params if most == params.max_new_tokens else replace(params, max_new_tokens=most)


def _jobs(
    request: GenerationBody,
    model: ModelInfo,
    request_id: str,
    cache_salt: str,
    prompts: Prompts,
    params: SamplingParams,
    constraint: Constraint | None,
) -> tuple[Job, ...]:
    """A job for each choice, prompt by prompt."""
    if params.stop and model.tokenizer is None:
        raise bad_field("stop", "needs a tokenizer, and the model has none")
    speculation = find_speculation(request, model, params.temperature)
    if constraint is not None:
        constraint.check(model.tokenizer, model.serve.max_grammar_bytes)
    salt = cache_salt if request.cache_salt is None else f"{cache_salt}/{request.cache_salt}"
    n = request.n or 1
    return tuple(
        Job(
            request_id=request_id,
            token_ids=prompts[i // n],
            params=replace(params, index=i) if i else params,
            cache_salt=salt,
            turn=cache_salt or request_id,
            whole=request.stream is not True,
            **speculation,
        )
        for i in range(len(prompts) * n)
    )


def _plan(
    request: CompletionRequest | ChatCompletionRequest,
    model: ModelInfo,
    prompts: Prompts,
    constraint: Constraint | None,
) -> ResponsePlan:
    plan = ResponsePlan(
        request=request,
        model=model,
        prompts=prompts,
        skip_special=request.skip_special_tokens is not False,
        constraint=None if constraint is None else constraint.param,
    )
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "needs `stream: true`")
    if plan.details and not request.stream:
        raise bad_field("speculative.details", "needs `stream: true`")
    return plan
