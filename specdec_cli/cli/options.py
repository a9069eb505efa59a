"""Options that commands share, each defined once: most by a key of the recipe, whose type and words they take."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from specdec_cli import drafters
from specdec_cli.cli.completion import COMPLETIONS, Completion, choices
from specdec_cli.cli.help import words_of
from specdec_cli.cli.names import PROMPT_FILE
from specdec_cli.cli.speculative_config import FLAG, read_speculative_config
from specdec_cli.errors import UsageError
from specdec_cli.lm.files.draft_formats import published_kinds
from specdec_cli.recipe.keys import default_of, describe, flat_kinds, kinds_of, literal_words, section_class
from specdec_cli.recipe.schema import MODEL_KEYS
from specdec_cli.recipe.values import QUANTIZATIONS
from specdec_cli.train.methods import METHODS

Result = TypeVar("Result")

MODELS, SPECULATION, SAMPLING, STRUCTURED = "Models", "Speculation", "Sampling", "Structured output"
ENGINE, RUN = "Engine", "Recipe and output"
PROMPTS, GATES, SERVER, ELSEWHERE = "Prompts", "Gates", "Server", "Another engine"
FILES = "Result files"

PAIR = "recipe target draft num-speculative-tokens"
"""Common options of commands that decode with a pair."""
RESULT = ("json", "output", "force", "quiet")
"""Paths of the options of commands that decode nothing."""


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
        """Name of the option in messages."""
        return next(name for name in self.names if name.startswith("--")).split("/")[0]

    @property
    def parameter(self) -> str:
        """Name of the option as a parameter of a Python function."""
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
        if self.path.startswith("files.") or ("." not in self.path and self.path != "draft"):
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
        default = False if self.kind is bool and "." not in self.path else None
        annotation: Any = Annotated[self.kind if default is False else self.kind | None, info]
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind_of(path: str) -> Any:
    """The type that typer parses for a key: lists may be repeated, and what is neither number nor flag is a text."""
    kinds = kinds_of(path)
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    if items:
        return list[int] if int in flat_kinds(items[0]) else list[str]
    return next((kind for kind in (bool, int, float) if kinds == {kind}), str)


def _choices_of(path: str) -> str | None:
    """`a|b` for a key that takes few words."""
    words = [word for kind in kinds_of(path) for word in literal_words(kind)]
    return "|".join(words) if 0 < len(words) <= _MOST_CHOICES else None


def key_option(path: str, panel: str, **exceptions: Any) -> Option:
    """The option that sets a key: its type, name and value by the recipe's schema, unless `exceptions` say otherwise.

    Args:
        path: the key, as `section.key`.
        panel: group in `--help`.
        exceptions: fields of `Option`.
    """
    exceptions = _EXCEPTIONS.get(path, {}) | exceptions
    kind = exceptions.pop("kind", None) or _kind_of(path)
    section, key = path.split(".")
    name = f"--{'draft-' if section == 'draft' else ''}{key.replace('_', '-')}"
    names = exceptions.pop("names", None) or (f"{name}/--no-{name.removeprefix('--')}" if kind is bool else name,)
    metavar = exceptions.pop("metavar", None) or _choices_of(path)
    if section == "draft" and key in MODEL_KEYS:
        exceptions["help"] = f"As {name.replace('--draft-', '--')}, for the draft."
    return Option(path, kind, names, panel, metavar=metavar, **exceptions)


def section_options(section: str, panel: str, without: Iterable[str] = ()) -> tuple[Option, ...]:
    """An option for each key of a section, in the order of the schema; `without` lists keys that have none."""
    owner = section_class(section)
    assert owner is not None, f"`{section}` is a section of the recipe"
    return tuple(key_option(f"{section}.{key}", panel) for key in owner.model_fields if key not in without)


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
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"`{flag}` is not JSON: {error}", f"for example `{flag} '{example}'`") from None
        if not isinstance(value, dict):
            raise UsageError(f"`{flag}` must be a JSON object, not `{text[:60]}`", f"for example `{flag} '{example}'`")
        return value

    return read


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_UNITS = {"SECONDS", "MICROSECONDS", "BYTES"}
_PUBLISHED = ", ".join(sorted(kind.title for kind in published_kinds() if kind.method))
_DRAFT_HELP = (
    f"The draft: a hub id, folder or .gguf file (a model, or a published draft: {_PUBLISHED}), ngram, suffix, mtp, "
    f"{', '.join(f'self-{quantize}' for quantize in QUANTIZATIONS)}, self-exit:N (N first layers), none, or two of "
    "them such as suffix+MODEL."
)
_TRUST_HELP = "Run code that comes with a checkpoint (target, draft or tokenizer)."
_JSON_HELP = "Print one JSON document on stdout and nothing else."

_MOST_CHOICES = 6
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "target.model": {"names": ("-t", "--target"), "aliases": ("--model",), "metavar": "NAME|DIR"},
    "target.device": {"metavar": "DEVICE"},
    "target.generation_config": {"only_with_aliases": True, "metavar": "auto|none|DIR"},
    "target.chat_template": {"metavar": "FILE|TEXT"},
    "target.default_chat_template_kwargs": {
        "metavar": "JSON",
        "convert": _json_object("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    },
    "draft.device": {"metavar": "DEVICE"},
    "draft.tensor_parallel_size": {
        "names": ("--draft-tensor-parallel-size", "--speculative-draft-tensor-parallel-size")
    },
    "speculation.num_speculative_tokens": {
        "names": ("-k", "--num-speculative-tokens"),
        "metavar": "K",
        "default": "4; 5 for the built-in pair",
    },
    "speculation.tree": {"metavar": "4,2,1|dynamic:N"},
    "speculation.verify": {"metavar": "MODE"},
    "speculation.synthetic_acceptance_rates": {"kind": str, "metavar": "A,B,...", "convert": _rates},
    "speculation.disable_by_batch_size": {"aliases": ("--speculative-disable-by-batch-size",)},
    "speculation.k_by_batch": {"kind": str, "metavar": "N:K,..."},
    "speculation.k_by_context": {"kind": str, "metavar": "N:K,..."},
    "sampling.max_new_tokens": {"names": ("-n", "--max-new-tokens")},
    "sampling.logit_bias": {"kind": list[str], "metavar": "ID=BIAS", "convert": _biases},
    "sampling.stop": {"metavar": "TEXT"},
    "sampling.stop_token_ids": {"names": ("--stop-token-id",), "metavar": "ID"},
    "structured.json_schema": {"metavar": "SCHEMA|FILE"},
    "structured.regex": {"metavar": "TEXT"},
    "structured.choice": {"metavar": "TEXT"},
    "engine.max_num_seqs": {"only_with_aliases": True},
    "engine.max_model_len": {"default": "the target's", "only_with_aliases": True},
    "engine.enable_prefix_caching": {
        "names": ("--prefix-caching/--no-prefix-caching",),
        "aliases": ("--enable-prefix-caching/--no-enable-prefix-caching",),
        "default": "off",
        "only_with_aliases": True,
    },
    "engine.kv_cache_memory": {
        "kind": float,
        "names": ("--gpu-memory-utilization",),
        "help": "Fraction of the device's memory (on a CPU, of free RAM) for weights and KV cache.",
        "metavar": "SHARE",
        "only_with_aliases": True,
        "convert": _share_of_memory,
    },
    "engine.name": {"names": ("--engine",)},
    "engine.start_timeout_seconds": {"names": ("--engine-timeout",)},
    "workload.dataset": {"metavar": "NAME|FILE"},
    "workload.tasks": {"kind": str, "metavar": "A,B", "default": "all", "convert": _names},
    "gates.fail_if": {"metavar": "EXPR"},
    "gates.baseline": {"metavar": "FILE"},
    "gates.max_regression": {"metavar": "PERCENT"},
    "serve.host": {"metavar": "ADDRESS"},
    "serve.api_key_env": {"metavar": "VARIABLE"},
    "serve.served_model_name": {
        "kind": list[str],
        "metavar": "NAME",
        "default": "the target's",
        "only_with_aliases": True,
    },
    "serve.cors_origins": {"names": ("--cors-origin",), "metavar": "ORIGIN"},
    "serve.allowed_hosts": {"names": ("--allowed-host",), "metavar": "NAME"},
    "serve.tool_call_parser": {"metavar": "FORMAT"},
    "serve.reasoning_parser": {"metavar": "FORMAT"},
    "serve.metrics_prefix": {"metavar": "WORD"},
    "train.method": {"metavar": "|".join(METHODS)},
    "train.data": {"names": ("--data", "--dataset"), "metavar": "NAME|FILE"},
    "train.num_prompts": {"default": "all"},
    "train.learning_rate": {"default": "by the target's width"},
    "train.evaluate_every": {"metavar": "STEPS"},
    "train.save_every": {"metavar": "STEPS"},
    "train.seed": {"names": ("--train-seed",)},
    "train.layers": {"kind": str, "metavar": "A-B-C"},
    "train.start_from": {"metavar": "MODEL"},
}
"""Options that differ from what the schema says of their keys, by path."""


_WITHOUT_OPTION = (
    *("name", "distributed_executor_backend", "start_timeout_seconds"),
    *("kv_block_size", "max_num_batched_tokens", "check_at_load"),
)
"""Keys of the engine that only another one has, or that are tuned in a recipe."""

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
    key_option("target.model", MODELS),
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
    *section_options("target", MODELS, without=("model", "revision", "pipeline_parallel_size")),
    *section_options("draft", MODELS, without=("model", "method", "revision", "load_format", "first")),
    *section_options("speculation", SPECULATION),
    *section_options("sampling", SAMPLING, without=("skip_special_tokens",)),
    *section_options("engine", ENGINE, without=_WITHOUT_OPTION),
    key_option("serve.served_model_name", SERVER),
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

    message = "File of prompts: one per line, or rows with prompt, messages or turns (JSONL, JSON, CSV, Parquet)."
    return Option("prompt_file", str, (PROMPT_FILE,), panel, help=message, metavar="FILE", expand=read)


WORKLOAD_OPTIONS: tuple[Option, ...] = (
    key_option("workload.dataset", PROMPTS),
    prompt_file_option("workload.dataset", PROMPTS),
    *section_options("workload", PROMPTS, without=("dataset",)),
)
"""Where prompts come from, for every command that reads several."""


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
STRUCTURED_OPTIONS = section_options("structured", STRUCTURED)
GATE_OPTIONS = section_options("gates", GATES)
SERVE_OPTIONS = section_options("serve", SERVER, without=("served_model_name",))


_RESULT_FILES = {
    "plot": ("FILE.png|FILE.svg", "Write a plot of the results."),
    "html": ("FILE", "Write a self-contained HTML page with tables and plots."),
    "markdown": ("FILE", "Write the tables as Markdown, for example for a CI job summary."),
    "csv": ("FILE", "Write the figures as CSV."),
    "junit": ("FILE", "Write gates and the lossless check as JUnit XML."),
}
FILE_OPTIONS: tuple[Option, ...] = tuple(
    Option(f"files.{kind}", Path, (f"--{kind}",), FILES, help=meaning, metavar=metavar)
    for kind, (metavar, meaning) in _RESULT_FILES.items()
)
"""The further files of a result, whose kinds become keys of `Shared.files`."""

PARALLEL_OPTIONS = (
    key_option("target.pipeline_parallel_size", MODELS),
    key_option("engine.distributed_executor_backend", ELSEWHERE),
)
"""For commands that leave it to another engine to run a model."""

ENGINE_OPTIONS: tuple[Option, ...] = (
    key_option("engine.name", ELSEWHERE),
    Option(
        "engine_command",
        str,
        ("--engine-command",),
        ELSEWHERE,
        help="Program of the other engine, in an environment of its own, or a Python with xllamacpp; "
        "env VARIABLE=VALUE may precede it.",
        metavar="COMMAND",
        default="vllm or llama-server, on PATH",
    ),
    Option(
        "engine_args",
        str,
        ("--engine-args",),
        ELSEWHERE,
        help="Further arguments of the other engine's server.",
        metavar="ARGUMENTS",
    ),
    key_option("engine.start_timeout_seconds", ELSEWHERE),
    *PARALLEL_OPTIONS,
)
"""For commands that can start another engine."""


MEASURING_OPTIONS = (
    *WORKLOAD_OPTIONS,
    *GATE_OPTIONS,
    *FILE_OPTIONS,
    RESUME_OPTION,
    DETAILS_OPTION,
    *ENGINE_OPTIONS,
)
"""For commands that measure."""


def every_option() -> tuple[Option, ...]:
    """Every shared option of every command."""
    return (*OPTIONS, SPECULATIVE_CONFIG, *MEASURING_OPTIONS, *STRUCTURED_OPTIONS, *SERVE_OPTIONS)
