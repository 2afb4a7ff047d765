"""What runs beside a server is found by name: kvtier's own uninstalled, others' by entry point."""

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from kvtier.config.keys import Config
from kvtier.core.errors import ConfigError
from kvtier.extensions.engine_index.follow import FollowedEngines
from kvtier.server import extension as seam

AUDIT = seam.ServerExtension()


@pytest.fixture
def acme(monkeypatch):
    """A package with functions, of which ``beside_server`` is named in its entry point."""
    package = SimpleNamespace(beside_server=lambda config: AUDIT)
    monkeypatch.setitem(sys.modules, "acme", package)
    point = EntryPoint("audit", "acme:beside_server", seam.GROUP)
    monkeypatch.setattr(seam, "entry_points", lambda group: [point] * (group == seam.GROUP))
    return package


def test_our_own_and_a_packages_run_where_they_are_configured(acme):
    assert seam.server_extensions(Config()) == [AUDIT]
    keys = {"admin_token_file": "/token", "admin_engines": "e=tcp://10.0.0.1:5557"}
    followed, *others = seam.server_extensions(Config().with_keys(**keys))
    assert isinstance(followed, FollowedEngines) and others == [AUDIT]
    acme.beside_server = lambda config: None
    assert seam.server_extensions(Config()) == []


def test_a_package_that_cannot_be_used_stops_the_start_in_words(acme):
    del acme.beside_server
    with pytest.raises(ConfigError, match=r"audit \(acme:beside_server\) cannot be used: Attrib"):
        seam.server_extensions(Config())
