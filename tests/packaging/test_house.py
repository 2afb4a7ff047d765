"""Rules of the house that no linter knows: sizes, names, and which file may do what."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.packaging.house_table import CONNECTOR, WORKER, House, reached, rows

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("kvtier", "connectors", "autoconfig", "bench")
    for path in (ROOT / folder).rglob("*.py")
)
FUNCTION_LINES = 60
FOLDER_FILES = 16
PACKAGES_DEEP = 9
WORN_FILES = {"utils", "common", "helpers", "manager", "types", "misc", "base_utils"}
WORN_CLASSES = (
    "Manager",
    "Engine",
    "Backend",
    "Adapter",
    "Handler",
    "Controller",
    "Service",
    "Context",
    "Util",
    "Utils",
)
# Bodies of the admin interface have the names that stand in its OpenAPI document, from which others
# have made clients. Two of them are the cache's own words, too.
STAND_TWICE = {"Hint", "Setting"}
# Who may read the environment: one function, and benchmarks that start servers.
ENVIRONMENT = ("kvtier/core/processes.py", "bench/")
# Who may start threads: lanes, what hammers tiers in tests, benchmarks, and a process of its own.
THREADS = (
    "kvtier/core/lanes.py",
    "kvtier/testing/",
    "kvtier/tiers/away/library_main.py",
    "bench/",
)
# Who may start processes: one file, and the laboratory, which make starts in the checkout.
PROCESSES = "kvtier/core/processes.py"
LABORATORY = tuple(
    f"{path.removeprefix('kvtier/')}"
    for path in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]["exclude"]
    if path.startswith("kvtier/bench/")
)
STARTERS = {
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput"}
    | {"getstatusoutput"},
    "os": {"system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp"}
    | {f"{kind}{how}" for kind in ("exec", "spawn") for how in ("l", "le", "lp", "lpe")}
    | {f"{kind}{how}" for kind in ("exec", "spawn") for how in ("v", "ve", "vp", "vpe")},
    "multiprocessing": {"Process", "Pool", "Manager", "get_context", "set_start_method"},
    "concurrent.futures": {"ProcessPoolExecutor"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "pty": {"spawn", "fork"},
}
# What differs between two of a kind is data on it: nobody asks which of them it is.
KINDS = {"Store", "Client", "KVStore", "SaveLease", "LoadLease", "Pool", "SharedPool"}
READS = {"os.environ", "os.getenv", "os.environb"}
STARTS = {
    "threading.Thread",
    "threading.Timer",
    "futures.ThreadPoolExecutor",
    "_thread.start_new_thread",
}


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def dotted(file: str) -> set[str]:
    """Every ``a.b`` written in a file, and every ``from a import b`` as ``a.b``."""
    names = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module.rpartition('.')[2]}.{alias.name}" for alias in node.names}
    return names


def test_the_files_are_found() -> None:
    assert {"kvtier/config/load.py", "connectors/__init__.py", "bench/report.py"} <= set(FILES)


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    rooms = Counter(Path(file).parent for file in FILES if Path(file).name != "__init__.py")
    assert {room: files for room, files in rooms.items() if files > FOLDER_FILES} == {}


def test_packages_rest_on_each_other_without_a_cycle_and_nine_deep_at_most() -> None:
    """``api``, ``assemble`` and ``selftest`` are modules of the root: the chain goes through them,
    and they count for nothing."""
    rooms = {path.name for path in (ROOT / "kvtier").iterdir() if (path / "__init__.py").exists()}
    graph, below = grimp.build_graph("kvtier"), dict[str, set[str]]()
    for module in graph.modules - {"kvtier"}:
        room = module.split(".")[1]
        reached = graph.find_modules_directly_imported_by(module) - {"kvtier"}
        below.setdefault(room, set()).update({each.split(".")[1] for each in reached} - {room})
    depth = dict[str, int]()
    for room in TopologicalSorter(below).static_order():  # raises CycleError
        depth[room] = (room in rooms) + max((depth[each] for each in below[room]), default=0)
    assert max(depth.values()) <= PACKAGES_DEEP, depth


def test_files_import_each_other_without_a_cycle() -> None:
    """Only vLLM's connector is imported by its package when somebody asks for its name."""
    graph = grimp.build_graph("kvtier")
    below = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    below["kvtier.connectors.vllm"].discard("kvtier.connectors.vllm.connector")
    TopologicalSorter(below).prepare()  # raises CycleError


