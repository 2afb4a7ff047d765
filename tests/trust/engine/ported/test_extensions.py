"""An extension of another package in a simulated engine: it is found by its entry point, gets its
own keys, and sees a request from its arrival to its end."""

import sys

import pytest

from kvtier.core.errors import ConfigError
from tests.trust.engine.cells import CHUNK
from tests.trust.engine.ported.prompts import PROMPT

pytestmark = pytest.mark.vllm

AUDIT = """
from kvtier.connectors.vllm.extension import Extension


class Audit(Extension):
    def __init__(self, keys, tools):
        self.name, self.seen = keys["name"], []

    def new(self, request, named):
        self.seen.append(("new", request.request_id))

    def asked(self, prompt, keys):
        self.seen.append(("asked", prompt.request.request_id))

    def answered(self, prompt, places, tokens):
        self.seen.append(("answered", tokens, *places))

    def saving(self, prompt, saved, computed, pieces):
        self.seen.append(("saving", saved, computed, len(pieces)))

    def ended(self, job, *, last_of):
        self.seen.append(("ended", "load" if job.load else "save", job.failed))

    def finished(self, prompt, *, saving):
        self.seen.append(("finished", prompt.request.request_id))
        return {"audit.name": self.name}

    def counts(self):
        return {"hooks": len(self.seen)}


class Broken(Audit):
    def asked(self, prompt, keys):
        raise ValueError("a hook that fails")


def nothing(keys, tools):
    return keys
"""
POINTS = """
[kvtier.vllm_extensions]
audit = kvtier_audit:Audit
broken = kvtier_audit:Broken
nothing = kvtier_audit:nothing
absent = kvtier_audit:Absent
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A distribution that is installed beside kvtier."""
    (tmp_path / "kvtier_audit.py").write_text(AUDIT, encoding="utf-8")
    told = tmp_path / "kvtier_audit-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Name: kvtier-audit\nVersion: 1.0\n", encoding="utf-8")
    (told / "entry_points.txt").write_text(POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("kvtier_audit", None)


def with_extension(make, named):
    return make(config={"extensions": named})


def test_it_gets_its_keys_and_sees_a_requests_life(make):
    engine = with_extension(make, {"audit": {"name": "mine"}})
    (audit,) = (each._own for each in engine.half.extensions if hasattr(each, "_own"))
    engine.keep(PROMPT)
    (cold, *_), seen = engine.asked, audit.seen
    chunks = len(PROMPT) // CHUNK
    assert seen[:3] == [("new", cold), ("asked", cold), ("answered", 0)]
    assert sum(what[3] for what in seen if what[0] == "saving") == chunks
    assert ("ended", "save", 0) in seen and seen.index(("finished", cold)) > 3
    assert engine.half.counts()["extension_audit_hooks"] == len(seen)
    seen.clear()
    warm = engine.answer(PROMPT)
    loaded = sum(engine.loaded(warm))
    assert seen[:3] == [("new", warm), ("asked", warm), ("answered", loaded, *["ram"] * chunks)]
    assert ("ended", "load", 0) in seen
    assert seen[-1] == ("finished", warm)


def test_what_it_says_of_a_request_is_in_the_answer(make):
    engine = with_extension(make, {"audit": {"name": "mine"}})
    name = engine.ask(PROMPT)
    engine.step()
    request = engine.asked[name]
    assert engine.half.finished(request) == {"audit.name": "mine"}


def test_what_is_installed_and_not_named_is_not_even_imported(make):
    make().answer(PROMPT)
    assert "kvtier_audit" not in sys.modules


def test_one_whose_hook_fails_is_told_once_and_is_off(make, caplog):
    engine = with_extension(make, {"broken": {"name": "mine"}})
    for _ in range(2):
        engine.keep(PROMPT)
    assert caplog.text.count("extension broken: its asked failed") == 1
    assert "a hook that fails" in caplog.text
    assert engine.half.counts().keys().isdisjoint({"extension_broken_hooks"})


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"audit": {}}, "extensions.audit .*kvtier_audit:Audit cannot be made .*KeyError: 'name'"),
        ({"audit": "mine"}, "extensions.audit='mine' .*expected a mapping of its keys"),
        ({"unheard": {}}, r"extensions.unheard .*which has \['absent', 'audit', .*install"),
        ({"absent": {}}, "extensions.absent .*kvtier_audit:Absent cannot be made"),
        ({"nothing": {}}, "extensions.nothing .*gave a dict, expected a kvtier.*Extension"),
        (["audit"], r"extensions=\['audit'\] .*expected the keys of each extension by its name"),
    ],
    ids=["lacks a key", "no keys", "not installed", "no such class", "no extension", "a list"],
)
def test_a_broken_one_is_one_error_in_words(make, named, words):
    with pytest.raises(ConfigError, match=words):
        with_extension(make, named)
