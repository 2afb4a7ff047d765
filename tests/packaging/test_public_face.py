"""The names that users may rely on, and what they cost to import."""

import importlib.metadata
import sys
from pathlib import Path

import kvtier
from tests.command import ran

ROOT = Path(__file__).parents[2]

PUBLIC = {
    "ChunkKey",
    "ChunkLayout",
    "Config",
    "ConfigError",
    "KVTierError",
    "LayoutError",
    "LoadLease",
    "Progress",
    "SaveLease",
    "StateError",
    "Store",
    "TierError",
    "__version__",
}
HEAVY = ("numpy", "torch", "redis", "yaml", "asyncio", "vllm", "dataclasses", "logging")


def test_the_public_names_are_exactly_these():
    assert set(kvtier.__all__) == PUBLIC
    assert set(dir(kvtier)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(kvtier, name) is not None
    assert not hasattr(kvtier, "Manager")


def test_import_loads_nothing_heavy():
    code = (
        f"import sys; sys.path.insert(0, '.'); import kvtier; print([m for m in {HEAVY!r} if m "
        "in sys.modules])"
    )
    # -S: what the site directory's .pth files load at every start is not kvtier's.
    told = ran([sys.executable, "-S", "-c", code])
    assert told.stdout.strip() == "[]"


def test_vllm_finds_the_connector_by_its_bare_name():
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvtier")
    assert [point.value for point in points] == ["kvtier.connectors.vllm:register"]


def test_the_installed_version_is_the_sources():
    assert importlib.metadata.version("kvtier") == kvtier.__version__
