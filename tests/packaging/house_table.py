"""The size of the house: ``python -m tests.packaging.house_table [ROOT] [--beside]``. No limit: a
change shows in it. ``--beside``: the last landed commit's numbers are in a second column."""

import ast
import functools
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("kvtier", "connectors", "autoconfig")
SMALL_LINES = 60
CONNECTOR = "connectors/vllm/connector.py"
WORKER = ("connectors/vllm/worker_side/worker.py", "connectors/vllm/worker_side/loaded.py")
SCHEDULER = "connectors/vllm/scheduler_side/scheduler.py"


class House:
    """A checkout's Python files, each read and parsed once."""

    def __init__(self, root=ROOT):
        self.root = root
        self.text = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for folder in (*PRODUCT, "bench", "tests")  # rglob follows no links, as kvtier/bench is
            for path in sorted((root / folder).rglob("*.py"))
        }
        self.product = [file for file in self.text if file.startswith(PRODUCT)]
        self.shipped = [file for file in self.text if not file.startswith("tests/")]
        self.tree = functools.lru_cache(None)(lambda file: ast.parse(self.text[file]))

    def lines(self, *folders):
        return sum(text.count("\n") for file, text in self.text.items() if file.startswith(folders))

    def classes(self):
        """The name of each class that users of its module see -> the files that define it."""
        found = defaultdict[str, list[str]](list)
        for file in self.product:
            for node in self.tree(file).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(file)
        return found

    def one(self, file, name):
        return next(
            node
            for node in self.tree(file).body
            if isinstance(node, ast.ClassDef) and node.name == name
        )

    def imports(self):
        """The files that are imported when a file is, by file."""
        modules = {_module(file): file for file in self.product}
        return {
            file: {modules[name] for name in _imported(self.tree(file).body, modules)} - {file}
            for file in self.product
        }


@functools.cache
def here():
    return House()


def _module(file):
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "kvtier" else ["kvtier", *parts])


def _imported(body, modules):
    """What runs when the module is: nothing inside of functions, nothing for type checkers."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found = (name if name in modules else node.module for name in names)
            yield from (name for name in found if name in modules)
        elif isinstance(node, ast.Try):
            yield from _imported([*node.body, *node.orelse, *node.finalbody], modules)


def reached(imports, *start):
    """``start`` and all files that they import, directly or not."""
    found, new = set[str](), {*start}
    while new:
        found |= new
        new = {below for file in new for below in imports[file]} - found
    return found


def _fields(node):
    return len(
        {
            one.attr
            for one in ast.walk(node)
            if isinstance(one, ast.Attribute)
            and isinstance(one.ctx, ast.Store)
            and ast.unparse(one.value) == "self"
        }
    )


def rows(house):
    product, tests = house.lines(*PRODUCT), house.lines("tests/")
    mutants = house.root / "tests/trust/mutants.txt"
    tests += mutants.read_text(encoding="utf-8").count("\n") if mutants.exists() else 0
    pages = [*house.root.glob("*.md"), *house.root.glob(".github/*.md")]
    for folder in (*PRODUCT, "bench", "deploy", "examples", "tests"):
        pages += (house.root / folder).rglob("*.md")
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in pages}
    yield "product, lines", product
    yield "product, files", len(house.product)
    small = [file for file in house.product if house.text[file].count("\n") <= SMALL_LINES]
    yield f"product, files of at most {SMALL_LINES} lines", len(small)
    yield "tests, lines", tests
    yield "tests, lines a line of product", round(tests / product, 2)
    yield "bench, lines", house.lines("bench/")
    yield "pages, words", sum(words.values())
    yield "README, words", words[house.root / "README.md"]
    yield "WorkerHalf, fields", _fields(house.one(WORKER[0], "WorkerHalf"))
    half = house.one(SCHEDULER, "SchedulerHalf")
    yield "SchedulerHalf, lines", (half.end_lineno or 0) - half.lineno + 1
    own = house.one("kvtier/store/directory.py", "Directory").body
    public = {one.name for one in own if isinstance(one, ast.FunctionDef) and one.name[0] != "_"}
    yield "Directory, public methods", len(public)
    nodes = (node for file in house.product for node in ast.walk(house.tree(file)))
    config = [node for node in nodes if isinstance(node, ast.arg) and node.annotation]
    whole = [node for node in config if ast.unparse(node.annotation or node) == "Config"]
    yield "parameters that are the whole Config", len(whole)


def _landed():
    """The table of the commit before this one, or of this one where the checkout has changes."""
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode
    command = ["git", "archive", "HEAD" if changed else "HEAD~1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        return {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
        file.write(done.stdout)
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(folder, filter="tar")
        try:
            return dict(rows(House(Path(folder))))
        except (OSError, StopIteration):  # a file or a class that has moved since
            return {}


def main(words):
    roots = [Path(word) for word in words if word != "--beside"]
    before = _landed() if "--beside" in words else {}
    for what, value in rows(House(roots[0]) if roots else here()):
        old = f"  (before: {before[what]:,})" if before.get(what, value) != value else ""
        sys.stdout.write(f"{what:<42}{value:>9,}{old}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
