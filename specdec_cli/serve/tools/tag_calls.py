"""Tool calls between tags: with named parameters as Qwen3-Coder writes them, or with keys and values as GLM does."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal

from specdec_cli.serve.tools import arguments
from specdec_cli.serve.tools.calls import Calls
from specdec_cli.serve.tools.letters import NoCallError, Steps, after_space, one_of, read_body, read_until

TagFormat = Literal["qwen3_coder", "seed_oss", "minimax_m2"]
_NAME = re.compile(r"[\w.\-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around calls whose parameters are named in tags.

    Args:
        begin: before calls.
        end: after them.
        call: before and after a call's name.
        end_call: after its parameters.
        parameter: before and after a parameter's name.
        end_parameter: after its value.
    """

    begin: str
    end: str
    call: tuple[str, str] = ("<function=", ">")
    end_call: str = "</function>"
    parameter: tuple[str, str] = ("<parameter=", ">")
    end_parameter: str = "</parameter>"


TAGS: Mapping[str, Tags] = {
    "qwen3_coder": Tags("<tool_call>", "</tool_call>"),
    "seed_oss": Tags("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": Tags(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        call=('<invoke name="', '">'),
        end_call="</invoke>",
        parameter=('<parameter name="', '">'),
    ),
}


def read_tagged(tags: Tags, calls: Calls, marker: str) -> Steps:
    """Calls after `marker`: the outer tag, or a first call's own, which models write without the outer one."""
    if marker == tags.begin:
        yield from one_of((tags.call[0],), (yield from after_space((yield))))
    while True:
        name = yield from read_until(tags.call[1], (yield), str.isprintable)
        calls.begin(calls.known(name.strip(), any_name=marker == tags.begin))
        yield from _read_parameters(tags, calls)
        calls.close()
        char = yield from after_space((yield))
        if char != "<":
            return char
        ends = yield from one_of((tags.end, tags.call[0]), char)
        if ends == tags.end:
            return (yield)


def _read_parameters(tags: Tags, calls: Calls) -> Generator[None, str | None, None]:
    """The parameters of one call, and its closing tag."""
    nexts = (tags.end_call, tags.parameter[0])
    tag: str | None = yield from one_of(nexts, (yield from after_space((yield))))
    while tag == tags.parameter[0]:
        key = yield from read_until(tags.parameter[1], (yield), str.isprintable)
        said: list[str] = []
        tag = yield from read_body(tags.end_parameter, nexts, said)
        text = "".join(said).removeprefix("\n")
        if tag is None:
            calls.argument(key, arguments.begun(text, calls.schema, key))
            raise NoCallError
        calls.argument(key, arguments.from_text(text.removesuffix("\n"), calls.schema, key))
    if not tag:
        raise NoCallError


def read_glm(calls: Calls) -> Steps:
    """A call after `<tool_call>`: the name, then keys and values in tags of their own."""
    char = yield
    name = ""
    while char is not None and char != "<":
        name += char
        char = yield
    nexts = ("<arg_key>", "</tool_call>")
    tag: str | None = yield from one_of(nexts, char)
    if not _NAME.fullmatch(name.strip()):
        raise NoCallError
    calls.begin(name.strip())
    while tag == "<arg_key>":
        key = (yield from read_until("</arg_key>", (yield))).strip()
        yield from one_of(("<arg_value>",), (yield from after_space((yield))))
        said: list[str] = []
        tag = yield from read_body("</arg_value>", nexts, said)
        if tag is None:
            calls.argument(key, arguments.begun("".join(said), calls.schema, key))
            raise NoCallError
        calls.argument(key, arguments.from_text("".join(said), calls.schema, key))
    if not tag:
        raise NoCallError
    calls.close()
    return (yield)
