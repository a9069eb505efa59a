"""ARCHITECTURE's picture of imports, checked over the package's syntax trees.

6 cli  serve          5 report          4 measure  train  export          3 engine
2 drafters            1 lm  sampling  text              0 recipe  drafted  events  errors
"""

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typed import stand_in

from specdec_cli import drafters as registry

PACKAGE = Path(__file__).parents[1] / "specdec_cli"
LAYERS = [
    {
        "recipe",
        "call_checks",
        "document",
        "draft_shape",
        "drafted",
        "tree_shape",
        "events",
        "errors",
        "files",
        "libraries",
        "likely_tree",
        "proxy",
        "quantities",
        "template_limits",
        "timing",
        "transfer",
        "verification",
    },
    {"lm", "sampling", "text"},
    {"drafters"},
    {"engine"},
    {"measure", "train", "export"},
    {"report"},
    {"cli", "serve"},
    {"__main__"},
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
NOUNS = {
    "call_checks",
    "document",
    "draft_shape",
    "drafted",
    "errors",
    "events",
    "files",
    "libraries",
    "proxy",
    "quantities",
    "template_limits",
    "timing",
    "tree_shape",
    "verification",
}  # layer 0's shared words, which recipe may use too
NEIGHBOURS = {("cli", "serve")}  # the one command that is a room of its own

ONLY_IN = {
    "rich": {"report", "cli"},
    "typer": {"cli"},
    "transformers": {"lm", "train"},
    "fastapi": {"serve"},
    "matplotlib": {"report"},
    "yaml": {"recipe", "export"},
    "pydantic": {"document", "engine", "measure", "recipe", "serve", "train"},
}
HEAVY = {"torch", "transformers", "datasets", "fastapi", "matplotlib", "scipy"}
QUICK_ROOMS = {
    "call_checks",
    "cli",
    "export",
    "report",
    "recipe",
    "document",
    "draft_shape",
    "drafters",
    "drafted",
    "errors",
    "events",
    "libraries",
    "tree_shape",
    "verification",
}  # --help and a recipe's error import these


@dataclass(frozen=True)
class Import:
    """One import: where it stands, what it names, whether it runs when the module is loaded, and whether ever."""

    module: str
    line: int
    target: str
    at_load: bool
    runs: bool = True

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """The room of `specdec_cli.room.file`; the package itself has none."""
    return [*module.split("."), ""][1]


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in ast.unparse(test)


@functools.cache
def imports_of(module: str) -> list[Import]:
    """All imports of a module, which is parsed once."""
    found: list[Import] = []

    def visit(node: ast.AST, at_load: bool, runs: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(module, node.lineno, name.name, at_load, runs) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative imports hide the room"
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                target = inner if inner in MODULES else str(node.module)
                found.append(Import(module, node.lineno, target, at_load, runs))
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.body:
                visit(child, False, False)
            children: list[ast.AST] = [*node.orelse]
        else:
            children = list(ast.iter_child_nodes(node))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for one in children:
            visit(one, at_load and not inside, runs)

    visit(ast.parse(MODULES[module].read_text(encoding="utf-8")), True, True)
    return found


IMPORTS = [found for module in MODULES for found in imports_of(module)]


def refused(found: Import) -> str | None:
    """Why an import between rooms is not allowed, or None."""
    here, there = room(found.module), room(found.target)
    if not found.target.startswith("specdec_cli") or not there or not here or here == there:
        return None
    if LAYER[there] > LAYER[here]:
        return "goes up"
    if LAYER[there] == LAYER[here] and there not in NOUNS and (here, there) not in NEIGHBOURS:
        return "goes sideways"
    return None


def loaded_with(module: str) -> dict[str, str]:
    """Every module that loading this one loads, and through which import."""
    seen: dict[str, str] = {}
    open_modules = [module]
    while open_modules:
        current = open_modules.pop()
        for found in imports_of(current) if current in MODULES else ():
            if found.at_load and found.target not in seen:
                seen[found.target] = str(found)
                open_modules.append(found.target)
    return seen


def test_every_room_has_its_layer() -> None:
    rooms = {room(module) for module in MODULES} - {"", "builtin"}
    assert rooms <= LAYER.keys()


def test_imports_go_down_only() -> None:
    assert [f"{found}: {refused(found)}" for found in IMPORTS if refused(found)] == []


def test_a_drafter_never_imports_another() -> None:
    helpers = registry._NOT_METHODS - {"__init__"}
    shared = {"specdec_cli.drafters", *(f"specdec_cli.drafters.{name}" for name in helpers)}
    drafters = {m for m in MODULES if room(m) == "drafters"} - shared
    assert [str(found) for found in IMPORTS if found.module in drafters and found.target in drafters] == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_only_its_rooms_import(package: str) -> None:
    strangers = [found for found in IMPORTS if found.target.split(".")[0] == package]
    assert [str(found) for found in strangers if room(found.module) not in ONLY_IN[package]] == []


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in QUICK_ROOMS])
def test_loads_nothing_heavy(module: str) -> None:
    heavy = {target: through for target, through in loaded_with(module).items() if target.split(".")[0] in HEAVY}
    assert heavy == {}


