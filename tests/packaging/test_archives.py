"""What users install: sdist, a wheel built from that sdist, and an editable install."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvtier import __version__

ROOT = Path(__file__).parents[2]
LINKED = ("connectors", "autoconfig", "bench")
IMPORTS = (
    "import kvtier, kvtier.connectors, kvtier.autoconfig, kvtier.bench; print(kvtier.__file__)"
)


def build(target, source, into):
    """Build one archive with the backend itself: no index, no isolated environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = into.iterdir()
    return archive


INSTALLED_BENCH = {
    *("__init__", "command", "figure", "flags", "long_doc_qa", "model", "multi_turn"),
    *("processes", "queue", "report", "requests", "spans", "traces"),
}
"""The folders and modules of ``bench`` that ``kvtier bench`` needs. All others are the laboratory,
which is in the repository only."""


def laboratory(file):
    """Whether a file of the package is not in the wheel."""
    part = file.removeprefix("kvtier/bench/").partition("/")[0].removesuffix(".py")
    return file.startswith("kvtier/bench/") and part not in INSTALLED_BENCH


def sources():
    """Every file of the package as it must lie in the sdist."""
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvtier").rglob("*.py")}
    linked = {
        f"kvtier/{path.relative_to(ROOT).as_posix()}"
        for name in LINKED
        for path in (ROOT / name).rglob("*.py")
        if "results" not in path.parts
    }
    shown = {"kvtier/admin/page.html", "kvtier/admin/openapi.json"}
    return own | linked | shown | {"kvtier/py.typed", "kvtier/GLOSSARY.md", "kvtier/DESIGN.md"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    unpacked = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(unpacked)], check=True)
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def empty_python(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    return tmp_path / "venv" / "bin" / "python"


def install(python, archive):
    command = [
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(archive),
    ]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, capture_output=True)


def ask(program, cwd):
    return subprocess.run(
        program, cwd=cwd, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_sdist_holds_real_files_and_no_links(sdist):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    inside = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert sources() <= inside
    assert {"LICENSE", "README.md", "pyproject.toml", "Makefile", "examples/own_tier.py"} <= inside


def test_the_wheel_holds_kvtier_and_nothing_beside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
    tops = {name.partition("/")[0] for name in inside}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvtier"}
    expected = {file for file in sources() if not laboratory(file)}
    assert {name for name in inside if name.startswith("kvtier/")} == expected
    assert {"kvtier/bench/compare/__main__.py", "kvtier/bench/demo.py"} <= sources() - expected


def test_every_command_is_in_the_wheel(wheel, tmp_path):
    """With the packages of this Python, and kvtier from the wheel alone."""
    ask([sys.executable, "-m", "zipfile", "-e", str(wheel), "."], tmp_path)
    code = (
        "import importlib, sys; sys.path.insert(0, '.'); from kvtier.cli.main import COMMANDS\n"
        "for command in COMMANDS.values():\n"
        "    print(importlib.import_module('kvtier.' + command.place.partition(':')[0]).__file__)"
    )
    files = ask([sys.executable, "-P", "-c", code], tmp_path).splitlines()
    assert len(files) > 10 and all(file.startswith(str(tmp_path)) for file in files), files


def test_make_wheel_builds_one_that_an_empty_environment_installs_and_runs(empty_python, tmp_path):
    """With this Python in the place of the build's own environment, which would be filled from an
    index."""
    build_env = tmp_path / "build-env" / "bin"
    build_env.mkdir(parents=True)
    (build_env / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (build_env / "hatchling").touch()
    for file in build_env.iterdir():
        file.chmod(0o755)
    dist = tmp_path / "dist"
    made = ["make", "wheel", f"WHEEL={build_env.parent}", f"DIST={dist}"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = dist.iterdir()
    install(empty_python, wheel)
    command = empty_python.with_name("kvtier")
    said = {ask([command, word], tmp_path) for word in ("--version", "version")}
    assert said == {f"kvtier {__version__}"}
    assert ask([empty_python, "-c", IMPORTS], tmp_path).startswith(str(tmp_path))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"./{wheel.name}[vllm]" in readme, "the install section names the file that is built"


def test_no_command_of_the_documents_installs_kvtier_from_an_index():
    """Until it is there, its name on an index is anybody's."""
    for document in [ROOT / "README.md", *(ROOT / "deploy").rglob("*.md")]:
        for block in re.findall(
            r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL
        ):
            assert not re.search(r"pip install [\"']?kvtier\b", block), document


def test_an_editable_install_reads_the_tree(empty_python, tmp_path):
    install(empty_python, build("wheel:editable", ROOT, tmp_path / "editable"))
    assert ask([empty_python, "-c", IMPORTS], tmp_path) == str(ROOT / "kvtier" / "__init__.py")
