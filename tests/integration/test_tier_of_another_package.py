"""A tier of a package that kvtier does not know, found by its entry point in a real installation's
files: configured, planned, examined and served as kvtier's own are. One that is broken is one error
in words."""

import json
import os
import sys

import pytest

from tests.command import ROOT, bare, kvtier, ran

SOURCE = ROOT / "tests/strangers/acme_tier.py"
BROKEN = {
    "cannot be imported": ("acme", "import nothing_of_that_name", "ModuleNotFoundError"),
    "raises as it is imported": ("acme", "1 / 0", "ZeroDivisionError"),
    "has no section": ("acme", "SECTION = None", "it has no SECTION that is a subclass of"),
    "lacks a function": ("acme", "{source}\ndel plan, away", "it has no function away, plan"),
    "has another name": ("other", "{source}", "its SECTION is named 'acme'; expected 'other'"),
    "takes a tier's section": ("redis", "{source}", "the section has that name already"),
    "takes a section of ours": ("server", "{source}", "the section has that name already"),
    "takes a key of ours": (
        "log",
        """{source}
@dataclass(frozen=True, kw_only=True)
class SECTION(TierSection):
    name, title, latency_s = 'log', 'Log', 1.0
    level: str | None = key('name', 'a name')
""",
        "its key log_level is kvtier's own",
    ),
    "has a key of a wrong unit": (
        "acme",
        """{source}
@dataclass(frozen=True, kw_only=True)
class SECTION(TierSection):
    name, title, latency_s = 'acme', 'Acme', 1.0
    shelf: str | None = key('parsecs', 'far')
""",
        "its key acme_shelf has the unit 'parsecs'; expected",
    ),
}


def installed(folder, name="acme", source="{source}"):
    """An environment in which a package with such a tier is installed."""
    packages = folder / "site"
    packages.mkdir()
    text = source.replace("{source}", SOURCE.read_text(encoding="utf-8"))
    (packages / "acme_tier.py").write_text(text, encoding="utf-8")
    metadata = packages / "acme_tier-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tier\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[kvtier.tiers]\n{name} = acme_tier\n")
    return {"PYTHONPATH": os.pathsep.join((str(packages), str(ROOT)))}


def rows(env, *words):
    said = kvtier("config", "--json", *words, env=env)
    assert said.returncode == 0, said.stderr
    return {row["key"]: row for row in json.loads(said.stdout)}


def test_it_is_configured_by_a_file_a_variable_and_a_flag(tmp_path):
    env = installed(tmp_path)
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"acme: {{shelf: {tmp_path}, bytes: 2GiB, label: of-the-file}}\n")
    env["KVTIER_ACME_LABEL"] = "of-the-variable"
    found = rows(env, "--config", str(file), "--acme-bytes", "3GiB")
    assert {key: found[key]["value"] for key in found if key.startswith("acme")} == {
        "acme_shelf": str(tmp_path),
        "acme_bytes": 3 << 30,
        "acme_label": "of-the-variable",
    }
    assert [row["path"] for row in found.values() if str(row["key"]).startswith("acme")] == [
        "acme.shelf",
        "acme.bytes",
        "acme.label",
    ]
    assert rows(env, "--acme-shelf", str(tmp_path))["acme_bytes"]["effective"] == 1 << 30
    file.write_text("acme: {shelve: /x}\n")
    said = kvtier("config", "--config", str(file), env=env)
    assert "unknown key 'acme.shelve'" in said.stderr and "'acme.shelf'" in said.stderr
    said = kvtier("config", "--acme-bytes", "1GiB", env=env)
    assert "acme_bytes=1073741824 has no effect without acme_shelf" in said.stderr


def test_it_is_planned(tmp_path):
    env = installed(tmp_path)
    said = kvtier(
        "plan", "--no-measure", "--json", "--ram", "64GiB", "--acme", str(tmp_path), env=env
    )
    assert said.returncode == 0, said.stderr
    plan = json.loads(said.stdout)
    assert plan["values"]["acme_shelf"] == str(tmp_path)
    assert "acme_break_even_tokens" in {row["key"] for row in plan["derived"]}
    plan = json.loads(kvtier("plan", "--no-measure", "--json", "--ram", "64GiB", env=env).stdout)
    assert {"tier": "acme", "reason": "no URL was given"} in plan["left_out"]


def test_it_is_examined_and_nothing_of_the_trial_stays(tmp_path):
    env, shelf = installed(tmp_path), tmp_path / "shelf"
    said = kvtier("doctor", "--no-engine", "--json", "--acme-shelf", str(shelf), env=env)
    found = {each["check"]: each for each in json.loads(said.stdout)["findings"]}
    assert found["acme"]["seen"] == f"{shelf} stands"
    assert found["self-test acme"]["state"] == "ok", found["self-test acme"]
    assert [path for path in shelf.rglob("*") if path.is_file()] == []


SERVED = """
from contextlib import closing
import sys, time
from kvtier.assemble import assemble
from kvtier.config.keys import places
from kvtier.config.load import load
from kvtier.core.chunk import ChunkLayout
from kvtier.protocol.kv_events import where
from kvtier.tiers.registry import is_shared
from kvtier.started import Started

config = load(env={}, flags={"acme_shelf": sys.argv[1], "ram_bytes": "64KiB"})
assert places(config) == ["ram", "acme"]
assert where(1, "acme", shared=is_shared("acme"))["locality"] == "REMOTE"
layout = ChunkLayout(bytes(32), 1, 1, (4096,))
keys = layout.keys(range(4))
with closing(assemble(Started(config), layout)) as store:
    if sys.argv[2] == "save":
        with store.save(keys) as lease:
            for view in lease.views():
                view[:] = bytes([7]) * 4096
            lease.commit()
        while store.stats()["acme_stored"] < 4:
            time.sleep(0.01)
    else:
        with store.load(keys) as lease:
            while lease.poll().coming:
                time.sleep(0.01)
            assert [bytes(view) == bytes([7]) * 4096 for view in lease.views()] == [True] * 4
            assert set(lease.sources) == {"acme"}
"""


def test_what_one_process_saved_there_another_one_loads(tmp_path):
    env = installed(tmp_path)
    for side in ("save", "load"):
        done = ran([sys.executable, "-c", SERVED, str(tmp_path / "shelf"), side], bare(**env))
        assert done.returncode == 0, done.stderr


def test_a_server_does_not_start_where_it_says_that_waiting_repairs_nothing(tmp_path):
    words = ["serve", "--listen", f"unix://{tmp_path}/kvtier.sock", "--admin", "off"]
    said = kvtier(*words, "--acme-shelf", tmp_path / "none", env=installed(tmp_path))
    assert said.returncode != 0
    assert f"acme_shelf={tmp_path}/none: no such shelf; buy one" in said.stderr


@pytest.mark.parametrize("fault", BROKEN)
def test_one_that_is_broken_is_one_error_in_words(tmp_path, fault):
    name, source, words = BROKEN[fault]
    said = kvtier("config", env=installed(tmp_path, name, source))
    assert said.returncode == 2, said
    (line,) = said.stderr.strip().splitlines()
    assert f"the package acme-tier (entry point {name} = acme_tier) cannot be used" in line
    assert words in line and line.endswith("repair or uninstall it")
