"""What users install: sdist, a wheel built from that sdist, and an editable install."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("connectors", "autoconfig", "bench")
IMPORTS = "import kvtier, kvtier.connectors, kvtier.autoconfig, kvtier.bench; print(kvtier.__file__)"


def build(target: str, source: Path, into: Path) -> Path:
    """Build one archive with the backend itself: no index, no isolated environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = into.iterdir()
    return archive


def sources() -> set[str]:
    """Every Python file of the package as it must lie in an archive."""
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvtier").rglob("*.py")}
    linked = {
        f"kvtier/{path.relative_to(ROOT).as_posix()}"
        for name in LINKED
        for path in (ROOT / name).rglob("*.py")
        if "results" not in path.parts
    }
    return own | linked | {"kvtier/py.typed"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(unpacked)], check=True)
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def empty_python(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv" / "bin" / "python"


def install(python: Path, archive: Path) -> None:
    command = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(archive)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, capture_output=True)


def ask(program: list[str | Path], cwd: Path) -> str:
    return subprocess.run(program, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def test_the_sdist_holds_real_files_and_no_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    inside = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert sources() <= inside
    assert {"LICENSE", "README.md", "pyproject.toml", "Makefile", "requirements/vllm.txt"} <= inside


def test_the_wheel_holds_kvtier_and_nothing_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
    tops = {name.partition("/")[0] for name in inside}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvtier"}
    assert {name for name in inside if name.startswith("kvtier/")} == sources()


def test_the_wheel_works_in_an_empty_environment(wheel: Path, empty_python: Path, tmp_path: Path) -> None:
    install(empty_python, wheel)
    assert ask([empty_python, "-c", IMPORTS], tmp_path).startswith(str(tmp_path))
    assert ask([empty_python.with_name("kvtier"), "version"], tmp_path).startswith("kvtier ")


def test_an_editable_install_reads_the_tree(empty_python: Path, tmp_path: Path) -> None:
    install(empty_python, build("wheel:editable", ROOT, tmp_path / "editable"))
    assert ask([empty_python, "-c", IMPORTS], tmp_path) == str(ROOT / "kvtier" / "__init__.py")
