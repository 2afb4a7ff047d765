"""A tier that kvtier does not know: one file for each chunk, in a folder. It is what a package of
somebody else's has, and no test imports it: it is found by its entry point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.fact import known
from kvtier.core.tenant import UNOWNED
from kvtier.tiers.base import Tier
from kvtier.tiers.seam import NO_URL, Finding, Opened, TierFacts, TierSection, key, then_tried


@dataclass(frozen=True, kw_only=True)
class AcmeSection(TierSection):
    name = "acme"
    title = "Acme's shelf"
    latency_s = 0.004

    shelf: str | None = key(
        "folder",
        "Acme's shelf; none: no such tier",
        planned="given",
        flag="Acme's shelf for the shared tier",
    )
    bytes_: int | None = key("bytes", "our share of the shelf; none: 1 GiB", needs="shelf")
    label: str = key("name", "what Acme calls us", "kvtier")

    def decided(self):
        return {"bytes_": self.bytes_ or 1 << 30}


SECTION = AcmeSection


class AcmeTier(Tier):
    name = "acme"
    shared = True

    def __init__(self, folder, capacity):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.capacity = folder, capacity

    def recovered(self):
        return [ChunkKey(bytes.fromhex(path.name)) for path in self._folder.iterdir()]

    def write(self, key, data, owner=UNOWNED):
        part = self._folder / f"{key.hex()}.part"
        part.write_bytes(xxhash.xxh3_128_digest(data) + bytes(data))
        part.rename(self._folder / key.hex())
        return True

    def read(self, key, into):
        try:
            content = (self._folder / key.hex()).read_bytes()
        except FileNotFoundError:
            return False
        if content[:16] != xxhash.xxh3_128_digest(content[16:]):
            return False
        into[:] = content[16:]
        return True

    def find(self, keys):
        held = [(self._folder / key.hex()).exists() for key in keys]
        return held.index(False) if False in held else len(keys)

    def delete(self, key):
        (self._folder / key.hex()).unlink(missing_ok=True)

    def close(self, coldest_first=()):
        """Nothing is open."""


def open(own, around):
    if own.label == "raises":
        raise RuntimeError("the shelf is upside down")
    room = (own.bytes_ or 1 << 30) // around.chunk_bytes
    folder = Path(str(own.shelf)) / own.label / around.namespace.hex()
    return Opened(AcmeTier(folder, room), 2, said="Acme's shelf is open")


def away(own):
    if not Path(str(own.shelf)).is_dir():
        raise ConfigError(f"acme_shelf={own.shelf}: no such shelf; buy one")
    return ""


@dataclass(frozen=True)
class _Shelf(TierFacts):
    path: str


def probe(own):
    return _Shelf(str(own.shelf))


def findings(own, tried):
    found = Finding("acme", "ok", f"{own.shelf} stands")
    small = replace(own, bytes_=1 << 23)
    yield from then_tried([found], tried, small, "ask Acme")


def plan(found, draft):
    if found is None:
        return draft.leave_out(NO_URL)
    if draft.pays(known(1e12, "Acme says so")):
        draft.set("acme_shelf", found.path, "given", "it stands here")
    return None
