"""Drafters: one file per drafting method, and one for all published drafts. Listing them does not import torch.

The folder is the registry, with the table of published formats (`lm/files/draft_formats.py`) beside it. A drafter from
outside is any module with a dataclass named `Drafter`, called by its dotted name.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from specdec_cli.call_checks import fits, kind_name
from specdec_cli.drafters.contract import Drafter
from specdec_cli.drafters.elsewhere import ELSEWHERE
from specdec_cli.drafters.heads import published_drafter
from specdec_cli.errors import UsageError, closest
from specdec_cli.lm.files.draft_formats import kinds_by_method
from specdec_cli.lm.files.names import meant_name

if TYPE_CHECKING:
    from specdec_cli.lm.heads.mtp_files import MtpModules
    from specdec_cli.lm.heads.published import PublishedDraft

__all__ = [
    *("create", "from_fields", "get", "lookups", "methods", "model_name", "options"),
    *("parse_first", "parse_spec", "parts", "planned", "to_spec", "without_model"),
]

_NOT_METHODS = {
    *("__init__", "contract", "elsewhere", "growing_draft", "heads", "language_model"),
    *("self_drafter", "suffix_index", "translated_lm"),
    "fallback",  # its form is `A+B`
}
_MEMBERS = tuple(name for name in vars(Drafter) if not name.startswith("_"))
_HINT = "write a model's name or folder, or one of: "


def methods() -> dict[str, type[Drafter]]:
    """Every drafting method by name: the files of this folder, and the published drafts that have none."""
    files = [path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _NOT_METHODS]
    drafters = {method: published_drafter(method) for method in kinds_by_method()}
    drafters |= {file.replace("_", "-"): _drafter_of(f"{__name__}.{file}") for file in files}
    return dict(sorted(drafters.items()))


def method_of(drafter: Drafter) -> str:
    """The method's name of a drafter; of one from outside, its module's. A plus sign joins those of two."""
    asked = parts(drafter)
    if len(asked) > 1:
        return "+".join(map(method_of, asked))
    kind = getattr(type(drafter), "kind", None)  # of a published draft, whose class is made from a row of a table
    if kind is not None:
        return str(kind.method)
    module = type(drafter).__module__
    return next((name for name, made in methods().items() if type(drafter) is made), module)


def _drafter_of(module: str) -> type[Drafter]:
    drafter_class: type[Drafter] = importlib.import_module(module).Drafter
    return drafter_class


def get(method: str) -> type[Drafter]:
    """The class of a method: a file of this folder, or `my_package.my_module` with a dataclass named Drafter.

    Raises:
        UsageError: no such method, or one from outside that lacks a part of the drafters' contract.
    """
    known: dict[str, type[Drafter]] = {**methods(), **ELSEWHERE}
    if method in known:
        return known[method]
    if "." not in method:
        raise UsageError(f"there is no drafting method `{method}`", _suggest(method, list(known), "one of: "))
    try:
        drafter_class = _drafter_of(method)
    except (ImportError, AttributeError) as error:
        hint = "a method from outside is an importable module with a dataclass named Drafter"
        raise UsageError(f"the drafting method `{method}` cannot be imported: {error}", hint) from error
    if not dataclasses.is_dataclass(drafter_class):
        raise UsageError(f"`{method}.Drafter` is not a dataclass", "its dataclass fields are its options")
    known_names = {*dir(drafter_class), *(field.name for field in dataclasses.fields(drafter_class))}
    missing = next((name for name in _MEMBERS if name not in known_names), None)
    if missing is not None:
        hint = "specdec_cli/drafters/contract.py says what a drafter has; WithoutModel has a part of it for many"
        raise UsageError(f"`{method}.Drafter` has no `{missing}`", hint)
    return drafter_class


def options(method: str) -> tuple[dataclasses.Field[Any], ...]:
    """A method's options: the fields of its dataclass."""
    drafter_class: Any = get(method)
    return dataclasses.fields(drafter_class)


