"""Save in one process, load and compare in another: what ``kvtier doctor`` does with every
configured tier.

``python -m kvtier.selftest SIDE`` reads a :class:`Trial` from its standard input and prints what
went wrong. Nothing when all is well. Its chunks have keys of their own and are forgotten
afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import msgspec

from kvtier.api import KVStore
from kvtier.assemble import assemble, open_tier
from kvtier.config.keys import KEYS, Config
from kvtier.config.load import ENCRYPTION_KEY
from kvtier.core import processes
from kvtier.core.chunk import ChunkKey, ChunkLayout, fingerprint
from kvtier.core.errors import KVTierError
from kvtier.core.lookup import Asker
from kvtier.core.pool import Pool
from kvtier.core.processes import environment
from kvtier.started import Started
from kvtier.testing import content
from kvtier.tiers.registry import RegisteredTier
from kvtier.tiers.seam import TierSection

SLOT_BYTES = 1 << 20
CHUNKS = 3
_RAM_BYTES = 2 * CHUNKS * SLOT_BYTES
_SIDE_S = 20.0
"""Longest time of one process, its start included: the tiers have shorter limits of their own."""
_MOVE_S = 5.0
_POLL_S = 0.005


class Trial(msgspec.Struct, frozen=True):
    """Trial of one place. ``settings``: a Config's keys. ``place``: the tier's name, or the path of
    a pool to map. ``name`` makes the keys this trial's own."""

    name: str
    place: str
    slot_bytes: int
    settings: dict[str, Any]

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout(fingerprint({"selftest": self.name}), 1, 1, (self.slot_bytes,))

    @property
    def keys(self) -> list[ChunkKey]:
        return self.layout.keys(range(CHUNKS))


def trial(place: str, config: Config, slot_bytes: int = SLOT_BYTES) -> Trial:
    name = f"{os.getpid()} {time.time_ns()}"
    return Trial(name, place, slot_bytes, {key: config.value(key) for key in KEYS})


# ---- the doctor's side: each returns a fault in words, or "" -------------------------------------


def try_ram() -> str:
    """Have slots mapped and compared by another process, as a worker does."""
    try:
        pool = Pool(CHUNKS, SLOT_BYTES)
    except KVTierError as error:
        return str(error)
    one = trial(pool.path, Config())
    for slot, key in enumerate(one.keys):
        pool.view(slot)[:] = content(key, SLOT_BYTES)
    try:
        return run("map", one)
    finally:
        pool.close()


def try_tier(config: Config, tier: RegisteredTier, own: TierSection) -> str:
    """Try one tier. A store that other hosts share keeps nothing of the trial."""
    alone = _alone(config).with_sections({tier.name: own})
    one = trial(tier.name, alone)
    try:
        return there_and_back(one)
    finally:
        if own.shared:
            with (
                suppress(KVTierError),
                closing(open_tier(Started(alone), tier, own, one.layout)) as opened,
            ):
                for key in one.keys:
                    opened.delete(key)


def try_server(config: Config, address: str, slot_bytes: int) -> str:
    own = _alone(config).with_keys(
        server=address, server_timeout_ms=2000, ram_bytes=2 * CHUNKS * slot_bytes
    )
    place = "ram" if address.startswith("unix:") else "remote"
    return there_and_back(trial(place, own, slot_bytes))


def there_and_back(one: Trial) -> str:
    return run("save", one) or run("load", one)


def run(side: str, one: Trial) -> str:
    env = environment()
    # a map needs the pool alone; a tier may be sealed, and have credentials of its own
    kept = (ENCRYPTION_KEY,)
    env = processes.chosen(env) if side == "map" else processes.without_settings(env, *kept)
    try:
        done = processes.run(
            processes.python(sys.executable, "-m", "kvtier.selftest", side),
            env,
            input=msgspec.json.encode(one),
            capture_output=True,
            timeout=_SIDE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{side}: no end within {_SIDE_S:.0f} s"
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode == 0 and not said:
        return ""
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"{side}: {said or ' '.join(last) or f'ended with status {done.returncode}'}"


def _alone(config: Config) -> Config:
    return Config(
        engine=replace(config.engine, auto=False, record=None),
        ram=replace(config.ram, bytes_=_RAM_BYTES),
        server=replace(config.server, address=None, namespace_percent=None),
    )


# ---- the two processes ---------------------------------------------------------------------------


def save(one: Trial) -> str:
    with _opened(one) as store:
        with store.save(one.keys) as lease:
            if list(lease.keys) != one.keys:
                return f"room for {len(lease.keys)} of {CHUNKS} chunks"
            for key, view in zip(lease.keys, lease.views(), strict=True):
                view[: one.slot_bytes] = content(key, one.slot_bytes)
            lease.commit()
        if one.place == "ram":
            return (
                ""
                if _within(lambda: store.lookup(one.keys).ready == CHUNKS)
                else "saved, but not found again"
            )
        if not _within(lambda: _stored(store, one.place) >= CHUNKS):
            return f"{_stored(store, one.place)} of {CHUNKS} chunks written within {_MOVE_S:.0f} s"
    return ""


def load(one: Trial) -> str:
    with _opened(one) as store:
        # as a prompt that came before: it is not recorded, and nothing learns from it
        with store.load(one.keys, asker=Asker(again=True)) as lease:
            _within(lambda: lease.poll().coming == 0)
            views, sources = lease.views(), lease.sources
            same = [
                view == content(key, one.slot_bytes)
                for key, view in zip(one.keys, views, strict=False)
            ]
            del views
        store.invalidate(one.keys)
        if not all(same):
            return f"{same.count(False)} of {CHUNKS} chunks came back with other bytes"
        if len(same) < CHUNKS:
            return f"{len(same)} of {CHUNKS} chunks came back"
        if one.place != "ram" and set(sources) != {one.place}:
            return f"chunks came from {', '.join(sources)} instead of {one.place}"
    return ""


def mapped(one: Trial) -> str:
    pool = Pool.attach(one.place, CHUNKS, SLOT_BYTES)
    wrong = sum(pool.view(slot) != content(key, SLOT_BYTES) for slot, key in enumerate(one.keys))
    pool.close()
    return f"{wrong} of {CHUNKS} slots have other bytes here" if wrong else ""


def _opened(one: Trial) -> closing[KVStore]:
    return closing(assemble(Started(Config().with_keys(**one.settings)), one.layout))


def _stored(store: KVStore, place: str) -> int:
    return int(store.stats().get(f"{place}_stored", 0))


def _within(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + _MOVE_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


SIDES: dict[str, Callable[[Trial], str]] = {"save": save, "load": load, "map": mapped}


def main() -> int:
    one = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    try:
        said = SIDES[sys.argv[1]](one)
    except (KVTierError, OSError) as error:
        said = str(error)
    sys.stdout.write(said)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
