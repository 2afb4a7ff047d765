"""The size of the house in one table: ``python -m tests.packaging.house_table [ROOT]``.

None of these numbers is a limit. They say how much a newcomer has to read, and a change shows in
them. ROOT is another checkout, to compare with.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT = ("kvtier", "connectors", "autoconfig")
"""The folders of the product. ``bench`` measures it, and is not counted."""
EXTENSIONS = "kvtier/extensions/"
"""They stand beside the core, and a newcomer need not read them."""
SCHEDULER = "connectors/vllm/scheduler_side/"
CONNECTOR = "connectors/vllm/connector.py"
"""vLLM's class. It makes one of these halves and imports that half then."""
WORKER = ("connectors/vllm/worker_side/worker.py", "connectors/vllm/worker_side/loaded.py")
STARTED = ("connectors/vllm/scheduler_side/scheduler.py", "kvtier/assemble.py", "kvtier/checks.py",
           "connectors/vllm/extensions/shipped.py", "autoconfig/start.py")  # fmt: skip
"""What makes a scheduler's half, with a Store of its own or the client of a server."""
TIERS = {"object": ("objects", r"\b(object_?store|object_url|objects?\.url|tiers\.objects)\b"),
         "Mooncake": ("mooncake", r"(?i)mooncake")}  # fmt: skip
"""Tier -> the name of its folder and of its files elsewhere, and how a file names the tier."""


class Row(NamedTuple):
    """One line of the table."""

    what: str
    value: str


class House:
    """The Python files of a checkout, each parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # rglob follows no links, as kvtier/bench is one.
        paths = [path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py"))]
        self.text = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths
        }
        self.tree = {file: ast.parse(text) for file, text in self.text.items()}
        self.core = [file for file in self.text if not file.startswith(EXTENSIONS)]

    def lines(self, files: Iterable[str]) -> int:
        return sum(self.text[file].count("\n") for file in files)

    def classes(self) -> dict[str, list[str]]:
        """The name of each class that users of its module see -> the files that define it."""
        found = defaultdict[str, list[str]](list)
        for file, tree in self.tree.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(file)
        return found

    def imports(self) -> dict[str, set[str]]:
        """The files that are imported when a file is, by file."""
        modules = {_module(file): file for file in self.text}
        return {
            file: {modules[name] for name in _imported(tree.body, modules) if name in modules}
            - {file}
            for file, tree in self.tree.items()
        }


def _module(file: str) -> str:
    """The name that a file is imported by."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "kvtier" else ["kvtier", *parts])


def _imported(body: Sequence[ast.stmt], modules: Container[str]) -> Iterator[str]:
    """What these statements import when they run: nothing inside of functions, and nothing that
    only type checkers see."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in whole)
        elif isinstance(node, ast.Try):
            yield from _imported([*node.body, *node.orelse, *node.finalbody], modules)


def reached(imports: Mapping[str, set[str]], *start: str) -> set[str]:
    """``start`` and all files that they import, directly or not."""
    found, new = set[str](), {*start}
    while new:
        found |= new
        new = {below for file in new for below in imports[file]} - found
    return found


def depth(imports: Mapping[str, set[str]]) -> int:
    """How many files the longest chain of imports has."""
    known = dict[str, int]()
    for file in TopologicalSorter(imports).static_order():  # raises CycleError
        known[file] = 1 + max((known[below] for below in imports[file]), default=0)
    return max(known.values())


def methods(house: House, file: str, name: str) -> int:
    """The public methods and properties of a class."""
    (found,) = [
        node
        for node in house.tree[file].body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    own = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    return len({node.name for node in own if not node.name.startswith("_")})


def fields(house: House, name: str) -> Iterator[int]:
    """How many attributes each class with this name in the scheduler's half has."""
    for file in house.text:
        for node in house.tree[file].body if file.startswith(SCHEDULER) else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                own = {
                    one.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Attribute)
                    and isinstance(one.ctx, ast.Store)
                    and ast.unparse(one.value) == "self"
                }
                own |= {
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                }
                yield len(own)


def questions(house: House) -> int:
    """How often the scheduler asks whether a part of it, or of a request's record, is there."""
    return sum(
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Attribute)
        and ast.unparse(node).endswith((" is None", " is not None"))
        for node in ast.walk(house.tree[f"{SCHEDULER}scheduler.py"])
    )


def naming(house: House, tier: str) -> list[str]:
    """The files outside of its folder that name a tier."""
    folder, words = TIERS[tier]
    return [
        file
        for file in house.text
        if f"/{folder}/" not in file and re.search(words, house.text[file])
    ]


def told_to_read(house: House) -> list[str]:
    """The files that DESIGN tells a newcomer to read."""
    text = (house.root / "kvtier/DESIGN.md").read_text(encoding="utf-8")
    paragraph = text.partition("Read in this order")[2].partition("\n\n")[0]
    named = {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", paragraph)}
    rooms = ("kvtier/", "", "connectors/vllm/")
    paths = {f"{room}{name}{end}" for room in rooms for name in named for end in (".py", "/")}
    return [file for file in house.text if file.startswith(tuple(paths))]


def words(house: House, page: str) -> int:
    return len((house.root / page).read_text(encoding="utf-8").split())


def rows(house: House) -> Iterator[Row]:
    """The table."""
    core, imports = house.core, house.imports()
    read, connector = told_to_read(house), reached(imports, CONNECTOR)
    kilobytes = sum(len(house.text[file].encode()) for file in core) // 1000
    prompts = ", ".join(map(str, fields(house, "Prompt"))) or "no such class"
    twice = {name: where for name, where in house.classes().items() if len(where) > 1}
    yield Row("product without extensions, lines / kB", f"{house.lines(core):,} / {kilobytes:,}")
    yield Row("what DESIGN tells a newcomer to read, files / lines", _size(house, read))
    store, index = "kvtier/store/store.py", "kvtier/store/directory.py"
    both = f"{methods(house, store, 'Store')} / {methods(house, index, 'Directory')}"
    yield Row("public methods of Store / Directory", both)
    yield Row("fields of a request's record (Prompt)", prompts)
    yield Row("the scheduler's questions whether a part is there", f"{questions(house)}")
    for tier in TIERS:
        yield Row(
            f"files outside its folder that name the {tier} tier", f"{len(naming(house, tier))}"
        )
    yield Row("what an engine's connector imports, files / lines", _size(house, connector))
    for half, files in (("a worker's", WORKER), ("a scheduler's", STARTED)):
        size = _size(house, reached(imports, CONNECTOR, *files))
        yield Row(f"the same with {half} half", size)
    yield Row("longest chain of imports, files", f"{depth(imports)}")
    yield Row("class names that stand for several things", f"{len(twice)}")
    pages = (f"{words(house, page):,}" for page in ("kvtier/DESIGN.md", "README.md"))
    yield Row("words of DESIGN / README", " / ".join(pages))


def _size(house: House, files: Iterable[str]) -> str:
    files = list(files)
    return f"{len(files):,} / {house.lines(files):,}"


def main() -> None:
    house = House(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    table = [*rows(house)]
    width = max(len(row.what) for row in table)
    sys.stdout.writelines(f"{row.what:<{width}}  {row.value}\n" for row in table)


if __name__ == "__main__":
    main()
