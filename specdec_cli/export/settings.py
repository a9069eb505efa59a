"""Settings of a recipe, read by path for another engine; those that its exporter does not read become warnings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.export.draft_kind import DraftKind, configuration, draft_kind, folder_of
from specdec_cli.lm.files.names import DRAFT_TOKENS, TEMPERATURES_FILE, folder_and_choice, is_hub_name
from specdec_cli.recipe.keys import default_of
from specdec_cli.recipe.schema import MODEL_KEYS, Recipe
from specdec_cli.verification import RULES, Rule

_PATHS = (".", "/", "~")
_SECTIONS = ("target", "draft", "speculation", "sampling", "structured", "engine", "serve")


@dataclass
class ExportSettings:
    """A resolved recipe that remembers which of its settings were read.

    Args:
        recipe: with everything that the command line says.
        origins: `section.key` to where its value comes from, `default` where nothing sets it.
        engine: the engine's name in warnings.
        is_here: whether the engine runs on this machine and specdec sends its requests.
        warnings: sentences about what the engine does not do as the recipe says.
        refused: sampling settings with which the engine refuses requests.
    """

    recipe: Recipe
    origins: Mapping[str, str]
    engine: str
    is_here: bool = False
    warnings: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    _read: set[str] = field(default_factory=set)
    _has_counterpart: bool = True

    def value(self, path: str) -> Any:
        """The value of `section.key`, which counts as read."""
        self._read.add(path)
        section, key = path.split(".")
        return getattr(getattr(self.recipe, section), key)

    def given(self, path: str) -> Any:
        """The value of `section.key` where something sets it to other than its default; None elsewhere."""
        value = self.value(path)
        return value if self._is_given(path, value) else None

    def warn(self, sentence: str) -> None:
        """Tell the user what the engine will not do."""
        sentence = on_one_line(sentence)
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def without(self, path: str, reason: str) -> None:
        """Warn that a setting is left out, where it is set."""
        value = self.given(path)
        if value is not None:
            self.warn(f"{path} = {_shown(value)} is left out: {reason}")

    def warn_of_the_rest(self) -> None:
        """Warn of every setting that the recipe sets and that nothing has read."""
        self._read |= {"engine.name", "engine.start_timeout_seconds"}  # how specdec starts an engine
        self._warn_of_depth()
        for section in _SECTIONS:
            if section == "serve" and self.is_here:
                continue
            for key in type(getattr(self.recipe, section)).model_fields:
                path = f"{section}.{key}"
                if path not in self._read and (section != "draft" or key in (*MODEL_KEYS, "first")):
                    self.without(path, f"{self.engine} has no such setting, or specdec does not know it")
        for name in self.draft.unread:
            value = self.draft.options[name]
            if self.origins.get(f"draft.{name}", "default") != "default":
                self.warn(f"draft.{name} = {_shown(value)} is left out: {self.engine} has no such setting")

    @cached_property
    def draft(self) -> DraftKind:
        """The draft, as a kind that engines know."""
        draft = self.recipe.draft
        kind = draft_kind(draft.model, draft.method, draft.options)
        if kind.guessed_by is not None:
            self.warn(f"the draft `{draft.model}` is taken for {kind.what} because of {kind.guessed_by}")
        return kind

    @property
    def k(self) -> int:
        """Most tokens drafted in a step; 0 decodes without a draft."""
        return 0 if self.draft.method == "none" else max([k for _, k in self.k_by_batch] or [self._own_k])

    @property
    def k_by_batch(self) -> list[tuple[int, int]]:
        """From how many sequences on which k holds; empty where k is the same for all."""
        table, limit = self.given("speculation.k_by_batch"), self.given("speculation.disable_by_batch_size")
        self._read.add("speculation.num_speculative_tokens")
        pairs = [(int(size), int(k)) for size, k in table] if table else []
        if pairs and pairs[0][0] > 1:
            pairs.insert(0, (1, self._own_k))
        if limit is not None:
            pairs = [*[pair for pair in pairs or [(1, self._own_k)] if pair[0] <= limit], (int(limit) + 1, 0)]
        return pairs

    @property
    def _own_k(self) -> int:
        return int(self.value("speculation.num_speculative_tokens"))

    @property
    def is_sampled(self) -> bool:
        """Whether the recipe samples."""
        return bool(self.value("sampling.temperature") > 0)

    @cached_property
    def target(self) -> str:
        """The target's hub id or absolute folder."""
        return self._model("target", str(self.value("target.model")))

    @cached_property
    def draft_model(self) -> str:
        """The draft's hub id or absolute folder."""
        assert self.draft.model is not None, "a draft with a model"
        return self._model("draft", self.draft.model)

    @property
    def confidence_temperatures(self) -> str | None:
        """The file that calibrates a DSpark draft's confidences, in SGLang's form; None if its folder has none."""
        folder = None if self.draft.model is None else folder_of(self.draft.model)
        if self.draft.method != "dspark" or folder is None:
            return None
        path = folder / TEMPERATURES_FILE
        if path.is_file():
            return str(path)
        self.warn(f"confidences are not calibrated, as the draft has no {TEMPERATURES_FILE}: train-draft writes it")
        return None

    @property
    def num_mtp_modules(self) -> int | None:
        """MTP modules of a target on this machine, by its configuration; None where that does not say."""
        folder = folder_of(str(self.value("target.model")))
        content = {} if folder is None else configuration(folder)
        nested = content.get("text_config")
        num = {**(nested if isinstance(nested, dict) else {}), **content}.get("num_nextn_predict_layers")
        return num if type(num) is int else None

    @property
    def address(self) -> tuple[str, int]:
        """Where the server is to listen."""
        return str(self.value("serve.host")), int(self.value("serve.port")) or 8000

    @property
    def url(self) -> str:
        """The server's address for a client on the same machine."""
        host, port = self.address
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"

    def next_command(self) -> str:
        """The command that measures the server; made once the server's own arguments are."""
        words = ["specdec", "bench", "--endpoint", self.url, "-t", self.target]
        names = self.recipe.serve.served_model_name
        words += ["--endpoint-model", names[0]] if names and "serve.served_model_name" in self._read else []
        for name in type(self.recipe.sampling).model_fields:
            value, path = getattr(self.recipe.sampling, name), f"sampling.{name}"
            if value != default_of(path) and name not in self.refused:
                words += ["--set", f"{path}={_shown(value, _in_quotes)}"]
        return shlex.join(words)

    def leave_to_requests(self, but: Collection[str] = ()) -> None:
        """Warn of sampling settings that only requests can carry: all but those that the engine's own files hold."""
        for name in type(self.recipe.sampling).model_fields:
            if name in but:
                continue
            if self.is_here:
                self.value(f"sampling.{name}")
                continue
            self.without(f"sampling.{name}", "requests must carry it, as those of the next command do")

    def chains_only(
        self,
        *,
        knows_confidence: bool = False,
        knows_adaptive: bool = False,
        own_trees: str | None = None,
        own_policy: str | None = None,
    ) -> float | None:
        """Warn of a tree and of a policy, where the engine is to draft chains of a fixed length.

        Args:
            knows_confidence: whether the engine can stop where the draft is unsure.
            knows_adaptive: whether the engine chooses by itself how many tokens pay.
            own_trees: the settings of the engine's own trees of such a draft, for people; None where it has none.
            own_policy: the setting of its own choice of depth; None where it has none.

        Returns:
            Below which probability of its token it is to stop; None to draft k tokens always.
        """
        fixed = f"{self.engine} drafts a fixed number of tokens"
        if own_policy is not None:
            fixed = f"{self.engine} has a rule of its own, {own_policy}"
        chains = f"{self.engine} drafts chains with {self.draft.what}"
        if own_trees is not None:
            chains = f"a chain is drafted, because {self.engine} describes trees in another way, by {own_trees}"
        self.without("speculation.tree", chains)
        policy, least = self.value("speculation.depth_policy"), float(self.value("speculation.p_min"))
        if policy == "confidence" and knows_confidence:
            return least
        if policy != "adaptive" or not knows_adaptive:
            self.without("speculation.depth_policy", fixed)
        return None

    def one_k(self) -> None:
        """Warn of a table of k by batch size, in an engine without one."""
        if self.k_by_batch:
            self.warn(f"k by batch size is left out: {self.engine} has one k")

    def not_a_server(self) -> None:
        """Warn of the server's settings once, where the files are a script."""
        given = [self.given(f"serve.{key}") for key in type(self.recipe.serve).model_fields]
        if any(value is not None for value in given):
            self.warn("the settings of serve are left out: this is a script and no server")

    @property
    def rule(self) -> Rule | None:
        """The rule of verification; None where the recipe leaves it to the engine."""
        return RULES.get(self.value("speculation.verify"))

    def lossless_rule(self, reason: str = "{engine} has no such rule") -> bool:
        """Warn of a rule with which the output does not follow the target; whether there is none."""
        is_lossless = self.rule is None or self.rule.is_lossless
        if not is_lossless:
            self.without("speculation.verify", reason.format(engine=self.engine))
        return is_lossless

    def exact_match(self) -> None:
        """Warn of a rule that an engine does not have which accepts what the target itself chooses."""
        is_lossless = self.lossless_rule("{engine} accepts only what the target would choose")
        if is_lossless and self.rule is not None and self.rule.needs_q and self.is_sampled:
            self.warn(
                f"speculation.verify = {self.value('speculation.verify')} is left out: {self.engine} accepts a drafted "
                "token where the target draws the same one, so fewer drafted tokens are accepted"
            )

    def no_counterpart(self) -> None:
        """Warn that the engine will decode without a draft."""
        self._has_counterpart = False
        if self.k:
            message = f"{self.engine} has no counterpart of {self.draft.what}, and decodes without a draft"
            self.warn(f"the draft is left out: {message}")
        self._read.update(f"speculation.{key}" for key in type(self.recipe.speculation).model_fields)
        self._read.update(f"draft.{key}" for key in MODEL_KEYS)
        for name in self.draft.options:
            self.draft.option(name)

    def _warn_of_depth(self) -> None:
        """Warn of a k beyond what the draft gives, in an engine that runs it."""
        most = self.draft.most_tokens
        if self._has_counterpart and most is not None and self.k > most:
            self.warn(
                f"speculation.num_speculative_tokens = {self.k} is more than {self.draft.what} in {self.draft.model} "
                f"drafts in a row, which is {most}: set k to {most}, because {self.engine} may refuse more, or drafts "
                "tokens for which it was not trained"
            )

    def _model(self, section: str, name: str) -> str:
        if name.startswith("shape:"):
            hint = "name a model that exists, with -t and -d or in the recipe"
            raise UsageError(f"`{name}` has random weights, which no other engine can load", hint)
        folder = folder_of(name)
        if folder is None:
            if name.startswith(_PATHS) and not self.is_here:
                self.warn(
                    f"{section}.model = {name} is no folder of this machine: the engine's machine needs one there"
                )
            return name
        if section == "target" and DRAFT_TOKENS in configuration(folder):
            self.warn(f"target.model is {DraftKind('reduced').what}: {self.engine} cannot run it as a target")
        if not self.is_here:
            what = "file" if folder.is_file() else "folder"
            self.warn(f"{section}.model is a {what} of this machine, {folder}: the engine's machine needs a copy")
        return str(folder)

    def _is_given(self, path: str, value: Any) -> bool:
        if path == "draft" or self.origins.get(path, "default") == "default":
            return False
        return bool(value != default_of(path))


def on_one_line(text: str) -> str:
    """The text with its line breaks and control characters as escapes, so that it stays within a comment."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _shown(value: Any, text: Callable[[str], str] = str) -> str:
    """A value in YAML's flow style, its strings by `text`: for people by default."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shown(item, text) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(item, text)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _in_quotes(text: str) -> str:
    """A string that `--set` reads back as it is, whatever is in it."""
    return on_one_line(json.dumps(text, ensure_ascii=False))


def is_gguf(name: str) -> bool:
    """Whether a model is a GGUF file: on this machine, or chosen in a folder or a hub repository."""
    return Path(name).suffix == ".gguf" or folder_and_choice(name) is not None or is_hub_choice(name)


def is_hub_choice(name: str) -> bool:
    """Whether a name chooses a GGUF file of a hub repository."""
    return ":" in name and is_hub_name(name) and folder_and_choice(name) is None
