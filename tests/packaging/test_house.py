"""Rules of the house that no linter knows: sizes, names, and which file may do what."""

import ast
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.packaging.house_table import CONNECTOR, WORKER, here, reached, rows

ROOT = Path(__file__).parents[2]
HOUSE = here()
FUNCTION_LINES = 60
FOLDER_FILES = 16
PACKAGES_DEEP = 9
WORN_FILES = {"utils", "common", "helpers", "manager", "types", "misc", "base_utils"}
WORN_CLASSES = ("Manager", "Engine", "Backend", "Adapter", "Handler", "Controller", "Service",
                "Context", "Util", "Utils")  # fmt: skip
# Bodies of the admin interface have the names that stand in its OpenAPI document, from which others
# have made clients. Two of them are the cache's own words, too.
STAND_TWICE = {"Hint", "Setting"}
# Who may read the environment: one function, and benchmarks that start servers.
ENVIRONMENT = ("kvtier/core/processes.py", "bench/")
# Who may start threads: lanes, what hammers tiers in tests, benchmarks, and a process of its own.
THREADS = (
    "kvtier/core/lanes.py",
    "kvtier/testing.py",
    "kvtier/tiers/away/library_main.py",
    "bench/",
)
# Who may start processes: one file, and the laboratory, which make starts in the checkout.
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
LABORATORY = [path.removeprefix("kvtier/") for path in WHEEL["wheel"]["exclude"]]
PROCESSES = ("kvtier/core/processes.py", *(one for one in LABORATORY if one.startswith("bench/")))
STARTERS = {
    "subprocess": "run Popen call check_call check_output getoutput getstatusoutput",
    "os": "system popen fork forkpty posix_spawn posix_spawnp"
    + "".join(f" {kind}{how}{e}" for kind in ("exec", "spawn") for how in ("l", "lp", "v", "vp")
              for e in ("", "e")),
    "multiprocessing": "Process Pool Manager get_context set_start_method",
    "concurrent.futures": "ProcessPoolExecutor",
    "asyncio": "create_subprocess_exec create_subprocess_shell",
    "pty": "spawn fork",
}  # fmt: skip
# What differs between two of a kind is data on it: nobody asks which of them it is.
KINDS = {"Store", "Client", "KVStore", "SaveLease", "LoadLease", "Pool", "SharedPool"}
READS = {"os.environ", "os.getenv", "os.environb"}
STARTS = {"threading.Thread", "threading.Timer", "futures.ThreadPoolExecutor",
          "_thread.start_new_thread"}  # fmt: skip


def dotted(file):
    """Every ``a.b`` written in a file, and every ``from a import b`` as ``a.b``."""
    names = set()
    for node in ast.walk(HOUSE.tree(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module.rpartition('.')[2]}.{alias.name}" for alias in node.names}
    return names


def test_a_folder_can_be_taken_in_at_a_glance():
    assert {"kvtier/config/load.py", "connectors/__init__.py"} <= set(HOUSE.shipped)
    files = [Path(file) for file in HOUSE.shipped if not file.endswith("__init__.py")]
    rooms = Counter(file.parent for file in files)
    assert {room: files for room, files in rooms.items() if files > FOLDER_FILES} == {}


def test_packages_rest_on_each_other_without_a_cycle_and_nine_deep_at_most():
    """Modules of the root, as ``api``, count for nothing: the chain goes through them."""
    rooms = {path.name for path in (ROOT / "kvtier").iterdir() if (path / "__init__.py").exists()}
    graph, below = grimp.build_graph("kvtier"), dict[str, set[str]]()
    for module in graph.modules - {"kvtier"}:
        room = module.split(".")[1]
        found = graph.find_modules_directly_imported_by(module) - {"kvtier"}
        below.setdefault(room, set()).update({each.split(".")[1] for each in found} - {room})
    depth = dict[str, int]()
    for room in TopologicalSorter(below).static_order():  # raises CycleError
        depth[room] = (room in rooms) + max((depth[each] for each in below[room]), default=0)
    assert max(depth.values()) <= PACKAGES_DEEP, depth


def test_files_import_each_other_without_a_cycle():
    """Only vLLM's connector is imported by its package when somebody asks for its name."""
    graph = grimp.build_graph("kvtier")
    below = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    below["kvtier.connectors.vllm"].discard("kvtier.connectors.vllm.connector")
    TopologicalSorter(below).prepare()  # raises CycleError


def test_budgets_and_names():
    wrong = [file for file in HOUSE.shipped if Path(file).stem in WORN_FILES]
    for file in HOUSE.shipped:
        for node in ast.walk(HOUSE.tree(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                wrong += [f"{file}: {node.name}: {length} lines"] * (length > FUNCTION_LINES)
            elif isinstance(node, ast.ClassDef) and node.name.endswith(WORN_CLASSES):
                wrong.append(f"{file}: {node.name}")
    assert wrong == []


@pytest.mark.parametrize(("names", "may"), [(READS, ENVIRONMENT), (STARTS, THREADS)])
def test_one_function_reads_the_environment_and_only_lanes_start_threads(names, may):
    assert [
        file for file in HOUSE.shipped if not file.startswith(may) and dotted(file) & names
    ] == []


def starters(source):
    """Every way to start a process that a file names, whatever it calls the module."""
    modules = {name.rpartition(".")[2]: name for name in STARTERS}
    only_types = set[int]()
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            own = STARTERS.get(node.module.removesuffix(".subprocess"), "").split()
            yield from (f"{node.module}.{one.name}" for one in node.names if one.name in own)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            only_types |= {id(inside) for inside in ast.walk(part)} if part is not None else set()
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and id(node) not in only_types:
            module = modules.get(ast.unparse(node.value), "")
            if node.attr in STARTERS.get(module, "").split():
                yield f"{module}.{node.attr}"


def test_one_file_starts_processes():
    """So none of them finds anything in the working folder (tests/unit/cli/test_working_folder)."""
    others = [file for file in HOUSE.shipped if not file.startswith(PROCESSES)]
    found = {file: [*starters(HOUSE.tree(file))] for file in others}
    assert {file: ways for file, ways in found.items() if ways} == {}


def test_nobody_asks_for_the_type_of_a_store_a_lease_or_a_pool():
    for file in HOUSE.shipped:
        for node in ast.walk(HOUSE.tree(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                assert not names & KINDS, f"{file}:{node.lineno}"


def test_a_class_name_stands_for_one_thing():
    found = {name: files for name, files in HOUSE.classes().items() if len(files) > 1}
    assert {name: files for name, files in found.items() if name not in STAND_TWICE} == {}
    assert set(found) == STAND_TWICE, "what was mended leaves the list"


def test_a_process_of_an_engine_imports_its_own_half_alone():
    """One that serves metrics has the connector and no half. A worker needs no store."""
    imports = HOUSE.imports()
    store, blocks = "kvtier/store/store.py", "kvtier/gpu/blocks.py"
    assert not reached(imports, CONNECTOR) & {store, blocks, "kvtier/client/client.py"}
    worker = reached(imports, CONNECTOR, *WORKER)
    assert store not in worker and blocks in worker


def test_the_table_of_the_house_has_a_number_in_each_row():
    table = dict(rows(HOUSE))
    assert len(table) == 12 and all(value > 0 for value in table.values())
