"""Published formats of drafts, a row each, and which of them a folder holds: decided once, for every room.

A row says how folders of the format are recognized, which drafting methods run them, and which file in `lm/heads` reads
them. The engine, `doctor`, exports, training and the list of drafting methods all take the kinds of drafts from here.
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specdec_cli.errors import RunError

Content = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PublishedKind:
    """A kind of published draft.

    Args:
        name: as other engines call it.
        what: for people, with its article and its title before the last word, such as "a set of Medusa heads".
        method: the drafting method that runs it, named after a kind; empty for a kind that is refused by name.
        words: in the name of a hub repository, which tell it where there is no folder.
        layers: an example of the method's option `layers`, the target's hidden states that it reads; empty for a
            method that reads the final ones alone.
        one_pass: whether one pass of the draft gives all tokens.
        has_tokenizer: whether its folder has a tokenizer, which is to be the target's.
    """

    name: str
    what: str
    method: str = ""
    words: tuple[str, ...] = ()
    layers: str = ""
    one_pass: bool = False
    has_tokenizer: bool = False

    @property
    def title(self) -> str:
        """Its name as people write it."""
        return self.what.split()[-2]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFormat:
    """One published format.

    Args:
        module: the file in `lm/heads` whose `read` takes a folder of it; empty for one that is refused by name.
        kinds: of draft that it holds, the first one where nothing tells another.
        what: for people who load it as a model, with its article; empty takes its kind's.
        words: in what a configuration calls itself (`speculators_model_type`, `model_type`, `architectures`).
        keys: of `config.json`, any of which tells it where no word does.
        marks: whether a configuration says that it is of this format, whatever else it says.
        tensors: alternatives, each of which tells it: patterns that names of tensors begin with, all of them there.
        files: of weights, under names that this format alone has; the first one that is there holds them all.
        beside: pickled files beside the weights that it may have.
        flags: keys of `config.json` that are true or false.
        counts: keys of `config.json` that count parts.
        kind_of: the kind of a folder by its configuration and its tensors' names.
        most_tokens: drafted in a row, by a configuration; None where it does not say.
        is_model: whether it is a language model, too, which may be loaded as one.
    """

    module: str
    kinds: tuple[PublishedKind, ...]
    what: str = ""
    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    marks: Callable[[Content], bool] = lambda _: False
    tensors: tuple[tuple[str, ...], ...] = ()
    files: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    kind_of: Callable[[Content, Sequence[str]], str] | None = None
    most_tokens: Callable[[Content], int | None] = lambda _: None
    is_model: bool = False

    def is_called(self, name: str) -> bool:
        """Whether a name has one of its words."""
        return any(word in name for word in self.words)

    def has(self, tensors: Sequence[str]) -> bool:
        """Whether tensors are there that only this format has."""
        return any(
            all(any(re.match(pattern, name) for name in tensors) for pattern in patterns) for patterns in self.tensors
        )


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """A folder that holds a published draft.

    Args:
        path: of the folder.
        content: of its `config.json`; empty where that is missing or broken.
        tensors: their names as the files have them; empty where the weights are not here.
        format: which it holds.
        kind: of draft.
    """

    path: Path
    content: dict[str, Any]
    tensors: Sequence[str]
    format: DraftFormat
    kind: PublishedKind

    def whole_number(self, content: Content, key: str, least: int = 0) -> int | None:
        """A whole number of its configuration; None where it has none.

        Raises:
            RunError: there is something else.
        """
        value = content.get(key)
        if value is None or (type(value) is int and value >= least):
            return value
        message = f"`{self.path / 'config.json'}` is not a valid configuration: `{key}` is `{value}`, and must be"
        raise RunError(f"{message} a whole number of at least {least}", "copy or download the draft again")


def recognize(folder: Path, content: dict[str, Any] | None = None) -> DraftFolder | None:
    """The published draft that a folder holds, one that does not run here included; None of any other folder."""
    content, tensors = _content(folder) if content is None else content, tensor_names(folder)
    row = _format_of(folder, content, tensors)
    if row is None:
        return None
    name = row.kinds[0].name if row.kind_of is None else row.kind_of(content, tensors)
    kind = next(kind for kind in row.kinds if kind.name == name)
    return DraftFolder(folder, content, tensors, row, kind)


def pickled_files() -> list[str]:
    """Names of the pickled files that drafts may have under a format's own names."""
    files = dict.fromkeys(file for row in FORMATS for file in (*row.files, *row.beside))
    return [file for file in files if not file.endswith(".safetensors")]


