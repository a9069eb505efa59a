"""The one definition of the options that commands share, and what they say together: a `Shared`.

    @with_shared_options(aliases=True)
    def generate(prompt: ..., *, shared: Shared) -> ExitCode | None: ...

gives `generate` every option below; the command sees one object and asks it for the resolved recipe.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import typer

from specdec_cli import drafters
from specdec_cli.cli.completion import COMPLETIONS, Completion, choices
from specdec_cli.cli.help import words_of
from specdec_cli.cli.names import PROMPT_FILE, name_problems
from specdec_cli.cli.output import check_destination, is_interrupted
from specdec_cli.cli.screen import open_screen
from specdec_cli.cli.speculative_config import FLAG, read_speculative_config
from specdec_cli.errors import UsageError
from specdec_cli.files import given_path
from specdec_cli.recipe import DraftMethods, Recipe, Resolved, resolve, resolve_drafts
from specdec_cli.recipe.layers import unread_variables
from specdec_cli.recipe.problems import RecipeError
from specdec_cli.recipe.schema import default_of, describe
from specdec_cli.sampling.params import random_seed

Result = TypeVar("Result")

MODELS, SPECULATION, SAMPLING, STRUCTURED = "Models", "Speculation", "Sampling", "Structured output"
ENGINE, RUN = "Engine", "Recipe and output"
PROMPTS, GATES, SERVER, ELSEWHERE = "Prompts", "Gates", "Server", "Another engine"


def draft_methods() -> DraftMethods:
    """The drafting methods and their options, from the drafters' folder."""
    return DraftMethods(tuple(drafters.methods()), _method_options, drafters.create, drafters.parse_first)


def _method_options(method: str) -> dict[str, Any]:
    import dataclasses

    defaults = {}
    for option in drafters.options(method):
        made = option.default_factory() if option.default_factory is not dataclasses.MISSING else option.default
        defaults[option.name] = ... if made is dataclasses.MISSING else made
    return defaults


