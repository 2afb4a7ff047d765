"""kill -9 of servers and engines at random moments under load, with real NVMe files and a real
Redis.

``python -m tests.trust.crash [--kills 240] [--seed 0]`` prints one object of JSON.

Two places are under load at once: a server (RAM, NVMe, Redis) with two engines attached, and an
engine with a store of its own (RAM, NVMe, Redis), with 1, 2 or 5 unequal disks each. All tiers are
smaller than what is saved, so that at any moment something is being written, deleted, spilled and
promoted. A turn kills a server, an engine, all engines of a server, or the engine with a store of
its own. Then, every time:

- Every record in the NVMe files is whole, and its payload is what the key stands for, byte by byte.
  After a server's death all files are read while nobody has them, and ``kvtier check`` must agree.
- The next server says in its log how many chunks it found on each disk after a stop without close,
  and it is that number.
- Engines that lived on miss, and hit again by themselves. Each compares every byte it is served, at
  all times.

At a rest (all engines dead): no slot is filling or pinned, no descriptor of the dead is left
in the server, and every prompt is loaded and compared. An own store that is opened
again holds exactly what the files held and serves all that it claims. At the end both places are
closed: nothing is left but the tiers' own files and the socket's lock, and in Redis no chunk lacks
a part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier.assemble import assemble
from kvtier.config.keys import Config
from kvtier.core.chunk import PAGE_BYTES, fingerprint
from kvtier.started import Started
from kvtier.store.store import Store
from kvtier.testing import content
from kvtier.tiers.nvme.check import check
from kvtier.tiers.nvme.folder import INDEX_NAME, SLOTS_NAME
from kvtier.tiers.nvme.index import RECORD_BYTES, read_records
from kvtier.tiers.redis.layout import Form
from tests.child_process import wait_for
from tests.engine_process import LONGEST, PROMPTS
from tests.nvme_place import ONE, SETS, section
from tests.redis_server import RedisServer
from tests.server_process import (
    LAYOUT,
    SLOT,
    ServerProcess,
    at_rest,
    attached,
    load,
    run,
    short_folder,
)
from tests.trust.victims import Engine

TIGHT = 400 << 10
"""Of a tier: fewer chunks than are saved."""
MOST_LETTERS = 80
"""An engine says so many in a few milliseconds."""
SPACES = {"served": fingerprint({"server": SLOT}), "alone": LAYOUT.fingerprint}
"""The places, and what their chunks' names in Redis begin with."""
MOMENTS = ("save", "evict")
_MORE_DESCRIPTORS = 6
"""Connections to Redis that a server may have opened since we first looked, and the looker's
own."""


@dataclass
class Toll:
    """What a campaign did and saw."""

    kills: Counter[str] = field(default_factory=Counter)
    recovered: Counter[str] = field(default_factory=Counter)
    """Chunks found again, by place."""
    restarts: int = 0
    seeds: int = 0
    violations: list[str] = field(default_factory=list)