def create(method: str, given: Mapping[str, Any]) -> Drafter:
    """A drafter with these options, checked; nothing is loaded yet.

    Raises:
        UsageError: an unknown method or option, a missing one, a wrong type, or a value out of range.
    """
    made: Any = get(method)
    kinds = get_type_hints(made)
    fields = {field.name: field for field in options(method)}
    for name, value in given.items():
        if name not in fields:
            hint = _suggest(name, list(fields), "it has: ") if fields else "it has no options"
            raise UsageError(f"the drafting method `{method}` has no option `{name}`", hint)
        if not fits(value, kinds[name]):
            raise UsageError(f"`{name}` of `{method}` must be {kind_name(kinds[name])}, not `{value!r}`")
        if isinstance(value, str) and value != value.encode(errors="ignore").decode():
            raise UsageError(f"`{name}` of `{method}` must be Unicode text", "give it as UTF-8")
    for name in fields:
        if name not in given and _is_required(fields[name]):
            meant = "name its folder or hub id as the draft: its files tell the method" if name == "model" else None
            raise UsageError(f"the drafting method `{method}` needs `{name}`", meant)
    drafter: Drafter = made(**given)
    return drafter


def from_fields(fields: Mapping[str, Any]) -> Drafter:
    """A drafter from `model`, or `method` and its options, as `create` makes it; `first` names drafts before it.

    Raises:
        UsageError: as `create` and `parse_first`.
    """
    given = dict(fields)
    first = parse_first(given.pop("first", None))
    return planned(given.pop("method", "model"), given, first=first)


def planned(
    method: str,
    options: Mapping[str, Any],
    source: PublishedDraft | MtpModules | None = None,
    first: Sequence[Mapping[str, Any]] = (),
) -> Drafter:
    """A drafter whose draft was read.

    Raises:
        UsageError: as `create`.
    """
    from specdec_cli.drafters.fallback import DraftWithFallback

    drafter: Any = create(method, options)
    if source is not None:
        drafter.source = source
    for fields in reversed(first):
        drafter = DraftWithFallback(from_fields(fields), drafter)
    planned_drafter: Drafter = drafter
    return planned_drafter


def parts(drafter: Drafter) -> list[Drafter]:
    """The drafts that a drafter asks one after the other; itself if it is one alone."""
    from specdec_cli.drafters.fallback import DraftWithFallback

    return [*parts(drafter.first), *parts(drafter.second)] if isinstance(drafter, DraftWithFallback) else [drafter]


def parse_spec(spec: str) -> dict[str, Any]:
    """The draft that `--draft SPEC` names: `{"model": ...}`, or `{"method": ...}` with its options.

    What begins with a dot, a slash or a tilde is a folder; the name of an existing one may hold any character. In `A+B`
    A becomes `first`.

    Raises:
        UsageError: an unknown method or option, or a form that is not built.
    """
    if not spec.strip():
        raise UsageError("the draft is empty", _HINT + ", ".join(without_model()))
    known = [name for name in (*methods(), *ELSEWHERE) if name != "model"]
    name, colon, rest = spec.partition(":")
    is_folder = os.path.exists(os.path.expanduser(spec)) or spec.startswith((".", "/", "~"))
    is_folder = is_folder or (bool(rest) and os.path.isdir(os.path.expanduser(name)))  # `FOLDER:Q4_K_M`
    if "+" in spec and (name in known or not is_folder):
        return _parse_pair(spec)
    if name in known:
        return {"method": name, **(_parse_options(name, rest) if colon else {})}
    if is_folder or name in ("builtin", "shape") or rest.startswith("//"):  # an address is refused as a model's name
        return {"model": spec}
    if _is_unbuilt(spec):
        raise UsageError(
            f"the draft `{spec}` is not available",
            f"there are {', '.join(known)}, or a model; for a folder of that name write `./{spec}`",
        )
    is_hub_file = "/" in name and rest and "=" not in rest  # `org/repo:FILE.gguf`
    if colon and not is_hub_file:
        whole = meant_name(spec, known)
        if whole is not None:
            raise UsageError(f"there is no draft `{spec}`", f"did you mean `{whole}`?")
        near = meant_name(name, known) or name
        raise UsageError(f"there is no drafting method `{name}` in `{spec}`", _suggest(near, list(known), _HINT))
    return {"model": spec}