@dataclass(slots=True)
class Shared:
    """The values of a command line's shared options.

    Args:
        recipe: a shipped recipe's name or a file, or None.
        sets: the `--set` texts.
        flags: recipe path to value and the option's name.
        json: one JSON document on stdout, nothing else there.
        output: file for the JSON document; checked already.
        force: overwrite it.
        quiet: only errors on stderr.
        trust_remote_code: run code that comes with a checkpoint.
        resume: continue an interrupted measurement.
        details: print the figures behind a verdict, too.
        takes_structured: whether the command's outputs can follow a grammar.
        loads_models: whether the command loads the recipe's models here, if no other engine does.
        takes_parallel: whether the command leaves it to another engine to run a model on several devices.
        takes_engine: whether the command can start another engine.
        engine_command: program that starts the other engine; None looks for it on PATH.
        engine_args: further arguments of the other engine.
        drawn_seed: what a negative seed becomes, the same in everything that this command line decodes.
        tells_variables: whether variables without a meaning are yet to be reported.
    """

    recipe: str | None = None
    sets: tuple[str, ...] = ()
    flags: dict[str, tuple[Any, str]] = field(default_factory=dict)
    json: bool = False
    output: Path | None = None
    force: bool = False
    quiet: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    details: bool = False
    takes_structured: bool = False
    takes_parallel: bool = False
    loads_models: bool = True
    takes_engine: bool = False
    engine_command: str | None = None
    engine_args: str | None = None
    drawn_seed: int = field(default_factory=random_seed, compare=False)
    tells_variables: bool = field(default=True, compare=False)

    def resolve(self, *, draws_seed: bool = True) -> Resolved:
        """The checked recipe: flag > `--set` > environment > recipe > default.

        Args:
            draws_seed: put a random seed in place of a negative one.

        Raises:
            UsageError: everything that is wrong with it.
        """
        return self._checked(resolve(self.recipe, self.sets, os.environ, self.flags, draft_methods()), draws_seed)

    def resolve_drafts(self) -> list[Resolved]:
        """The checked recipe once for each of several drafts.

        Raises:
            UsageError: everything that is wrong with it.
        """
        return [
            self._checked(one)
            for one in resolve_drafts(self.recipe, self.sets, os.environ, self.flags, draft_methods())
        ]

    def _checked(self, resolved: Resolved, draws_seed: bool = True) -> Resolved:
        """Refuse structured output by name where it would be ignored; draw the seed that is wanted at random."""
        given = resolved.recipe.structured.given
        if given and not self.takes_structured:
            raise UsageError(
                f"`structured.{next(iter(given))}` has no effect in this command",
                "leave it out of the recipe; `generate` has structured output, and so have requests to `serve`",
            )
        is_here = self.loads_models and resolved.recipe.engine.name == "specdec"
        if problems := name_problems(resolved, is_here=is_here):
            raise RecipeError(problems)
        self._check_engine(resolved.recipe)
        self._check_devices(resolved.recipe)
        self._report_variables(resolved)
        if draws_seed and resolved.recipe.sampling.seed < 0:
            sampling = resolved.recipe.sampling.model_copy(update={"seed": self.drawn_seed})
            return replace(resolved, recipe=resolved.recipe.model_copy(update={"sampling": sampling}))
        return resolved

    def _check_engine(self, recipe: Recipe) -> None:
        """Refuse another engine where the command starts none, and options about one where none is asked for."""
        name = recipe.engine.name
        if name != "specdec" and not self.takes_engine:
            hint = "`bench`, `sweep-k`, `compare-drafts`, `generate` and `serve` do; or set engine.name to specdec"
            raise UsageError(f"`engine.name` is `{name}`, and this command starts no other engine", hint)
        given = [self.flags[path][1] for path in _OF_ANOTHER_ENGINE if path in self.flags]
        given += ["--engine-command"] if self.engine_command is not None else []
        given += ["--engine-args"] if self.engine_args is not None else []
        if name == "specdec" and given and not self.takes_parallel:
            raise UsageError(f"`{given[0]}` has no effect without another engine", "add --engine vllm")

    def _check_devices(self, recipe: Recipe) -> None:
        """Refuse models on several devices where specdec itself decodes."""
        if self.takes_parallel or recipe.engine.name != "specdec":
            return
        degrees = {
            "target.tensor_parallel_size": recipe.target.tensor_parallel_size,
            "target.pipeline_parallel_size": recipe.target.pipeline_parallel_size,
            "draft.tensor_parallel_size": recipe.draft.tensor_parallel_size,
        }
        for path, degree in degrees.items():
            if degree > 1:
                hint = "leave it out, or let vLLM do it: `--engine vllm`, `specdec export vllm`"
                raise UsageError(f"`{path}` is `{degree}`, and specdec runs a model on one device", hint)

    def _report_variables(self, resolved: Resolved) -> None:
        """Name the `SPECDEC_` variables that nothing reads, once."""
        if self.quiet or not self.tells_variables:
            return
        self.tells_variables = False
        for said in unread_variables(os.environ, read=(resolved.recipe.serve.api_key_env,)):
            open_screen(self.quiet, streams_text=False).say(f"note: {said}", "yellow")