def on_disk(folder):
    """Keys of the records in a tier's files that nobody has open. AssertionError if one of them is
    not whole."""
    table = (folder / INDEX_NAME).read_bytes()[PAGE_BYTES:]
    records = read_records(memoryview(table), len(table) // RECORD_BYTES, SLOT)
    assert not records.damaged, f"{records.damaged} records are torn"
    with (folder / SLOTS_NAME).open("rb") as payloads:
        for key, slot in zip(records.keys, np.asarray(records.slots).tolist(), strict=True):
            payloads.seek(slot * SLOT)
            assert payloads.read(SLOT) == content(key, SLOT), (
                f"slot {slot} is not what its record says"
            )
    assert len(set(records.keys)) == len(records.keys), "two records of one key"
    return set(records.keys)


def each_disk(folder):
    """Each folder of a tier in ``folder``, and its keys."""
    return {index.parent: on_disk(index.parent) for index in folder.rglob(INDEX_NAME)}


def settings(folder, redis, moment="save", disks=ONE):
    """Configuration keys of a place. ``moment``: when chunks are written to NVMe."""
    writes = {"nvme_write_limit": 1 << 50} if moment == "evict" else {}
    return (
        writes
        | section(folder, disks)
        | {
            "ram_bytes": 24 * SLOT,
            "redis_url": f"unix://{redis.path}",
            "redis_bytes": TIGHT,
            "admin": "off",
        }
    )


class Served:
    """A server and two engines."""

    def __init__(self, folder, redis, draw, toll):
        self.folder, self.draw, self.toll = folder, draw, toll
        config = settings(folder, redis, draw.choice(MOMENTS), draw.choice(SETS))
        self.server = ServerProcess(folder, **config)
        self.server.start()
        self.engines = [self._engine() for _ in range(2)]
        self.open_files = 0

    def strike(self):
        (blow,) = self.draw.choices(
            (self.kill_server, self.kill_engine, self.kill_engines), (5, 4, 1)
        )
        for engine in self.engines:
            engine.hear_until(self.draw.choice((b"h", b"s", b"c")))
        self.draw.choice(self.engines).hear(self.draw.randint(1, MOST_LETTERS))
        blow()

    def kill_server(self):
        self.server.kill()
        self.toll.kills["server"] += 1
        held = each_disk(self.folder)
        for files, keys in held.items():
            report = check(files)
            found = (report.good, report.corrupt, report.damaged, report.stale)
            assert found == (len(keys), 0, 0, 0), str(report)
        said = len(self.server.said())
        self.server.start()
        for engine in self.engines:
            engine.hear_until(b"h")
        for files, keys in held.items():
            line = f"{len(keys)} chunks found after a stop without close, 0 records damaged"
            assert not keys or f"{files}: {line}" in self.server.said()[said:], f"not said: {line}"
            self.toll.recovered["server"] += len(keys)
        self.toll.restarts += 1

    def kill_engine(self):
        which = self.draw.randrange(len(self.engines))
        self.engines[which].kill()
        self.toll.kills["engine of a server"] += 1
        self.engines[which] = self._engine()
        with attached(self.server.access()) as client:
            client.check()

    def kill_engines(self):
        """And look what is left of them."""
        for engine in self.engines:
            engine.kill()
            self.toll.kills["engine of a server"] += 1
        with attached(self.server.access()) as client:
            at_rest(client)
            counts = client.stats()
            assert (counts["ram_filling"], counts["ram_pinned"]) == (0, 0), str(counts)
            for prompt in range(PROMPTS):
                load(client, run(prompt, LONGEST))
        opened = descriptors(self.server.pid)
        assert len({inode for inode, name in opened if "memfd" in name}) == 1, (
            "the server keeps memory of the dead"
        )
        self.open_files = self.open_files or len(opened)
        assert len(opened) <= self.open_files + _MORE_DESCRIPTORS, (
            f"descriptors are left in the server: {opened}"
        )
        self.engines = [self._engine() for _ in range(2)]

    def end(self):
        self.kill_engines()
        for engine in self.engines:
            engine.kill()
        with attached(self.server.access()) as client:
            at_rest(client)
        assert self.server.stop() == 0, self.server.said()
        left = {"server.log", "run/kvtier.sock.lock"} | tiers_files(self.folder)
        assert files_in(self.folder) == left, f"left: {files_in(self.folder)}"

    def abandon(self):
        """After a violation."""
        for kill in [engine.kill for engine in self.engines] + [self.server.kill]:
            with suppress(AssertionError, OSError, ValueError):
                kill()

    def _engine(self):
        return Engine(self.server.socket, self.draw.randrange(1 << 30))


class Alone:
    """An engine with a store of its own."""

    def __init__(self, folder, redis, draw, toll):
        self.folder, self.redis, self.draw, self.toll = folder, redis, draw, toll
        self.config = settings(folder, redis, draw.choice(MOMENTS), draw.choice(SETS))
        self.engine = self._engine()

    def strike(self):
        """Kill it. Open its store and compare everything every other time."""
        self.engine.hear_until(self.draw.choice((b"h", b"s", b"c")))
        self.engine.hear(self.draw.randint(1, MOST_LETTERS))
        self.engine.kill()
        self.toll.kills["engine with a store"] += 1
        held = sum(map(len, each_disk(self.folder).values()))
        self.toll.recovered["engine with a store"] += held
        if self.draw.random() < 0.5:
            self._open_and_compare(held)
        self.toll.restarts += 1
        self.engine = self._engine()

    def end(self):
        self.engine.kill()
        self._open_and_compare(sum(map(len, each_disk(self.folder).values())))
        assert files_in(self.folder) == tiers_files(self.folder), str(files_in(self.folder))

    def abandon(self):
        """After a violation."""
        with suppress(AssertionError, OSError):
            self.engine.kill()

    def _open_and_compare(self, held):
        with self.redis.admin() as admin:
            wait_for(
                lambda: admin.info("clients")["connected_clients"] == 1,
                "Redis has done all that the dead asked",
            )
        store = assemble(Started(Config().with_keys(**self.config)), LAYOUT)
        assert isinstance(store, Store)
        try:
            assert store.stats()["nvme_held"] == held
            for prompt in range(PROMPTS):
                keys = run(prompt, LONGEST)
                claimed = sum(store.lookup(keys).progress)
                served = len(load(store, keys))
                assert served >= claimed, f"{served} served of {claimed} claimed"
            counts = store.stats()
            missed = {name: count for name, count in counts.items() if name.endswith("_missed")}
            assert not any(missed.values()), f"what was found is not there: {missed}"
            at_rest(store)
        finally:
            closed = store.close()
        assert closed, "the store did not close"

    def _engine(self):
        return Engine(self.config, self.draw.randrange(1 << 30))


def descriptors(pid):
    """Inode and name of all that a process has open."""
    folder, opened = Path(f"/proc/{pid}/fd"), []
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):
            opened.append((os.stat(folder / number).st_ino, os.readlink(folder / number)))
    return opened


