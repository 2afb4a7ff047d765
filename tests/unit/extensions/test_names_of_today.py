"""What configurations name of an extension is where they name it, and nothing else is there."""

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.extensions.hint_dialects.middleware import Middleware
from kvtier.tiers.registry import TIERS


def test_vllm_finds_the_middleware_by_its_name():
    door: Any = import_module("kvtier.connectors.vllm.hints")
    assert door.Middleware is Middleware
    with pytest.raises(AttributeError, match="carried"):
        _ = door.carried


def test_lmcache_finds_the_plug_in_by_its_name(monkeypatch):
    """Without LMCache, which the class derives from."""
    place = "kvtier.extensions.lmcache_remote.plugin"
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(KVTier=Middleware))
    door: Any = import_module("kvtier.connectors.lmcache.plugin")
    assert door.KVTier is Middleware
    with pytest.raises(AttributeError, match="settings"):
        _ = door.settings


@pytest.mark.parametrize("name", ["object", "mooncake"])
def test_a_tier_beside_the_core_has_the_section_it_had(name):
    tier = TIERS[name]
    assert (tier.place, tier.origin) == (f"{name}_url", "")