@dataclass(frozen=True, slots=True)
class Option:
    """One shared option.

    Args:
        path: the recipe's key that it sets, or the field of `Shared`.
        kind: type of its value; a list may be repeated.
        names: on the command line; the first long one is its name in messages.
        panel: group in `--help`.
        aliases: names for people who come from vLLM-style servers; not on every command.
        help: None takes the words of the recipe's schema.
        metavar: what stands for the value in `--help`.
        default: its default in `--help`, where null in the recipe has a meaning of its own.
        only_with_aliases: whether it is there only for those people.
        convert: turns the value given into the recipe's.
        expand: turns it into several of the recipe's values instead, by their paths.
    """

    path: str
    kind: Any
    names: tuple[str, ...]
    panel: str
    aliases: tuple[str, ...] = ()
    help: str | None = None
    metavar: str | None = None
    default: str | None = None
    only_with_aliases: bool = False
    convert: Callable[[Any], Any] | None = None
    expand: Callable[[Any], Mapping[str, tuple[Any, str]]] | None = None

    @property
    def flag(self) -> str:
        """Its name in messages."""
        return next(name for name in self.names if name.startswith("--")).split("/")[0]

    @property
    def parameter(self) -> str:
        """Its name as a parameter of a Python function."""
        return f"shared_{self.flag.removeprefix('--').replace('-', '_')}"

    @property
    def value_name(self) -> str | None:
        """The placeholder of the value in `--help`; None for a flag."""
        if self.metavar is not None or self.kind is bool:
            return self.metavar
        unit = self.path.rpartition("_")[2].upper()
        return unit if unit in _UNITS else "X" if self.kind is float else "N"

    @property
    def completion(self) -> Completion | None:
        """Shell completion of its value."""
        if self.path in COMPLETIONS:
            return COMPLETIONS[self.path]
        return choices(self.metavar) if self.metavar and "|" in self.metavar else None

    @property
    def default_words(self) -> str:
        """The default in `--help`, from the recipe's schema where the option sets one of its keys."""
        if self.default is not None:
            return self.default
        if "." not in self.path and self.path != "draft":
            return words_of(False if self.kind is bool else None)
        return words_of(default_of(self.path))

    def declared(self, aliases: bool, default_words: str | None = None) -> inspect.Parameter:
        """The parameter that typer reads.

        Args:
            aliases: whether the names of vLLM-style servers belong to it.
            default_words: the default in `--help` of a command that has its own; None takes the recipe's.
        """
        names = (*self.names, *(self.aliases if aliases else ()))
        described = self.help or describe(self.path)
        info = typer.Option(
            *names,
            help=described,
            rich_help_panel=self.panel,
            metavar=self.value_name,
            show_default=default_words or self.default_words,
            autocompletion=self.completion,
        )
        default = False if self.path in _FIELDS and self.kind is bool else None
        annotation: Any = Annotated[self.kind if default is False else self.kind | None, info]
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _share_of_memory(share: float) -> str:
    if not 0 < share <= 1:
        raise UsageError(
            f"`--gpu-memory-utilization` must be above 0 and at most 1, not `{share:g}`", "for example 0.9"
        )
    return f"{100 * share:.9f}".rstrip("0").rstrip(".") + "%"


