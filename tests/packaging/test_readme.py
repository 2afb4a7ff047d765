"""README's commands work: each bash block under a ``<!-- test -->`` line is run, in order, in a
copy of the tree. The pages it leads to are there, and say what results, code and tests say."""

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.bench.readme import PAGES, rewritten
from kvtier.config.keys import KEYS
from tests import marked_tables
from tests.child_process import DEADLINE_S

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- test -->\n+```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        ROOT / "README.md",
        ROOT / ".github/SECURITY.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        *(
            path
            for room in ("kvtier", "connectors", "autoconfig", "bench", "deploy", "examples")
            for path in (ROOT / room).rglob("*.md")
        ),
    ]
)
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", ".*_cache", ".hypothesis", "__pycache__"
)


def blocks():
    return BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    copy = tmp_path_factory.mktemp("readme") / "kvtier"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_COPIED)
    (copy / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.partition("\n")[0][:60])
def test_the_block_runs(block, copied):
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(copied),
    }
    ran = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=copied,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        ran.wait(DEADLINE_S)  # what a block starts may outlive it where it fails
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
    said = ran.communicate()[0]
    assert ran.returncode == 0, f"{block}\n{said[-8000:]}"
    if "replay" in block:
        assert "wrong bytes: 0" in said and re.search(r"^all +396 +76.15 %", said, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_tables_say_what_results_and_code_say(page):
    """Regenerate with ``python -m kvtier.bench.readme``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rewritten(page, text) == text


def anchors(page):
    """The headings of a page, as they stand behind a ``#`` in a link."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in found}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_what_a_page_leads_to_is_there(page):
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)\s]*)\)", path.read_text(encoding="utf-8"))
    for link in links:
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [*DOCUMENTS, "Makefile", ".ci/run"])
def test_the_programs_that_a_page_names_are_there(page):
    """``python -m NAME``, of a checkout's modules. What results say of older ones is history."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"python3? -m ((?:kvtier|tests)(?:\.\w+)*+)(?!\.[.$])", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_readme_leads_to_every_page():
    """In two steps at most."""
    seen = {"README.md"}
    for _ in range(2):
        for page in sorted(seen):
            links = re.findall(r"\]\(([^)\s#:]+)", (ROOT / page).read_text(encoding="utf-8"))
            for target in ((ROOT / page).parent / link for link in links):
                file = target / "README.md" if target.is_dir() else target
                if file.suffix == ".md" and file.exists():
                    seen.add(file.resolve().relative_to(ROOT).as_posix())
    assert set(DOCUMENTS) <= seen


def test_the_frames_of_a_save_and_of_a_load_are_methods_of_their_files():
    rows = re.findall(
        r"^\| ((?:`\w+\.\w+` ?)+) \| `(\S+)` \|",
        (ROOT / "kvtier/DESIGN.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) > 15
    for frames, file in rows:
        classes = {
            node.name: {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef)
        }
        for owner, method in re.findall(r"`(\w+)\.(\w+)`", frames):
            assert method in classes[owner], f"{file} has no {owner}.{method}"


CHAPTERS = [page for page in DOCUMENTS if page.startswith(("kvtier/", "connectors/vllm/"))]
VLLMS_OWN = "connectors/vllm/SPECS.md", "connectors/vllm/MODES.md"
"""They name files of vLLM's source."""


@pytest.mark.parametrize("page", [page for page in CHAPTERS if page not in VLLMS_OWN])
def test_the_files_that_a_chapter_names_are_there(page):
    """As `store/lease` or `lower/`: from the page's folder, or from a top of the tree."""
    text = (ROOT / page).read_text(encoding="utf-8")
    tops = [(ROOT / page).parent, ROOT, ROOT / "kvtier", ROOT / "connectors/vllm"]
    for name in re.findall(r"`(\w+/(?:\w+/)*(?:\w+(?:\.py)?)?)`", text):
        paths = [top / name for top in tops]
        assert any(path.exists() or path.with_suffix(".py").exists() for path in paths), name


@pytest.mark.parametrize("file", ["README.md", "__init__.py"])
def test_the_plug_ins_keys_are_keys(file):
    """LMCache hands them on unread, so a misspelt one would only be refused in an engine."""
    folder = ROOT / "kvtier/extensions/lmcache_remote"
    text = (folder / file).read_text(encoding="utf-8")
    named = set(re.findall(r"remote_storage_plugin\.kvtier\.([\w.]+):", text))
    assert {"module_path", "class_name", "server"} <= named <= {"module_path", "class_name", *KEYS}


MODES = ("V1", "V1 async", "V2", "V2 async")
PROVEN = ("bits", "logprobs", "tokens")


def test_the_modes_name_tests_that_there_are_and_run_in_them():
    """A row of several columns has a test of several cells: pytest's own list says of which."""
    modes = marked_tables.rows("connectors/vllm/MODES.md", "modes")
    assert len(modes) >= 40
    named = {test.strip("`") for *_, test in modes if test.startswith("`")}
    there = cells_of(sorted({name.partition("::")[0] for name in named}))
    for mode, shown, test in modes:
        if not test.startswith("`"):
            assert test.startswith(("not run", "not done", "simulated engines only")), mode
            continue
        runners, _, proof = shown.rpartition(": ")
        assert proof.startswith((*PROVEN, "not run")), mode
        proven = set(runners.split(", ") if runners else MODES)
        file, _, name = test.strip("`").partition("::")
        runs = {one for cell in there[file, name] for one in cell}
        assert proven <= runs or proof == "not run", f"{mode}: {sorted(runs)}"


def cells_of(files):
    """The modes in which pytest runs each test, and each class of tests, of these files."""
    words = ["--collect-only", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *words]
    command += [f"tests/integration/{file}" for file in files]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[tuple[str, str], list[set[str]]] = {}
    for file, names, cell in re.findall(
        r"^tests/integration/(\S+\.py)::([\w:]+)(.*)$", told, re.MULTILINE
    ):
        mode = re.search(r"(V[12])(-async)?\]$", cell)
        modes = {f"{mode[1]}{' async' if mode[2] else ''}"} if mode else set()
        for name in names.split("::"):
            found.setdefault((file, name), []).append(modes)
    return found


def test_the_python_of_the_spans_page_runs():
    """Each python block under a ``<!-- test python -->`` line."""
    text = (ROOT / "kvtier/extensions/spans/README.md").read_text(encoding="utf-8")
    marked = re.compile(r"^<!-- test python -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = marked.findall(text)
    assert found
    for block in found:
        subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True)


TEXT = (Path(__file__).parents[2] / ".github/SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py|tests/[\w/]+)`")
WHOM = (
    "another user of the host", "without the admin token", "beside `server.events`",
    "an engine of the fleet", "with an API key", "without an API key", "hostile or broken bucket",
    "hostile or broken Redis", "a tenant by salt", "a tenant by namespace", "read logs",
)  # fmt: skip


def test_every_attacker_has_a_test():
    table = TEXT[TEXT.index("| who |") :]
    attackers = table[: table.index("\n\n")].splitlines()[2:]
    assert len(attackers) >= 25
    assert not [row for row in attackers if not NAMED.findall(row.rpartition(" | ")[2])]
    whom = [row.split("|")[1] for row in attackers]
    assert [words for words in WHOM if not any(words in one for one in whom)] == []
