"""A typed request becomes jobs for the engine's thread and a plan of the answer. Pure, and off the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from specdec_cli.engine.jobs.records import Job
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.sampling.thinking import after_thinking
from specdec_cli.serve.constraint import Constraint
from specdec_cli.serve.errors import bad_field, unknown_model
from specdec_cli.serve.limits import RequestLimits
from specdec_cli.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from specdec_cli.serve.request.constraint_fields import find_constraint
from specdec_cli.serve.request.conversation import Conversation, text_of
from specdec_cli.serve.request.parameters import Defaults, OutputFields, sampling_params
from specdec_cli.serve.request.prompts import Prompts, check_num_choices, echo, read_prompts
from specdec_cli.serve.request.reasoning import ReasoningPlan, plan_reasoning
from specdec_cli.serve.request.speculation import find_speculation
from specdec_cli.serve.tools.toolbox import choose_tools

if TYPE_CHECKING:
    from specdec_cli.engine.drafting_plan import DraftingPlanner
    from specdec_cli.recipe.schema import ReasoningParser, ToolCallParser
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.serve.tools.tools import ToolPlan
    from specdec_cli.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16
"""Tokens that OpenAI and vLLM generate for a completion without `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The served model for which a request is prepared.

    Args:
        tokenizer: of the target; None takes token ids only.
        num_tokens: V, the engine's vocabulary.
        max_context: most tokens of prompt and output together.
        names: the model's names; the first is the one in answers.
        planner: checks a request's tree against the engine's drafters and rules.
        sampling: what absent sampling fields take.
        num_speculative_tokens: the server's k, as `num_spec_tokens` in answers.
        drafters: names that `speculative.draft` may have.
        tool_call_parser: name of the tool-call format; None takes the chat template's own.
        reasoning_parser: name of the format of its thinking; None takes thinking for content.
        limits: how much a request may ask for.
    """

    tokenizer: Tokenizer | None
    num_tokens: int
    max_context: int
    names: tuple[str, ...]
    planner: DraftingPlanner
    sampling: Defaults = field(default_factory=Defaults)
    num_speculative_tokens: int = 0
    drafters: tuple[str, ...] = ()
    tool_call_parser: ToolCallParser | None = None
    reasoning_parser: ReasoningParser | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """The form of the answer.

    Args:
        kind: completion or chat.
        model: the name in the answer.
        num_choices_per_prompt: n; choice i belongs to prompt i // n.
        prompts: token ids, one for each prompt.
        echoed: text put before each prompt's choices; empty without `echo`.
        stream: whether the answer is a stream of chunks.
        include_usage: a last chunk with usage.
        continuous_usage: usage in every chunk.
        details: which tokens were drafted, in every streamed choice.
        include_stop: the stop string is part of the text.
        skip_special: special tokens are left out of the text.
        as_token_ids: tokens of logprobs are written `token_id:N`.
        return_token_ids: choices list their token ids.
        tools: how tool calls are read out of the text; None for plain text.
        constraint: the field that says what the text must match, if one does.
        reasoning: how thinking is read out of the text; None takes it for content.
    """

    kind: Literal["completion", "chat"]
    model: str
    num_choices_per_prompt: int
    prompts: tuple[tuple[int, ...], ...]
    echoed: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    details: bool = False
    include_stop: bool = False
    skip_special: bool = True
    as_token_ids: bool = False
    return_token_ids: bool = False
    tools: ToolPlan | None = None
    constraint: str | None = None
    reasoning: ReasoningPlan | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's jobs, one for each choice in the answer's order, and its plan.

    Args:
        jobs: without their grammar, where there is a constraint.
        plan: of the answer.
        constraint: what every output must match; it is to be compiled.
    """

    jobs: tuple[Job, ...]
    plan: ResponsePlan
    constraint: Constraint | None = None

    def constrained(self, grammar: Grammar) -> Prepared:
        """With the compiled constraint."""
        reasoning = self.plan.reasoning
        if reasoning is not None:
            grammar = after_thinking(grammar, reasoning.markers, reasoning.begins)
        return replace(self, jobs=tuple(replace(job, grammar=grammar) for job in self.jobs), constraint=None)


def prepare_completion(request: CompletionRequest, facts: Facts, request_id: str, cache_salt: str = "") -> Prepared:
    """Jobs of `POST /v1/completions`.

    Args:
        request: the typed body.
        facts: of the served model.
        request_id: of the HTTP request.
        cache_salt: of the API key; the request's own is joined to it.

    Raises:
        ApiError: 404 for an unknown model, 400 naming the field.
    """
    _check_model(request.model, facts)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_field("best_of", f"must be `n`, which is `{request.n or 1}`, not `{request.best_of}`")
    if request.max_tokens == 0 and not request.echo:
        raise bad_field("max_tokens", "may be 0 only with `echo`, to score the prompt")
    prompts = read_prompts(request, facts)
    check_num_choices(len(prompts), request.n or 1, facts)
    wanted = OutputFields(request.max_tokens, "max_tokens", request.logprobs, "logprobs")
    params = sampling_params(request, wanted, facts.sampling, facts.num_tokens, facts.limits)
    constraint = find_constraint(request)
    room = _room(prompts, request.max_tokens, "max_tokens", "prompt", facts)
    length = facts.sampling.length(COMPLETION_TOKENS) if request.max_tokens is None else request.max_tokens or 1
    params = _bounded(params, length, room)
    jobs = _jobs(request, facts, request_id, cache_salt, prompts, params, constraint)
    plan = _plan(request, facts, "completion", prompts, constraint)
    if request.echo:
        scored = request.logprobs
        jobs = tuple(replace(job, prompt_logprobs=scored, decodes=request.max_tokens != 0) for job in jobs)
        plan = replace(plan, echoed=echo(request, prompts, facts))
    return Prepared(jobs, plan, constraint)


def prepare_chat(request: ChatCompletionRequest, facts: Facts, request_id: str, cache_salt: str = "") -> Prepared:
    """Jobs of `POST /v1/chat/completions`; arguments and errors as `prepare_completion`."""
    _check_model(request.model, facts)
    bound, max_tokens = _chat_max_tokens(request)
    check_num_choices(1, request.n or 1, facts)
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "needs `logprobs: true`")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    wanted = OutputFields(max_tokens, bound, logprobs, "top_logprobs")
    params = sampling_params(request, wanted, facts.sampling, facts.num_tokens, facts.limits)
    tools, forced = choose_tools(request, facts.tool_call_parser, facts.tokenizer, facts.limits)
    constraint = find_constraint(request, forced)
    if tools is not None and constraint is not None and forced is None:
        raise bad_field(constraint.param, "cannot go with `tools`, unless `tool_choice` is none")
    prompts = (_encode_chat(request, facts),)
    room = _room(prompts, max_tokens, bound, "messages", facts)
    params = _bounded(params, facts.sampling.length(room) if max_tokens is None else max_tokens, room)
    reasoning = _reasoning(request, facts, prompts[0])
    reads_marks = tools is not None and not tools.is_forced
    if reads_marks or (reasoning is not None and reasoning.has_special_marker):
        params = replace(params, skip_special_tokens=False)
    jobs = _jobs(request, facts, request_id, cache_salt, prompts, params, constraint)
    plan = _plan(request, facts, "chat", prompts, constraint)
    plan = replace(plan, tools=tools, reasoning=reasoning, skip_special=params.skip_special_tokens)
    return Prepared(jobs, plan, constraint)


def _reasoning(request: ChatCompletionRequest, facts: Facts, prompt: tuple[int, ...]) -> ReasoningPlan | None:
    """How the thinking of the answer is read."""
    if facts.reasoning_parser is None:
        if request.include_reasoning is False:
            raise bad_field("include_reasoning", "needs a server with --reasoning-parser")
        return None
    assert facts.tokenizer is not None, "a conversation was encoded"
    last = request.messages[-1].content if request.continue_final_message else None
    continued = text_of(last, "messages") or ""
    return plan_reasoning(
        facts.reasoning_parser, prompt, continued, facts.tokenizer, request.include_reasoning is not False
    )


def _check_model(name: str | None, facts: Facts) -> None:
    if name is not None and name not in facts.names:
        raise unknown_model(name, facts.names)


def _encode_chat(request: ChatCompletionRequest, facts: Facts) -> tuple[int, ...]:
    if len(request.messages) > facts.limits.max_messages:
        said = f"has `{len(request.messages)}` turns, and at most {facts.limits.max_messages} are taken"
        raise bad_field("messages", said)
    conversation = Conversation(
        request.messages,
        tools=() if request.tool_choice == "none" else request.tools or (),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message is True,
        variables=request.chat_template_kwargs,
        reasoning_effort=request.reasoning_effort,
        parser=facts.tool_call_parser,
    )
    tokens = conversation.encode(facts, request.truncate_prompt_tokens)
    if not tokens:
        raise bad_field("messages", "have no tokens by the chat template")
    return tokens


def _chat_max_tokens(request: ChatCompletionRequest) -> tuple[str, int | None]:
    """The field that bounds the output, and its value."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_field("max_tokens", f"is `{old}`, and `max_completion_tokens` is `{new}`: give one of them")
    bound, value = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    if value == 0:
        raise bad_field(bound, "must be at least 1")
    return bound, value


def _room(prompts: Prompts, max_tokens: int | None, bound: str, prompt_field: str, facts: Facts) -> int:
    """Tokens that every choice may emit; a prompt that is only scored may fill the context."""
    longest = max(map(len, prompts))
    room = facts.max_context - longest
    if room < (0 if max_tokens == 0 else 1):
        said = f"has `{longest}` tokens, and the model's context is {facts.max_context}"
        raise bad_field(prompt_field, said, "context_length_exceeded")
    if max_tokens is not None and max_tokens > room:
        said = f"is `{max_tokens}`, and the context of {facts.max_context} has room for {room} after the prompt"
        raise bad_field(bound, said, "context_length_exceeded")
    return room


def _bounded(params: SamplingParams, max_tokens: int, room: int) -> SamplingParams:
    """The parameters with their length; `min_tokens` alone raises a default."""
    most = max(min(max(max_tokens, params.min_tokens), room), 1)
    if params.min_tokens > most:
        raise bad_field("min_tokens", f"must be at most {most} after this prompt, not `{params.min_tokens}`")
    return params if most == params.max_new_tokens else replace(params, max_new_tokens=most)


def _jobs(
    request: GenerationBody,
    facts: Facts,
    request_id: str,
    cache_salt: str,
    prompts: Prompts,
    params: SamplingParams,
    constraint: Constraint | None,
) -> tuple[Job, ...]:
    """A job for each choice, prompt by prompt."""
    if params.stop and facts.tokenizer is None:
        raise bad_field("stop", "needs a tokenizer, and the model has none")
    speculation = find_speculation(request, facts, params.temperature)
    if constraint is not None:
        constraint.check(facts.tokenizer, facts.limits.max_grammar_bytes)
    salt = cache_salt if request.cache_salt is None else f"{cache_salt}/{request.cache_salt}"
    n = request.n or 1
    return tuple(
        Job(
            request_id=request_id,
            token_ids=prompts[i // n],
            params=replace(params, index=i) if i else params,
            num_speculative_tokens=speculation.num_speculative_tokens,
            tree=speculation.tree,
            draft=speculation.draft,
            prediction=speculation.prediction,
            cache_salt=salt,
            turn=cache_salt or request_id,
            whole=request.stream is not True,
        )
        for i in range(len(prompts) * n)
    )


def _plan(
    request: GenerationBody,
    facts: Facts,
    kind: Literal["completion", "chat"],
    prompts: Prompts,
    constraint: Constraint | None,
) -> ResponsePlan:
    options = request.stream_options
    if options is not None and not request.stream:
        raise bad_field("stream_options", "needs `stream: true`")
    details = request.speculative is not None and request.speculative.details is True
    if details and not request.stream:
        raise bad_field("speculative.details", "needs `stream: true`")
    return ResponsePlan(
        kind=kind,
        model=facts.names[0],
        num_choices_per_prompt=request.n or 1,
        prompts=prompts,
        stream=request.stream is True,
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.continuous_usage_stats is True,
        details=details,
        include_stop=request.include_stop_str_in_output is True,
        skip_special=request.skip_special_tokens is not False,
        as_token_ids=request.return_tokens_as_token_ids is True,
        return_token_ids=request.return_token_ids is True,
        constraint=None if constraint is None else constraint.param,
    )
