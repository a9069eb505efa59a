"""JSON documents as pydantic models: a model's fields are the keys, their order and their JSON Schema.

A model reads what was measured by attributes of the same names, so that a figure is named once. Ranges are for readers
of the schema and for gates: a figure outside its range is printed and not lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    WithJsonSchema,
    computed_field,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema

from specdec_cli.timing import Timing

if TYPE_CHECKING:
    computed = property
else:
    computed = computed_field
"""A property that is also a key of the document."""

_SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def absent(description: str | None = None, **more: Any) -> Any:
    """A field whose key is left out where there is nothing to tell."""
    return Field(default=None, exclude_if=lambda value: value is None, description=description, **more)


def known(value: float | None) -> float | None:
    """A figure, or None where it does not exist."""
    return value if value is not None and isfinite(value) else None


def _known_ends(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return ends if ends is not None and all(map(isfinite, ends)) else None


def _array(items: dict[str, Any], num: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": num, "maxItems": num}


def _number(kind: str = "number", **limits: float) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, **limits})


Count = Annotated[int, _number("integer", minimum=0)]
Share = Annotated[float, _number(minimum=0, maximum=1)]
Seconds = Annotated[float, _number(minimum=0)]
_SECONDS = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]}
_TIMES = [field.name for field in fields(Timing)]
_TIMING = {"title": "Timing", "type": "object", "properties": dict.fromkeys(_TIMES, _SECONDS), "required": _TIMES}
TimingResult = Annotated[Timing, WithJsonSchema(_TIMING)]
Known = PlainSerializer(known)
"""Not a number and infinity are null in a document."""
Figure = Annotated[float | None, Known]
"""A figure that may not exist."""
Ends = Annotated[
    tuple[float, float] | None,
    PlainSerializer(_known_ends),
    WithJsonSchema({"anyOf": [_array({"type": "number"}, 2), {"type": "null"}]}),
]
"""Lower and upper end of a 95 % interval; null where too few pairs leave it unknown."""


class _WrittenKeys(GenerateJsonSchema):
    """The schema of what is written: every key is required but those that `absent` leaves out."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        """Whether the key is always there."""
        return field.get("serialization_exclude_if") is None and super().field_is_required(field, total)


class Result(BaseModel):
    """Part of a document, read from an object's attributes or from a mapping."""

    model_config = ConfigDict(
        from_attributes=True,
        extra="forbid",
        defer_build=True,
        protected_namespaces=(),
        serialize_by_alias=True,
        validate_by_name=True,
        json_schema_serialization_defaults_required=True,
    )

    @classmethod
    def of(cls, measured: object) -> dict[str, Any]:
        """The JSON form of what was measured."""
        return cls.model_validate(measured).as_json()

    def as_json(self) -> dict[str, Any]:
        """The JSON form."""
        return self.model_dump(mode="json")


def as_json(part: object) -> Any:
    """The JSON form of a part of a document by itself."""
    return TypeAdapter(type(part)).dump_python(part, mode="json")


class ResultDocument(Result):
    """The keys of a document that follow those of every document: schema, versions, environment and recipe."""

    schema_name: ClassVar[str]

    @classmethod
    def given(cls, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON form of some of the document's keys, as a command gives them."""
        return cls(**keys).model_dump(mode="json", exclude_unset=True)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of the whole document, the caller's to change."""
        own = deepcopy(_own_schema(cls))
        head = {
            "schema": {"const": cls.schema_name},
            "specdec_version": {"type": "string", "minLength": 1},
            "created": {"type": "string", "format": "date-time"},
            "environment": {"type": "object"},
            "recipe": {"type": ["object", "null"]},
        }
        own["required"] = [*head, *own.get("required", ())]
        own["properties"] = head | own["properties"]
        return {"$schema": _SCHEMA, **own, "title": cls.schema_name}


@cache
def _own_schema(kind: type[ResultDocument]) -> dict[str, Any]:
    """The JSON Schema of a document's own keys, which pydantic makes in 0.1 s."""
    return kind.model_json_schema(mode="serialization", schema_generator=_WrittenKeys)


class SpeculativeResult(Result):
    """Counts and rates of speculation; null where a server or a log does not tell."""

    num_drafts: Count | None
    num_draft_tokens: Count | None
    num_accepted_tokens: Count | None
    num_emitted_tokens: Count | None
    acceptance_rate: Share | None
    acceptance_length: Annotated[float, _number(minimum=1)] | None
    per_position_acceptance_rates: list[Share | None] | None
    conditional_acceptance_rates: list[Share | None] | None
    num_draft_nodes: Count | None = absent("Of trees alone.")
    acceptance_by_rank: list[Share | None] | None = absent("Of trees alone.")
    acceptance_histogram: list[Count] | None
    draft_seconds: Seconds | None
    verify_seconds: Seconds | None
    overhead_seconds: float | None

    @model_validator(mode="after")
    def _without_trees(self) -> Self:
        if (self.num_draft_nodes or 0) <= (self.num_draft_tokens or 0):  # other engines count no nodes
            self.num_draft_nodes = self.acceptance_by_rank = None
        return self


class TotalsResult(Result):
    """An arm: what it took and what it accepted."""

    timing: TimingResult
    speculative: SpeculativeResult


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval.

    Args:
        median: the figure itself, from all pairs.
        ci95: lower and upper end; None with too few pairs, which leave it unknown.
        pairs: how many prompts or pairs it rests on.
    """

    median: Annotated[float, Known]
    ci95: Ends
    pairs: Count

    def is_above(self, value: float) -> bool:
        """Whether the whole interval lies above a value; never without an interval."""
        return self.ci95 is not None and self.ci95[0] > value

    def is_below(self, value: float) -> bool:
        """Whether the whole interval lies below a value; never without an interval."""
        return self.ci95 is not None and self.ci95[1] < value

    def overlaps(self, other: Interval) -> bool:
        """Whether two intervals share a value, as far as is known: one without an interval may share any."""
        if self.ci95 is None or other.ci95 is None:
            return True
        return self.ci95[0] <= other.ci95[1] and other.ci95[0] <= self.ci95[1]


class PositionResult(Result):
    """A place in the outputs: the prompt and the token, both from 0."""

    index: Count
    position: Count


class DifferencesResult(Result):
    """Outputs compared token by token; null where nothing was compared."""

    checked_tokens: Count | None = None
    mismatches: Count | None = None
    first_divergence: PositionResult | None = None


class LosslessResult(DifferencesResult):
    """Promise of the verification mode, and the result of comparing tokens."""

    promised: bool
    verify: str


class VocabularyResult(Result):
    """Vocabulary that a draft with another tokenizer shares with the target.

    `share_of_text` is the most that drafting by shared tokens can have accepted of such a text.
    """

    num_shared_by_text: Count
    share_of_target: Share
    share_of_draft: Share
    share_of_text: Share
    share_of_output: Share | None
    draft_tokens_per_token: Seconds
