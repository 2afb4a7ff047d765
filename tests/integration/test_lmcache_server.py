"""What LMCache's connector asks of a server, over both transports. Needs no LMCache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.chunk import ChunkKey
from kvtier.extensions.lmcache_remote import packing
from kvtier.extensions.lmcache_remote.cache_server import Attached, CacheServer, Streamed
from kvtier.testing.check_tier import content
from tests.child_process import DEADLINE_S, wait_for
from tests.server_process import LAYOUT, SLOT, ServerProcess, attached, serving, short_folder

pytestmark = pytest.mark.usefixtures("patient")


def run(prompt: int, length: int) -> list[ChunkKey]:
    return [packing.chunk_key(LAYOUT.fingerprint, prompt, place) for place in range(length)]


@contextmanager
def place(
    transport: str, slots: int = 32, **settings: Any
) -> Iterator[tuple[CacheServer, ServerProcess]]:
    port = free_port()
    with serving(
        f"tcp://127.0.0.1:{port}", flags=("--insecure",), ram_bytes=slots * SLOT, **settings
    ) as server:
        if transport == "unix":
            cache_server: CacheServer = Attached(server.access(), DEADLINE_S, DEADLINE_S)
        else:
            own = hello(LAYOUT.fingerprint, SLOT, stream=True)
            cache_server = Streamed(ServerAccess(Address("", "127.0.0.1", port), own), DEADLINE_S)
        with closing(cache_server):
            yield cache_server, server


def save(cache_server: CacheServer, keys: list[ChunkKey]) -> int:
    def fill(at: int, slot: memoryview) -> bool:
        slot[:] = content(keys[at], SLOT)
        return True

    return cache_server.save(keys, fill)


def load(cache_server: CacheServer, keys: list[ChunkKey], most: int = 1000) -> list[int]:
    """Which chunks came, in order. Every byte is compared."""
    taken: list[int] = []

    def take(at: int, slot: memoryview) -> bool:
        assert slot == content(keys[at], SLOT)
        taken.append(at)
        return len(taken) < most

    cache_server.load(keys, take)
    return taken


BOTH = pytest.mark.parametrize("transport", ["unix", "tcp"])


@BOTH
def test_what_was_saved_is_found_and_loaded_in_order(transport: str) -> None:
    with place(transport) as (cache_server, _):
        keys = run(1, 6)
        assert (cache_server.find(keys), load(cache_server, keys)) == (0, [])
        assert save(cache_server, keys[:4]) == 4
        wait_for(lambda: cache_server.find(keys) == 4, "held")
        assert save(cache_server, keys[:4]) == 0
        assert load(cache_server, keys) == [0, 1, 2, 3]
        assert load(cache_server, keys, most=2) == [0, 1]
        cache_server.invalidate(keys[1:2])
        wait_for(lambda: cache_server.find(keys) == 1, "forgotten")
        assert load(cache_server, keys) == [0]


@BOTH
def test_the_end_of_a_run_leaves_before_its_beginning(transport: str) -> None:
    with place(transport, slots=12) as (cache_server, _):
        old, new = run(1, 4), run(2, 4)
        save(cache_server, old)
        save(cache_server, new)
        assert load(cache_server, new) == load(cache_server, old) == [0, 1, 2, 3]
        assert save(cache_server, run(3, 6)) == 6
        wait_for(lambda: cache_server.find(run(3, 6)) == 6, "held")
        assert (cache_server.find(new), cache_server.find(old)) == (2, 4)


def test_a_run_larger_than_the_servers_memory_is_loaded_from_its_disk() -> None:
    keys = run(1, 24)
    with (
        short_folder() as folder,
        place("unix", 8, nvme_path=folder / "nvme", nvme_bytes=1 << 20) as (cache_server, server),
        attached(server.access()) as client,
    ):
        for first in range(0, len(keys), 4):
            save(cache_server, keys[first : first + 4])
            wait_for(lambda held=first + 4: client.stats().get("nvme_stored") == held, "on disk")  # type: ignore[misc]
        assert cache_server.find(keys) == len(keys)
        assert load(cache_server, keys) == [*range(len(keys))]


@BOTH
def test_without_a_server_nothing_is_found_saved_or_loaded(transport: str) -> None:
    with place(transport) as (cache_server, server):
        save(cache_server, run(1, 3))
        server.kill()
        assert (
            cache_server.find(run(1, 3)),
            save(cache_server, run(2, 3)),
            load(cache_server, run(1, 3)),
        ) == (
            0,
            0,
            [],
        )
        cache_server.invalidate(run(1, 3))