def published_kinds() -> list[PublishedKind]:
    """Every kind of draft that is published."""
    return [kind for draft_format in FORMATS for kind in draft_format.kinds]


def kind_by_name(name: str) -> PublishedKind | None:
    """The kind of draft that a hub repository's name tells; None where it tells none."""
    return next((kind for kind in published_kinds() if any(word in name.lower() for word in kind.words)), None)


def kinds_by_method() -> dict[str, PublishedKind]:
    """The kind that each drafting method of published drafts has its name from."""
    return {kind.name: kind for kind in published_kinds() if kind.name == kind.method}


def _format_of(folder: Path, content: Content, tensors: Sequence[str]) -> DraftFormat | None:
    """The format: by what the configuration calls itself, else by files and tensors that only a format has."""
    if any(str(key).startswith("speculators_") for key in content):
        kind = str(content.get("speculators_model_type", "")).lower()
        return next((draft_format for draft_format in FORMATS if draft_format.is_called(kind)), _SPECULATOR)
    architectures = content.get("architectures")
    called = [content.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    names = " ".join(str(name).lower() for name in called)
    is_vision = "vision_config" in content  # NVIDIA's Eagle is a vision-language model
    ways: tuple[Callable[[DraftFormat], bool], ...] = (
        lambda draft_format: draft_format.marks(content),
        lambda draft_format: draft_format.is_called(names) and not is_vision,
        lambda draft_format: any(key in content for key in draft_format.keys),
        lambda draft_format: (
            draft_format.has(tensors) or (not tensors and any((folder / file).is_file() for file in draft_format.files))
        ),
    )
    return next((draft_format for way in ways for draft_format in FORMATS if way(draft_format)), None)


def _content(folder: Path) -> dict[str, Any]:
    """The configuration as it stands in its file; empty where it cannot be read, which loading says."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def tensor_names(folder: Path) -> list[str]:
    """Names of the tensors in the first safetensors file, or in the index; empty where neither can be read."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if whole.is_file():
            with safe_open(whole, framework="numpy") as file:  # names alone are read, without torch
                return list(file.keys())
        if not index.is_file():
            return _pickled_names(folder / "pytorch_model.bin")
        content = json.loads(index.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError, OSError, RecursionError):
        return []  # `check_weights` says so
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    return list(weight_map) if isinstance(weight_map, dict) else []


def _pickled_names(path: Path) -> list[str]:
    """Strings of a pickled checkpoint, tensors' names among them; the pickle is read, not run."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(member for member in archive.namelist() if member.endswith("data.pkl"))
            return [text for _, text, _ in pickletools.genops(archive.read(pickled)) if isinstance(text, str)]
    except Exception:  # broken in whatever way: `weights_files` refuses it, too
        return []


def _eagle_kind(content: Content, tensors: Sequence[str]) -> str:
    """EAGLE-3 by its norm of the target's states, P-EAGLE by its mask; by the configuration where no weights are."""
    published = str(content.get("speculators_model_type") or "")
    architectures = str(content.get("architectures")).lower()
    is_third = "eagle3" in architectures or "draft_vocab_size" in content
    is_masked = "mask_hidden" in content or bool(content.get("parallel_drafting"))
    if tensors:
        is_third = any(name.endswith("hidden_norm.weight") for name in tensors)
        is_masked = any(name.removeprefix("model.") == "mask_hidden" for name in tensors)
    if not published and not is_third:
        return "eagle"
    return "p-eagle" if is_masked or published == "peagle" else "eagle3"


def block_keys(content: Content) -> dict[str, Any]:
    """The keys of a DFlash draft's configuration, with those of `dflash_config` among and before them."""
    nested = content.get("dflash_config")
    return {**content, **(nested if isinstance(nested, dict) else {})}


def block_shape(content: Content, kind: str) -> tuple[Any, bool]:
    """Rows of a block, as a configuration has them, and whether the first row drafts a token, too.

    Args:
        content: of the configuration.
        kind: of the draft: DSpark's drafts begin with the first row unless their configuration says otherwise.
    """
    keys = block_keys(content)
    size = keys.get("block_size", 8 if "speculators_model_type" in content else 16)
    from_anchor = keys.get("sample_from_anchor")
    return size, kind == "dspark" if from_anchor is None else bool(from_anchor)


def _block_tokens(kind: str) -> Callable[[Content], int | None]:
    """Tokens that a draft of a kind gives in a pass, by its configuration."""

    def count(content: Content) -> int | None:
        size, from_anchor = block_shape(content, kind)
        return None if type(size) is not int else size if from_anchor else size - 1

    return count


def _medusa_tokens(content: Content) -> int | None:
    """Heads of a converted folder; the authors' own configurations may count fewer than there are."""
    heads = content.get("num_heads")
    return heads if type(heads) is int else None


def _is_pard(content: Content) -> bool:
    return bool(content.get("spd_type", "pard" if "pard_token" in content else None) == "pard")


_BLOCK_FLAGS = ("sample_from_anchor", "causal", "is_causal", "causal_head", "sliding_window_non_causal")
_MASK_FILES = ("mask_embedding.pt",)
_SPECULATOR = DraftFormat(
    module="", kinds=(PublishedKind("speculator", "a draft of the speculators library"),), words=("speculator",)
)
FORMATS = (
    DraftFormat(
        module="pard2",
        kinds=(
            PublishedKind(
                "pard2",
                "a PARD-2 draft",
                "pard2",
                ("pard2", "pard-2"),
                "final-28-20-12",
                one_pass=True,
                has_tokenizer=True,
            ),
        ),
        marks=lambda content: content.get("spd_type") == "pard2" or content.get("pard2") is True,
        tensors=((r"(base_model\.)?(model\.)?target_proj\.",),),
        beside=("warp_model.bin",),
        flags=("pard2_proj_bias", "proj_bias"),
        is_model=True,
    ),
    DraftFormat(
        module="pard",
        kinds=(PublishedKind("pard", "a PARD draft", "pard", ("pard",), one_pass=True, has_tokenizer=True),),
        marks=_is_pard,
        is_model=True,
    ),
    DraftFormat(
        module="medusa",
        kinds=(PublishedKind("medusa", "a set of Medusa heads", "medusa", one_pass=True),),
        words=("medusa",),
        marks=lambda content: any(str(key).startswith("medusa_num") for key in content),
        tensors=((r"medusa_heads?",),),
        files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
        flags=("medusa_fc_bias", "original_lm_head"),
        counts=("medusa_num_heads", "medusa_num_layers", "num_heads"),
        most_tokens=_medusa_tokens,
    ),
    DraftFormat(
        module="dspark",
        kinds=(PublishedKind("dspark", "a DSpark draft", "dflash", ("dspark",), "1-9-17", one_pass=True),),
        words=("dspark",),
        tensors=((r"(model\.)?markov_head\.",),),
        beside=_MASK_FILES,
        flags=(*_BLOCK_FLAGS, "enable_confidence_head", "confidence_head_with_markov"),
        most_tokens=_block_tokens("dspark"),
    ),
    DraftFormat(
        module="dflash2",
        kinds=(PublishedKind("dflash2", "a DFlash2 draft", "dflash", ("dflash2",), "1-9-17", one_pass=True),),
        words=("dflash2",),
        marks=lambda content: "selector_rank" in block_keys(content),
        tensors=((r"(model\.)?candidate_selector\.",),),
        beside=_MASK_FILES,
        flags=_BLOCK_FLAGS,
        most_tokens=_block_tokens("dflash2"),
    ),
    DraftFormat(
        module="dflash",
        kinds=(PublishedKind("dflash", "a DFlash draft", "dflash", ("dflash",), "1-9-17", one_pass=True),),
        words=("dflash",),
        keys=("dflash_config",),
        tensors=((r"fc\.weight", r"hidden_norm\.weight", r"layers\.0\..*q_norm"),),
        beside=_MASK_FILES,
        flags=_BLOCK_FLAGS,
        most_tokens=_block_tokens("dflash"),
    ),
    DraftFormat(
        module="eagle",
        what="an EAGLE draft head",
        kinds=(
            PublishedKind("eagle3", "an EAGLE-3 head", "eagle3", ("eagle3", "eagle-3"), "1-15-28"),
            PublishedKind("p-eagle", "a P-EAGLE head", "p-eagle", layers="1-15-28", one_pass=True),
            PublishedKind("eagle", "an EAGLE head", "eagle", ("eagle-",)),
        ),
        words=("eagle",),
        keys=("draft_vocab_size",),
        tensors=(("midlayer.",), ("d2t",), ("t2d",), (r"(model\.)?fc\.weight$", r".*layers\.0\.")),
        flags=("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        kind_of=_eagle_kind,
    ),
    DraftFormat(module="", kinds=(PublishedKind("hydra", "a set of Hydra heads"),), words=("hydra",)),
    DraftFormat(
        module="",
        kinds=(PublishedKind("mlp_speculator", "an MLP speculator"),),
        words=("mlp_speculator", "mlpspeculator"),
    ),
    _SPECULATOR,
)
"""A folder holds the first format that recognizes it."""