def asks_what_it_is(call: ast.Call) -> bool:
    """Whether a call asks an LM, a forward or a drafter for its class, or for something it may not have."""
    words = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(call.args[-1])}
    name = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else None
    asked = ast.unparse(call.func)
    return (asked == "isinstance" and any(str(word).endswith(("LM", "Forward", "Drafter")) for word in words)) or (
        asked in ("getattr", "hasattr") and name in PROTOCOLS
    )


PROTOCOLS = {
    "lm",
    "device",
    "dtype",
    "decoder",
    "decoder_obstacle",
    "graphs_obstacle",
    "origin",
    "max_context",
}


def test_nobody_asks_an_lm_or_a_drafter_what_it_is() -> None:
    """Callers find what they need in the protocols `door.LM`, `forward.Forward` and `contract.Drafter`."""
    found = [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, path in MODULES.items()
        if room(module) in ("drafters", "engine", "measure", "report", "cli", "serve")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and node.args and asks_what_it_is(node)
    ]
    assert found == []


def test_the_check_itself_can_fail() -> None:
    asked = ("isinstance(drafter, ModelDrafter)", "isinstance(lm, TableLM | int)", 'getattr(target, "dtype", None)')
    assert all(asks_what_it_is(stand_in(ast.parse(call, mode="eval").body)) for call in asked)
    assert not asks_what_it_is(stand_in(ast.parse("isinstance(k, int)", mode="eval").body))
    upward = Import("specdec_cli.engine.engine", 1, "specdec_cli.report.table", True)
    sideways = Import("specdec_cli.lm.load", 1, "specdec_cli.sampling.chain", True)
    downward = Import("specdec_cli.engine.engine", 1, "specdec_cli.lm.door", True)
    assert (refused(upward), refused(sideways), refused(downward)) == ("goes up", "goes sideways", None)
    assert any(target.split(".")[0] == "torch" for target in loaded_with("specdec_cli.engine.engine"))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other: Tarjan's strongly connected components of more than one node."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def graph_of(name: Callable[[str], str]) -> dict[str, set[str]]:
    """Who imports whom while the program runs, inside functions too, after `name` has grouped the modules."""
    graph: dict[str, set[str]] = {}
    for found in IMPORTS:
        if found.runs and found.target in MODULES and name(found.module) != name(found.target):
            graph.setdefault(name(found.module), set()).add(name(found.target))
    return graph


def sub_room(module: str) -> str:
    """`specdec_cli.room.sub`; a module that lies in the room itself stands for itself."""
    parts = module.split(".")
    return ".".join(parts[:3]) if len(parts) > 3 else module


def test_no_module_imports_itself_through_others() -> None:
    assert circles(graph_of(lambda module: module)) == []


def test_no_sub_room_imports_itself_through_others() -> None:
    assert circles(graph_of(sub_room)) == []


def test_every_sub_room_says_what_belongs_there() -> None:
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module != "specdec_cli":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), module


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
