"""Types of a recipe's values: words, sizes, lists, and texts that stand for tables; each says what it refuses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, Strict, WithJsonSchema
from pydantic_core import PydanticCustomError

from specdec_cli.errors import UsageError
from specdec_cli.recipe.gate import VERDICTS, meant_gate, parse_gate, parse_percentage
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import AUTO, RULES

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_REASONING = "deepseek_r1 deepseek_v3 glm45 granite holo2 kimi_k2 minimax_m2 mistral olmo3 qwen3 seed_oss step3"
_TOOL_CALLS = (
    "hermes qwen3_coder qwen3_xml glm45 glm47 deepseek_v3 deepseek_v31 llama3_json llama4_json llama3 pythonic "
    "llama4_pythonic olmo3 mistral kimi_k2 minimax_m2 seed_oss granite jamba phi4_mini_json"
)
if TYPE_CHECKING:
    Verify = str
    ReasoningParser = str
    ToolCallParser = str
else:
    Verify = Literal[(AUTO, *RULES)]
    ReasoningParser = Literal[tuple(_REASONING.split())]
    ToolCallParser = Literal[tuple(_TOOL_CALLS.split())]
Decoder = Literal["auto", "transformers", "graphs"]
LoadFormat = Literal["auto", "dummy"]
Quantize = Literal["none", "int8", "int4"]
QUANTIZATIONS = tuple(quantize for quantize in get_args(Quantize) if quantize != "none")
"""How linear layers may be quantized; a draft `self-` with each of these words is such a copy of its target."""
Compute = Literal["auto", "native", "dequantized"]

ParallelSize = Annotated[int, Field(ge=1, le=1024)]
Seconds = Annotated[float, Field(gt=0, le=10**6)]
_Share = Annotated[float, Field(ge=0, le=1)]
_LIST = Strict(False)  # strict pydantic takes no list, as YAML has them, for a tuple
_Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[_Text, ...], _LIST]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], _LIST]
_AS_TEXT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]})
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def is_device(word: str) -> bool:
    """Whether a word names a device: auto, cpu, cuda or cuda:N."""
    return bool(re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", word))


def _device(value: Any) -> Any:
    if isinstance(value, str) and not is_device(value):
        raise PydanticCustomError("device", "must be auto, cpu, cuda or cuda:N")
    return value


Device = Annotated[str, BeforeValidator(_device)]


def _names(value: Any) -> Any:
    """One name, several, or null for none."""
    if value is not None and not isinstance(value, str | list | tuple):
        raise PydanticCustomError("names", "must be a name or a list of names")
    return () if value is None else (value,) if isinstance(value, str) else value


Names = Annotated[
    Texts,
    BeforeValidator(_names),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


def _tasks(value: Any) -> Any:
    if value == []:
        raise PydanticCustomError("tasks", "must name a task, or be null for all of them")
    return value


Tasks = Annotated[Annotated[tuple[str, ...], _LIST] | None, BeforeValidator(_tasks)]


def _descending(rates: tuple[float, ...]) -> tuple[float, ...]:
    if not rates or any(later > rate for rate, later in itertools.pairwise(rates)):
        raise PydanticCustomError("rates", "must be rates from 0 to 1 that do not increase")
    return rates


AcceptanceRates = Annotated[tuple[_Share, ...], _LIST, AfterValidator(_descending)]


def _k_schedule(value: Any) -> Any:
    """`1:5,8:3,32:0` as pairs; the first numbers ascend."""
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else [""]
    pairs = [re.fullmatch(r"(\d{1,8}):(\d{1,2})", part.strip()) for part in parts]
    table = tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair is not None)
    numbers = [number for number, _ in table]
    if len(table) < len(pairs) or numbers != sorted(set(numbers)) or numbers[0] < 1 or any(k > 64 for _, k in table):
        raise PydanticCustomError("k_schedule", "must be a text such as 1:5,8:3,32:0: ascending numbers, k up to 64")
    return table


def schedule_text(pairs: Iterable[tuple[int, int]]) -> str:
    """Pairs as the text that they are read from."""
    return ",".join(f"{number}:{k}" for number, k in pairs)


KSchedule = Annotated[tuple[tuple[int, int], ...] | None, BeforeValidator(_k_schedule), _AS_TEXT]


def _layer_numbers(value: Any) -> Any:
    """`1-6-10` as numbers."""
    if value is None or isinstance(value, tuple):
        return value
    parts = str(value).split("-")
    if not all(re.fullmatch(r"\d{1,4}", part) for part in parts):
        raise PydanticCustomError("layers", "must be layers joined by dashes, such as 1-6-10")
    return tuple(map(int, parts))


LayerNumbers = Annotated[TokenIds | None, BeforeValidator(_layer_numbers), _AS_TEXT]


def _tree(value: Any) -> Any:
    """`4,2,1`, `3,2+1` or `dynamic:32`; a plain number is a static tree of one depth."""
    if value is None:
        return None
    try:
        return str(TreeShape.parse(str(value)))
    except UsageError as error:
        raise PydanticCustomError("tree", "{why}", {"why": f"is not usable: {error.message}; {error.hint}"}) from error


TreeText = Annotated[str | None, BeforeValidator(_tree)]


def _whole_number(value: Any) -> Any:
    """A key of an object: JSON has no other keys than texts."""
    return int(value) if isinstance(value, str) and re.fullmatch("0|[1-9][0-9]{0,9}", value) else value


LogitBias = dict[Annotated[int, BeforeValidator(_whole_number)], Annotated[float, Field(ge=-1e9, le=1e9)]]


def memory_size(text: str) -> int | None:
    """Bytes of `2GiB`, `500 MB` or `1073741824`; None where the text is no size."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    return int(float(match[1]) * unit) if match and unit else None


def memory_share(text: str) -> float | None:
    """0.9 for `90%`; None where the text is no percentage above 0 and up to 100."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", text.strip())
    share = float(match[1]) / 100 if match else 0.0
    return share if 0 < share <= 1 else None


def _memory(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and (value == "auto" or memory_size(value) or memory_share(value)):
        return value
    raise PydanticCustomError("memory", "must be auto, bytes such as 2GiB, or a share such as 90%")


Memory = Annotated[str, BeforeValidator(_memory), WithJsonSchema({"type": ["string", "integer"]})]


def _gate(value: Any) -> Any:
    if not isinstance(value, str) or parse_gate(value) is not None:
        return value
    if (meant := meant_gate(value)) is not None:
        message = "must be PATH OP NUMBER, not `{value}`; did you mean `{meant}`?"
        raise PydanticCustomError("gate", message, {"value": value, "meant": meant})
    raise PydanticCustomError(
        "gate",
        "must be PATH OP NUMBER such as speedup.decode < 1.2, OP one of < <= > >= ==, "
        f"or PATH == VERDICT (or !=), VERDICT one of {' '.join(VERDICTS)}",
    )


GateTexts = Annotated[tuple[Annotated[str, BeforeValidator(_gate)], ...], _LIST]


def _percentage(value: Any) -> Any:
    if not isinstance(value, str) or parse_percentage(value) is None:
        raise PydanticCustomError("percentage", "must be a percentage such as 5%")
    return value


Percentage = Annotated[str, BeforeValidator(_percentage)]