def _biases(texts: Iterable[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            number = int(token), float(bias)
        except ValueError:
            hint = "for example `--logit-bias 42=-5`"
            raise UsageError(f"`--logit-bias {text}` is not ID=BIAS, a token id and a number", hint) from None
        if number[0] in biases:
            raise UsageError(f"`--logit-bias` names token `{number[0]}` twice", "give each token one bias")
        biases[number[0]] = number[1]
    return biases


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        hint = "for example `--synthetic-acceptance-rates 0.8,0.6,0.4`"
        raise UsageError(f"`--synthetic-acceptance-rates {text}` is not numbers with commas", hint) from None


def _json_object(flag: str, example: str) -> Callable[[str], dict[str, Any]]:
    """Reads an option's JSON object."""

    def read(text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"`{flag}` is not JSON: {error}", f"for example `{flag} '{example}'`") from None
        if not isinstance(found, dict):
            raise UsageError(f"`{flag}` must be a JSON object, not `{text[:60]}`", f"for example `{flag} '{example}'`")
        return found

    return read


_UNITS = {"SECONDS", "MICROSECONDS", "BYTES"}
_FIELDS = {
    *("recipe", "sets", "json", "output", "force", "quiet", "trust_remote_code", "resume", "details"),
    *("engine_command", "engine_args"),
}
_OF_ANOTHER_ENGINE = ("engine.start_timeout_seconds", "engine.distributed_executor_backend")
_DRAFT_HELP = (
    "The draft: a hub id, folder or .gguf file (a model, or an EAGLE-3, DFlash or other head), ngram, suffix, mtp, "
    "self-int8, self-exit:N (N first layers), none, or two of them such as suffix+MODEL."
)
_TRUST_HELP = "Run code that comes with a checkpoint (target, draft or tokenizer)."
_JSON_HELP = "Print one JSON document on stdout and nothing else."

OPTIONS: tuple[Option, ...] = (
    Option("recipe", str, ("-r", "--recipe"), RUN, help="A shipped recipe's name or a YAML file.", metavar="NAME|FILE"),
    Option(
        "sets", list[str], ("--set",), RUN, help="Set one key of the recipe (repeatable).", metavar="KEY.PATH=VALUE"
    ),
    Option("json", bool, ("--json",), RUN, help=_JSON_HELP),
    Option("output", Path, ("--output",), RUN, help="Write the JSON document to this file.", metavar="FILE"),
    Option("force", bool, ("--force",), RUN, help="Overwrite the file of --output."),
    Option("quiet", bool, ("--quiet",), RUN, help="Print only errors on stderr."),
    Option("trust_remote_code", bool, ("--trust-remote-code",), MODELS, help=_TRUST_HELP),
    Option("target.model", str, ("-t", "--target"), MODELS, ("--model",), metavar="NAME|DIR"),
    Option(
        "draft",
        str,
        ("-d", "--draft"),
        MODELS,
        ("--speculative-model",),
        help=_DRAFT_HELP,
        metavar="SPEC",
        default="builtin:draft; none if a target is named",
        convert=drafters.parse_spec,
    ),
    Option("target.load_format", str, ("--load-format",), MODELS, metavar="auto|dummy"),
    Option("target.dtype", str, ("--dtype",), MODELS, metavar="auto|float32|bfloat16|float16"),
    Option("target.quantize", str, ("--quantize",), MODELS, metavar="none|int8"),
    Option("target.compute", str, ("--compute",), MODELS, metavar="auto|native|dequantized"),
    Option("target.device", str, ("--device",), MODELS, metavar="DEVICE"),
    Option("target.tensor_parallel_size", int, ("--tensor-parallel-size",), MODELS),
    Option("draft.dtype", str, ("--draft-dtype",), MODELS, metavar="auto|float32|bfloat16|float16"),
    Option("draft.quantize", str, ("--draft-quantize",), MODELS, metavar="none|int8"),
    Option("draft.compute", str, ("--draft-compute",), MODELS, metavar="auto|native|dequantized"),
    Option("draft.device", str, ("--draft-device",), MODELS, metavar="DEVICE"),
    Option(
        "draft.tensor_parallel_size",
        int,
        ("--draft-tensor-parallel-size", "--speculative-draft-tensor-parallel-size"),
        MODELS,
    ),
    Option(
        "speculation.num_speculative_tokens",
        int,
        ("-k", "--num-speculative-tokens"),
        SPECULATION,
        metavar="K",
        default="4; 5 for the built-in pair",
    ),
    Option(
        "speculation.depth_policy", str, ("--depth-policy",), SPECULATION, metavar="fixed|confidence|adaptive|heuristic"
    ),
    Option("speculation.p_min", float, ("--p-min",), SPECULATION),
    Option("speculation.tree", str, ("--tree",), SPECULATION, metavar="4,2,1|dynamic:N"),
    Option("speculation.verify", str, ("--verify",), SPECULATION, metavar="MODE"),
    Option("speculation.synthetic_acceptance_length", float, ("--synthetic-acceptance-length",), SPECULATION),
    Option(
        "speculation.synthetic_acceptance_rates",
        str,
        ("--synthetic-acceptance-rates",),
        SPECULATION,
        metavar="A,B,...",
        convert=_rates,
    ),
    Option(
        "speculation.disable_by_batch_size",
        int,
        ("--disable-by-batch-size",),
        SPECULATION,
        ("--speculative-disable-by-batch-size",),
    ),
    Option("speculation.k_by_batch", str, ("--k-by-batch",), SPECULATION, metavar="N:K,..."),
    Option("sampling.max_new_tokens", int, ("-n", "--max-new-tokens"), SAMPLING),
    Option("sampling.temperature", float, ("--temperature",), SAMPLING),
    Option("sampling.top_k", int, ("--top-k",), SAMPLING),
    Option("sampling.top_p", float, ("--top-p",), SAMPLING),
    Option("sampling.min_p", float, ("--min-p",), SAMPLING),
    Option("sampling.repetition_penalty", float, ("--repetition-penalty",), SAMPLING),
    Option("sampling.presence_penalty", float, ("--presence-penalty",), SAMPLING),
    Option("sampling.frequency_penalty", float, ("--frequency-penalty",), SAMPLING),
    Option("sampling.logit_bias", list[str], ("--logit-bias",), SAMPLING, metavar="ID=BIAS", convert=_biases),
    Option("sampling.stop", list[str], ("--stop",), SAMPLING, metavar="TEXT"),
    Option("sampling.stop_token_ids", list[int], ("--stop-token-id",), SAMPLING, metavar="ID"),
    Option("sampling.ignore_eos", bool, ("--ignore-eos/--no-ignore-eos",), SAMPLING),
    Option("sampling.min_tokens", int, ("--min-tokens",), SAMPLING),
    Option("sampling.logprobs", int, ("--logprobs",), SAMPLING, metavar="N"),
    Option("sampling.seed", int, ("--seed",), SAMPLING),
    Option("engine.decoder", str, ("--decoder",), ENGINE, metavar="auto|transformers|graphs"),
    Option("engine.compile", bool, ("--compile/--no-compile",), ENGINE),
    Option("engine.max_num_seqs", int, ("--max-num-seqs",), ENGINE, only_with_aliases=True),
    Option(
        "serve.served_model_name",
        list[str],
        ("--served-model-name",),
        SERVER,
        metavar="NAME",
        default="the target's",
        only_with_aliases=True,
    ),
    Option(
        "target.generation_config",
        str,
        ("--generation-config",),
        MODELS,
        only_with_aliases=True,
        metavar="auto|none|DIR",
    ),
    Option("target.chat_template", str, ("--chat-template",), MODELS, metavar="FILE|TEXT"),
    Option(
        "target.default_chat_template_kwargs",
        str,
        ("--default-chat-template-kwargs",),
        MODELS,
        metavar="JSON",
        convert=_json_object("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    ),
    Option("engine.max_model_len", int, ("--max-model-len",), ENGINE, default="the target's", only_with_aliases=True),
    Option(
        "engine.enable_prefix_caching",
        bool,
        ("--prefix-caching/--no-prefix-caching",),
        ENGINE,
        ("--enable-prefix-caching/--no-enable-prefix-caching",),
        default="off",
        only_with_aliases=True,
    ),
    Option(
        "engine.kv_cache_memory",
        float,
        ("--gpu-memory-utilization",),
        ENGINE,
        help="Fraction of the device's memory (on a CPU, of free RAM) for weights and KV cache.",
        metavar="SHARE",
        only_with_aliases=True,
        convert=_share_of_memory,
    ),
)


SPECULATIVE_CONFIG = Option(
    "speculative_config",
    str,
    (FLAG,),
    SPECULATION,
    help="vLLM's JSON, as `export vllm` writes it: model, method, num_speculative_tokens, ...",
    metavar="JSON",
    only_with_aliases=True,
    expand=read_speculative_config,
)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def prompt_file_option(path: str, panel: str) -> Option:
    """The option `--prompt-file`, a data set that is a file here.

    Args:
        path: the recipe's key of the data set.
        panel: group in `--help`.
    """

    def read(name: str) -> dict[str, tuple[Any, str]]:
        from specdec_cli.measure.workload.dataset import PRESETS

        # A file that is named like a data set is still a file.
        is_ambiguous = name.partition("?")[0].partition(":")[0] in ("builtin", *PRESETS)
        return {path: (f"./{name}" if is_ambiguous else name, PROMPT_FILE)}

    said = "File of prompts: one per line, or rows with prompt, messages or turns (JSONL, JSON, CSV, Parquet)."
    return Option("prompt_file", str, (PROMPT_FILE,), panel, help=said, metavar="FILE", expand=read)


WORKLOAD_OPTIONS: tuple[Option, ...] = (
    Option("workload.dataset", str, ("--dataset",), PROMPTS, metavar="NAME|FILE"),
    prompt_file_option("workload.dataset", PROMPTS),
    Option("workload.tasks", str, ("--tasks",), PROMPTS, metavar="A,B", default="all", convert=_names),
    Option("workload.num_prompts", int, ("--num-prompts",), PROMPTS),
)
"""Where prompts come from, for every command that reads several."""


def check_template(shared: Shared, is_chat: bool) -> None:
    """Refuse options about conversations where prompts are none.

    Raises:
        UsageError: there is one.
    """
    for path in ("target.chat_template", "target.default_chat_template_kwargs"):
        if path in shared.flags and not is_chat:
            raise UsageError(f"`{shared.flags[path][1]}` has no effect without a conversation", "add --chat")


Chat = Annotated[
    bool,
    typer.Option("--chat", help="Treat prompts as chat messages; apply the chat template.", rich_help_panel=PROMPTS),
]
DRAFTS_OPTION = Option(
    "draft",
    list[str],
    ("-d", "--draft"),
    MODELS,
    help=f"{_DRAFT_HELP} Repeat it for each draft.",
    metavar="SPEC",
    default="builtin:draft; none if a target is named",
    convert=lambda specs: [drafters.parse_spec(spec) for spec in specs],
)
RESUME_OPTION = Option(
    "resume",
    bool,
    ("--resume",),
    RUN,
    help="Continue an interrupted run from FILE.partial, which a run with --output FILE keeps until it is done.",
)
DETAILS_OPTION = Option(
    "details",
    bool,
    ("--details",),
    RUN,
    help="Also print the figures behind the verdict: where the time goes, every task, the predictions' parts.",
)
STRUCTURED_OPTIONS: tuple[Option, ...] = (
    Option("structured.json_schema", str, ("--json-schema",), STRUCTURED, metavar="FILE"),
    Option("structured.regex", str, ("--regex",), STRUCTURED, metavar="TEXT"),
    Option("structured.choice", list[str], ("--choice",), STRUCTURED, metavar="TEXT"),
)
GATE_OPTIONS: tuple[Option, ...] = (
    Option("gates.fail_if", list[str], ("--fail-if",), GATES, metavar="EXPR"),
    Option("gates.baseline", str, ("--baseline",), GATES, metavar="FILE"),
    Option("gates.max_regression", str, ("--max-regression",), GATES, metavar="PERCENT"),
)
SERVE_OPTIONS: tuple[Option, ...] = (
    Option("serve.host", str, ("--host",), SERVER, metavar="ADDRESS"),
    Option("serve.port", int, ("--port",), SERVER),
    Option("serve.api_key_env", str, ("--api-key-env",), SERVER, metavar="VARIABLE"),
    Option("serve.max_waiting", int, ("--max-waiting",), SERVER),
    Option("serve.max_connections", int, ("--max-connections",), SERVER),
    Option("serve.max_queue_delay_microseconds", int, ("--max-queue-delay-microseconds",), SERVER),
    Option("serve.request_timeout_seconds", float, ("--request-timeout-seconds",), SERVER),
    Option("serve.drain_timeout_seconds", float, ("--drain-timeout-seconds",), SERVER),
    Option("serve.hang_timeout_seconds", float, ("--hang-timeout-seconds",), SERVER),
    Option("serve.ping_interval_seconds", float, ("--ping-interval-seconds",), SERVER),
    Option("serve.stream_interval", int, ("--stream-interval",), SERVER),
    Option("serve.cors_origins", list[str], ("--cors-origin",), SERVER, metavar="ORIGIN"),
    Option("serve.allowed_hosts", list[str], ("--allowed-host",), SERVER, metavar="NAME"),
    Option("serve.max_body_bytes", int, ("--max-body-bytes",), SERVER),
    Option("serve.max_choices", int, ("--max-choices",), SERVER),
    Option("serve.max_logprobs", int, ("--max-logprobs",), SERVER),
    Option("serve.max_stop", int, ("--max-stop",), SERVER),
    Option("serve.max_stop_chars", int, ("--max-stop-chars",), SERVER),
    Option("serve.max_logit_bias", int, ("--max-logit-bias",), SERVER),
    Option("serve.max_messages", int, ("--max-messages",), SERVER),
    Option("serve.max_tools", int, ("--max-tools",), SERVER),
    Option("serve.max_grammar_bytes", int, ("--max-grammar-bytes",), SERVER),
    Option("serve.max_grammar_seconds", float, ("--max-grammar-seconds",), SERVER),
    Option("serve.max_grammar_memory_bytes", int, ("--max-grammar-memory-bytes",), SERVER),
    Option("serve.max_json_depth", int, ("--max-json-depth",), SERVER),
    Option("serve.max_speculative_tokens", int, ("--max-speculative-tokens",), SERVER),
    Option("serve.tool_call_parser", str, ("--tool-call-parser",), SERVER, metavar="FORMAT"),
    Option("serve.reasoning_parser", str, ("--reasoning-parser",), SERVER, metavar="FORMAT"),
    Option("serve.metrics_prefix", str, ("--metrics-prefix",), SERVER, metavar="WORD"),
    Option("serve.log_format", str, ("--log-format",), SERVER, metavar="text|json"),
    Option("serve.log_prompts", bool, ("--log-prompts/--no-log-prompts",), SERVER),
    Option("serve.log_polls", bool, ("--log-polls/--no-log-polls",), SERVER),
)


PARALLEL_OPTIONS: tuple[Option, ...] = (
    Option("target.pipeline_parallel_size", int, ("--pipeline-parallel-size",), MODELS),
    Option(
        "engine.distributed_executor_backend",
        str,
        ("--distributed-executor-backend",),
        ELSEWHERE,
        metavar="mp|ray|uni|external_launcher",
    ),
)
"""For commands that leave it to another engine to run a model."""

ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("engine.name", str, ("--engine",), ELSEWHERE, metavar="specdec|vllm"),
    Option(
        "engine_command",
        str,
        ("--engine-command",),
        ELSEWHERE,
        help="Program of the other engine, in whatever environment it is installed; env VARIABLE=VALUE may precede it.",
        metavar="COMMAND",
        default="vllm, on PATH",
    ),
    Option(
        "engine_args",
        str,
        ("--engine-args",),
        ELSEWHERE,
        help="Further arguments of the other engine's server.",
        metavar="ARGUMENTS",
    ),
    Option("engine.start_timeout_seconds", float, ("--engine-timeout",), ELSEWHERE),
    *PARALLEL_OPTIONS,
)
"""For commands that can start another engine."""


def with_shared_options(
    *,
    aliases: bool = False,
    without: Iterable[str] = (),
    beside: Iterable[Option] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a command the shared options; its parameter `shared` receives what they say.

    Args:
        aliases: also the names for people who come from vLLM-style servers.
        without: paths of options that have no meaning for this command.
        beside: more of the recipe's options: `WORKLOAD_OPTIONS`, `GATE_OPTIONS`.
        defaults: what `--help` says of keys for which this command has a default other than the recipe's, by path.
    """
    left_out = set(without)
    assert left_out <= {option.path for option in OPTIONS}, "only shared options can be left out"
    every = (*OPTIONS, SPECULATIVE_CONFIG)
    options = [o for o in every if o.path not in left_out and (aliases or not o.only_with_aliases)]
    options += beside

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "shared"]

        @functools.wraps(command)
        def called(**given: Any) -> Result:
            given = {name: expanded(value) for name, value in given.items()}
            values = {option.path: given.pop(option.parameter) for option in options}
            shared = _gather(options, values)
            if shared.force and shared.output is None and not any(isinstance(value, Path) for value in given.values()):
                raise UsageError("`--force` has no effect without --output", "name the file: --output FILE --force")
            if shared.resume:
                _prepare_to_resume(shared)
            check_destination(shared.output, shared.force)
            return command(**given, shared=shared)

        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [*own, *(option.declared(aliases, defaults.get(option.path)) for option in options)]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def expanded(value: Any) -> Any:
    """A path that an option names with its `~` expanded, which a shell leaves in `--output=~/result.json`."""
    return given_path(value) if isinstance(value, Path) else value


def _prepare_to_resume(shared: Shared) -> None:
    """Let a run that continues an interrupted one overwrite its files."""
    if shared.output is None:
        raise UsageError("`--resume` needs the --output FILE of the run to continue", "add --output FILE")
    shared.force = shared.force or is_interrupted(shared.output)


def _gather(options: Iterable[Option], values: Mapping[str, Any]) -> Shared:
    shared = Shared(
        takes_structured=any(option.path.startswith("structured.") for option in options),
        takes_engine=any(option.path == "engine.name" for option in options),
    )
    for option in options:
        value = values[option.path]
        if value is None or value == []:
            continue
        if option.expand is not None:
            _expand(shared.flags, option.flag, option.expand(value))
        elif option.path in _FIELDS:
            setattr(shared, option.path, tuple(value) if isinstance(value, list) else value)
        else:
            shared.flags[option.path] = (option.convert(value) if option.convert else value, option.flag)
    return shared


def _expand(flags: dict[str, tuple[Any, str]], name: str, given: Mapping[str, tuple[Any, str]]) -> None:
    """Add an option that sets several keys. A key that another option also sets is refused."""
    for path, value in given.items():
        if path in flags:
            raise UsageError(f"`{flags[path][1]}` and `{name}` set the same thing", "leave one of them out")
        flags[path] = value