def parse_first(specs: str | None) -> list[dict[str, Any]]:
    """The drafts of `first`, joined by plus signs, as mappings.

    Raises:
        UsageError: one is no draft, or always guesses, so that none after it would be asked.
    """
    drafts = [parse_spec(spec.strip()) for spec in specs.split("+")] if specs is not None else []
    allowed = lookups()
    for fields in drafts:
        if fields.get("method") not in allowed:
            message = f"the draft `{to_spec(fields)}` cannot come before another one, which would never be asked"
            raise UsageError(message, f"before the plus sign stands one of: {', '.join(allowed)}")
    return drafts


def lookups() -> list[str]:
    """Methods that look up text: they need neither a model nor a prediction, and guess without chance."""
    classes: dict[str, Any] = {name: get(name) for name in without_model() if name not in ("none", "prediction")}
    return [name for name, made in classes.items() if made.draws is False]


def _parse_pair(spec: str) -> dict[str, Any]:
    """The draft `A+B`: B, with A as its `first`."""
    first, _, rest = spec.partition("+")
    second = parse_spec(rest.strip())
    if second.get("method") == "none":
        raise UsageError(f"the draft `{spec}` names no draft after the plus sign", f"write `{first.strip()}` alone")
    parse_first(first)
    return second | {"first": "+".join([first.strip(), *([second["first"]] if "first" in second else [])])}


def to_spec(fields: Mapping[str, Any]) -> str:
    """The draft as `--draft` takes it: a model's name, or a method with the options that differ from the defaults."""
    if fields.get("first") is not None:
        return f"{fields['first']}+{to_spec({key: fields[key] for key in fields if key != 'first'})}"
    if fields.get("method") is None:
        return str(fields["model"])
    method = fields["method"]
    defaults = {option.name: option.default for option in options(method)}
    changed = [f"{name}={fields[name]}" for name in defaults if name in fields and fields[name] != defaults[name]]
    if len(changed) == 1 and changed[0].startswith(f"{_lone_option(method)}="):
        changed = [changed[0].partition("=")[2]]
    return f"{method}:{','.join(changed)}" if changed else str(method)


def without_model() -> list[str]:
    """The methods that read no model."""
    return [name for name in methods() if "model" not in {option.name for option in options(name)}]


def model_name(fields: Mapping[str, Any]) -> str | None:
    """The name of a draft's folder that has a tokenizer of its own, which is to be the target's; None without one."""
    method: Any = get(fields.get("method", "model"))
    return fields.get("model") if getattr(method, "has_tokenizer", False) else None


def _is_unbuilt(spec: str) -> bool:
    """Whether a spec has a form that other tools take and this one does not."""
    return spec.startswith("parallel:")


def _lone_option(method: str) -> str | None:
    """The option that `method:VALUE` gives: a number that the method needs; None without one."""
    kinds = get_type_hints(get(method))
    needed = [option.name for option in options(method) if _is_required(option)]
    return needed[0] if len(needed) == 1 and kinds[needed[0]] is int else None


def _parse_options(method: str, text: str) -> dict[str, Any]:
    kinds = get_type_hints(get(method))
    names = [field.name for field in options(method)]
    given: dict[str, Any] = {}
    lone = _lone_option(method)
    if lone is not None and text.strip() and "=" not in text:
        text = f"{lone}={text}"
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UsageError(
                f"`{part}` in the draft `{method}:{text}` is not an option", f"write `{method}:name=value,…`"
            )
        if name not in names:
            hint = _suggest(name, names, "it has: ") if names else "it has no options"
            raise UsageError(f"the drafting method `{method}` has no option `{name}`", hint)
        if name in given:
            raise UsageError(f"the option `{name}` is given twice in the draft `{method}:{text}`")
        given[name] = _parse_value(method, name, value, kinds[name])
    create(method, given)
    return given


def _parse_value(method: str, name: str, text: str, kind: Any) -> Any:
    for accepted in get_args(kind) or (kind,):
        if accepted is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if accepted is NoneType and text.lower() in ("none", "null"):
            return None
        if accepted in (int, float, str):
            try:
                return accepted(text)
            except ValueError:
                continue
    raise UsageError(f"`{name}` of `{method}` must be {kind_name(kind)}, not `{text}`")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _suggest(name: str, known: list[str], otherwise: str) -> str:
    close = closest(name, known)
    return f"did you mean `{close}`?" if close is not None else otherwise + ", ".join(known)