def files_in(folder):
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir()}


def tiers_files(folder):
    names = (INDEX_NAME, SLOTS_NAME)
    return {f"{each.relative_to(folder)}/{name}" for each in each_disk(folder) for name in names}


def redis_is_whole(redis, form):
    """Every chunk that has a header has all its parts, and they are what its key stands for."""
    with redis.admin() as admin:
        headers = [
            key for key, is_header in filter(None, map(form.parse, admin.scan_iter())) if is_header
        ]
        assert headers, "Redis holds nothing"
        for key in headers:
            parts = admin.mget(form.part_names(key, SLOT))
            assert b"".join(part or b"" for part in parts) == content(key, SLOT), (
                "a chunk in Redis is torn"
            )


def campaign(folder, servers, seed, kills, toll):
    """Until ``kills`` more have died, or a promise was broken. Each place has a Redis of its
    own."""
    draw, wanted, places = random.Random(seed), toll.kills.total() + kills, list[Served | Alone]()
    try:
        for name in SPACES:
            (folder / name).mkdir()
        places.append(Served(folder / "served", servers[0], draw, toll))
        places.append(Alone(folder / "alone", servers[1], draw, toll))
        while toll.kills.total() < wanted:
            draw.choices(places, (2, 1))[0].strike()
        for place in places:
            place.end()
        for space, redis in zip(SPACES.values(), servers, strict=True):
            redis_is_whole(redis, Form("kvtier", space[:8]))
    except Exception as error:  # noqa: BLE001 - whatever broke is the campaign's result
        toll.violations.append(
            f"seed {seed}, kill {toll.kills.total()}: {type(error).__name__}: {error}"
        )
        for place in places:
            place.abandon()


def many(kills, seed=0, at_once=60, told=lambda text: None):
    """Campaigns of ``at_once`` kills, each in a folder of its own and on a Redis of its own."""
    toll = Toll()
    for turn in range(-(-kills // at_once)):
        with ExitStack() as stack:
            folder, servers = (
                stack.enter_context(short_folder()),
                [stack.enter_context(RedisServer()) for _ in SPACES],
            )
            campaign(folder, servers, seed + turn, min(at_once, kills - turn * at_once), toll)
            toll.seeds += 1
        told(f"{toll.kills.total()} killed, {len(toll.violations)} violations")
    return toll


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun = time.monotonic()
    toll = many(given.kills, given.seed, told=lambda text: sys.stderr.write(text + "\n"))
    result = {
        "kills": toll.kills.total(),
        "seeds": toll.seeds,
        "by_kind": dict(toll.kills),
        "restarts": toll.restarts,
        "chunks_recovered": dict(toll.recovered),
        "seconds": round(time.monotonic() - begun, 1),
        "violations": toll.violations,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return bool(toll.violations)


if __name__ == "__main__":
    sys.exit(main())
