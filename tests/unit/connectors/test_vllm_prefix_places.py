"""The connector's table of places at which vLLM turns prefix caching off or restricts it: every
place in the source of every vLLM that is here has a row, and every row names its test. And
HOOKS.md, whose rows are all of vLLM's hooks."""

import ast
import functools
import re
from collections import Counter

import pytest

from tests import marked_tables
from tests.conftest import ROOT, vllm_source, vllm_versions

SWITCHES = ("enable_prefix_caching", "skip_reading_prefix_cache")
"""Whoever writes one of these decides for an engine, or for a request."""
ANSWERS = ("is_prefix_caching_supported", "prefix_cacheable")
"""And whoever answers one of these: for a model, or for a cache group."""


def places(tree, inside=()):
    """The functions that decide, as ``Class.function``."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", None) if hasattr(node, "body") else None
        if name in ANSWERS or any(word in SWITCHES for word in _written(node)):
            yield ".".join((*inside, name) if name in ANSWERS else inside)
        yield from places(node, (*inside, name) if name else inside)


def _written(node):
    """Names of the attributes that a statement or a call writes."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        each = [one for target in targets for one in ast.walk(target)]
        return [one.attr for one in each if isinstance(one, ast.Attribute)]
    if not isinstance(node, ast.Call):
        return []
    named = [one.arg or "" for one in node.keywords if not isinstance(one.value, ast.Attribute)]
    is_set = isinstance(node.func, ast.Name) and node.func.id == "setattr"
    return named + [str(one.value) for one in node.args if is_set and isinstance(one, ast.Constant)]


@functools.cache
def found(version):
    """How often each ``file::Class.function`` decides in this version's source."""
    package = vllm_source(version) / "vllm"
    told = Counter[str]()
    for file in package.rglob("*.py"):
        where, text = file.relative_to(package).as_posix(), file.read_text(encoding="utf-8")
        is_engine = not where.startswith("benchmarks/")
        if is_engine and any(word in text for word in (*SWITCHES, *ANSWERS)):
            told.update(f"{where}::{name}" for name in places(ast.parse(text)))
    return told


def rows():
    return marked_tables.rows("connectors/vllm/MODES.md", "prefixes")


def listed():
    """``x 2`` behind a place: it decides twice."""
    told = Counter[str]()
    for row in rows():
        for place, times in re.findall(r"`([\w/]+\.py::[\w.]+)`(?: x (\d))?", row[0]):
            told[place] = int(times or 1)
    return told


@pytest.mark.vllm
@pytest.mark.parametrize("version", sorted(vllm_versions()))
def test_every_place_that_turns_prefix_caching_off_has_a_row(version):
    assert len(found(version)) >= 9, "the names have changed, so that nothing is found"
    assert not found(version) - listed()


@pytest.mark.vllm
def test_every_row_is_of_a_vllm_that_is_supported():
    if len(vllm_versions()) < 2:
        pytest.skip("a place may be an older vLLM's, and none is here")
    assert set(listed()) <= {place for version in vllm_versions() for place in found(version)}


def test_every_row_names_tests_that_there_are():
    assert len(rows()) > 5
    for row in rows():
        tests = re.findall(r"`(\w+\.py)::(\w+)`", row[-1])
        assert tests, row
        for file, name in tests:
            (path,) = (ROOT / "tests").rglob(file)
            assert re.search(rf"^ *def {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE)


BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"


def hooks(version):
    tree = ast.parse((vllm_source(version) / BASE).read_text(encoding="utf-8"))
    (base,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "KVConnectorBase_V1"
    )
    return {
        node.name
        for node in base.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


@pytest.mark.vllm
@pytest.mark.parametrize("version", sorted(vllm_versions()))
def test_every_hook_of_vllms_has_a_row(version):
    page = (ROOT / "connectors/vllm/HOOKS.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert hooks(version) <= told
