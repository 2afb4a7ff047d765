"""A server as the caches of other engines' own use it: answers by key, saves in parts, bounded
calls. One by shared memory and one by TCP have to do the same."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.core.chunk import fingerprint
from kvtier.core.errors import ConfigError
from kvtier.core.lanes import Lane
from kvtier.extensions.cache_server import connect, load_each, settings, tenant, within
from kvtier.testing import content
from tests.server_process import LAYOUT, ServerProcess, run, short_folder

SLOTS = 32


@pytest.fixture(scope="module")
def addresses():
    tcp = f"tcp://127.0.0.1:{free_port()}"
    with (
        short_folder() as folder,
        ServerProcess(folder, tcp, flags=("--insecure",), nvme_path=folder / "nvme") as server,
    ):
        yield server, str(server.address), tcp


@pytest.fixture(params=["shared memory", "tcp"])
def server(request, addresses):
    address = addresses[1 if request.param == "shared memory" else 2]
    found = connect(settings({"server": address, "server_timeout_ms": 5000}), LAYOUT)
    yield found
    found.close()


def later(seconds=60.0):
    return time.monotonic() + seconds


def test_each_chunk_is_answered_for_and_a_gap_hides_nothing_behind_it(server):
    keys = run(1, 12)
    assert server.known(keys) == [False] * 12

    def fill(place, slot):
        slot[:] = content(keys[place], len(slot))
        return True

    assert server.save(keys, lambda at, slot: False, later()) == [False] * 12
    assert server.known(keys) == [False] * 12
    assert server.save([*keys[:5], *keys[6:]], lambda at, slot: fill(at + (at > 4), slot), later())
    assert server.known(keys) == [place != 5 for place in range(12)]
    assert server.find(keys) == 5
    got = dict[int, bytes]()

    def take(place, slot):
        got[place] = bytes(slot)
        return place != 8

    assert load_each(server, keys, take, later()) == [place not in {5, 8} for place in range(12)]
    assert all(data == content(keys[place], len(data)) for place, data in got.items())
    server.invalidate(keys)


def test_a_run_of_twice_the_ram_is_saved_and_loaded_in_parts(server):
    keys = run(2, 2 * SLOTS)

    def fill(place, slot):
        slot[:] = content(keys[place], len(slot))
        return True

    assert server.save(keys, fill, later()) == [True] * len(keys)
    seen = list[int]()

    def take(place, slot):
        seen.append(place)
        return slot == content(keys[place], len(slot))

    def half(first):
        run = slice(first, first + SLOTS)
        return load_each(server, keys[run], lambda at, slot: take(first + at, slot), later())

    with ThreadPoolExecutor(2) as both:
        loaded = [one for found in both.map(half, (0, SLOTS)) for one in found]
    assert loaded == [True] * len(keys), "each waits for RAM that the other has"
    server.invalidate(keys)


def test_a_server_that_hangs_gives_nothing_and_no_call_waits_for_it(addresses):
    process, address, _ = addresses
    hanging = connect(settings({"server": address, "server_timeout_ms": 50}), LAYOUT)
    keys = run(3, 4)
    with process.paused():
        begun = time.monotonic()
        assert hanging.find(keys) == 0
        assert hanging.known(keys) == [False] * 4
        assert hanging.save(keys, lambda at, slot: True, later(0.2)) == [False] * 4
        assert load_each(hanging, keys, lambda at, slot: True, later(0.2)) == [False] * 4
        assert time.monotonic() - begun < 30, "each call has its bound"
    hanging.close()


def test_a_call_ends_in_time_and_raises_nothing(caplog):
    lane, counts, hold = Lane("test", 1, urgent_bound=0, bound=4), Counter[str](), threading.Event()
    call = partial(within, lane, counts)
    assert call(lambda: 1, 0, 30.0) == 1
    assert call(lambda: 1 // 0, -1, 30.0) == -1 and "ZeroDivisionError" in caplog.text
    assert call(lambda: hold.wait() and 1, -1, 0.01) == -1
    assert [call(lambda: 1, -1, 0.0) for _ in range(9)] == [-1] * 9, "the last have no room"
    assert counts == {"failed_calls": 1, "late_calls": 5}
    hold.set()
    lane.close(5.0)
    assert call(lambda: 1, -1, 30.0) == -1, "closed"


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "p.server is missing in its file"), ({"server": "unix:///x", "ram": 1}, "key p.ram in")],
)
def test_a_wrong_key_is_refused_by_its_name(given, words):
    with pytest.raises(ConfigError, match=words):
        settings(given, "p.", "its file")


def test_a_namespace_is_part_of_the_keys():
    """The server keeps chunks by key alone."""
    one, other = (
        fingerprint({"model": "a"} | tenant(settings({"server": "unix:///x"} | given)))
        for given in ({}, {"namespace": "team"})
    )
    assert one == fingerprint({"model": "a"}) and one != other