@pytest.mark.parametrize("file", FILES)
def test_budgets_and_names(file: str) -> None:
    assert Path(file).stem not in WORN_FILES
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{file}: {node.name} has {length} lines"
        elif isinstance(node, ast.ClassDef):
            assert not node.name.endswith(WORN_CLASSES), f"{file}: {node.name}"


@pytest.mark.parametrize("file", FILES)
def test_one_function_reads_the_environment_and_only_lanes_start_threads(file: str) -> None:
    if not file.startswith(ENVIRONMENT):
        assert not dotted(file) & READS
    if not file.startswith(THREADS):
        assert not dotted(file) & STARTS


def starters(source: ast.Module) -> list[str]:
    """Every way to start a process that a file names, whatever it calls the module."""
    modules = {name.rpartition(".")[2]: name for name in STARTERS}
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            own = STARTERS.get(node.module.removesuffix(".subprocess"), set())
            found += [f"{node.module}.{one.name}" for one in node.names if one.name in own]
    types = [
        part
        for node in ast.walk(source)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
    ]
    only_types = {id(inside) for part in types for inside in ast.walk(part)}
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and id(node) not in only_types:
            module = modules.get(ast.unparse(node.value), "")
            if node.attr in STARTERS.get(module, ()):
                found.append(f"{module}.{node.attr}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_one_file_starts_processes(file: str) -> None:
    """So none of them finds anything in the working folder (tests/unit/cli/test_working_folder)."""
    if file != PROCESSES and not file.startswith(LABORATORY):
        assert starters(tree(file)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess as s; s.run([])",
        "from subprocess import Popen as P; P([])",
        "import os; os.execvpe('a', [], {})",
        "from os import posix_spawn",
        "import multiprocessing as m; m.get_context('spawn')",
        "from concurrent import futures; futures.ProcessPoolExecutor()",
        "from concurrent.futures import ProcessPoolExecutor",
        "import asyncio; asyncio.create_subprocess_exec('a')",
        "run = subprocess.check_output",
        "partial(subprocess.Popen, [])",
    ],
)
def test_every_way_to_start_a_process_is_seen(code: str) -> None:
    assert starters(ast.parse(code))


@pytest.mark.parametrize("file", FILES)
def test_nobody_asks_for_the_type_of_a_store_a_lease_or_a_pool(file: str) -> None:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            assert not names & KINDS, f"{file}:{node.lineno}"


def test_a_class_name_stands_for_one_thing() -> None:
    found = {name: files for name, files in House(ROOT).classes().items() if len(files) > 1}
    assert {name: files for name, files in found.items() if name not in STAND_TWICE} == {}
    assert set(found) == STAND_TWICE, "what was mended leaves the list"


def test_a_process_of_an_engine_imports_its_own_half_alone() -> None:
    """One that serves metrics has the connector and no half. A worker needs no store."""
    imports = House(ROOT).imports()
    store, blocks = "kvtier/store/store.py", "kvtier/gpu/blocks.py"
    assert not reached(imports, CONNECTOR) & {store, blocks, "kvtier/client/client.py"}
    worker = reached(imports, CONNECTOR, *WORKER)
    assert store not in worker and blocks in worker


def test_the_table_of_the_house_has_a_number_in_each_row() -> None:
    """``python -m tests.packaging.house_table`` prints it."""
    table = dict(rows(House(ROOT)))
    assert len(table) == 13
    assert {what: value for what, value in table.items() if not value[0].isdigit()} == {}
