"""``python -m tests.trust.skew``: how far two hosts of one engine drift apart. Real servers, each
with what its own workers have of every chunk, are asked the same prompts; what only one of them has
in the end cannot be loaded, and takes room until it leaves.

A line of JSON a case. ``hits``: chunks loaded of those asked for in the second half. ``both`` and
``first alone``, ``second alone``: chunks that these hosts have at the end.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from kvtier.assemble import assemble_hosts
from kvtier.bench.processes.servers import free_port
from kvtier.client.hosts import Hosts
from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import NO_LOOKUP
from kvtier.started import Started
from tests.child_process import wait_for
from tests.integration.test_server_hosts import INSECURE, LAYOUTS, Two, joined, load, save
from tests.server_process import SLOT, ServerProcess, attached, short_folder

REQUESTS, DOCUMENTS, TURN = 600, 40, 3
"""Documents are asked by rank: the second half as often as the first. Each time with a few chunks
that nothing else has."""
_DISK = 256


class Case(NamedTuple):
    """``slots``: chunks in RAM, of each host. ``disk``: whether there is one, of 256 chunks."""

    slots: tuple[int, int]
    disk: bool = False
    lost: bool = False
    """The second host's disk and RAM are lost at the start of the second half."""


CASES = {
    "RAM": Case((96, 96)),
    "RAM, one a quarter smaller": Case((96, 72)),
    "RAM, both a quarter smaller": Case((72, 72)),
    "RAM and disk": Case((32, 32), disk=True),
    "RAM and disk, one host's lost": Case((32, 32), disk=True, lost=True),
}


def prompts(requests: int) -> Iterator[list[ChunkKey]]:
    """The same ones each time."""
    draw = random.Random(7)
    weights = [1 / (1 + rank) for rank in range(DOCUMENTS)]
    for number in range(requests):
        (document,) = draw.choices(range(DOCUMENTS), weights)
        tokens = [document, *range(4 + document % 8)]
        yield LAYOUTS[0].keys([*tokens, *(1_000 + number * TURN + at for at in range(TURN))])


def servers(stack: ExitStack, case: Case) -> Two:
    port, made = free_port(), []
    for slots, words in zip(case.slots, ((), (f"tcp://127.0.0.1:{port}",)), strict=True):
        folder = stack.enter_context(short_folder())
        more: dict[str, Any] = {"ram_bytes": slots * SLOT}
        if case.disk:
            more |= {"nvme_path": folder / "nvme", "nvme_bytes": _DISK * SLOT}
        made.append(ServerProcess(folder, *words, flags=INSECURE if words else (), **more))
    return Two([stack.enter_context(one) for one in made], port)


def lose(two: Two, hosts: Hosts) -> None:
    """The second host comes back with nothing."""
    server = two.servers[1]
    server.kill()
    assert hosts.lookup(LAYOUTS[0].keys([0])) == NO_LOOKUP
    shutil.rmtree(server.socket.parents[1] / "nvme")
    server.start()
    wait_for(lambda: hosts.pool is not None, "both are there")


def had(two: Two, host: int, hosts: Hosts, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
    """Which of the chunks this host has."""
    with attached(two.servers[host].access(LAYOUTS[host])) as client:
        return {
            key
            for key, own in zip(keys, hosts._keys(keys, host), strict=True)
            if client.lookup([own]).known
        }


def measured(case: Case) -> dict[str, object]:
    """What becomes of a case."""
    asked, loaded = [0, 0], [0, 0]
    every: dict[ChunkKey, None] = {}
    with ExitStack() as stack:
        two = servers(stack, case)
        config = two.config(server_timeout_ms=60_000)
        hosts = assemble_hosts(Started(config), LAYOUTS, [set(), set()])
        stack.callback(hosts.close)
        far = joined(two, hosts.pool)
        for number, keys in enumerate(prompts(REQUESTS)):
            late = number >= REQUESTS // 2
            if case.lost and number == REQUESTS // 2:
                far.close()
                lose(two, hosts)
                far = joined(two, hosts.pool)
            asked[late] += len(keys)
            loaded[late] += load(hosts, far, keys)
            save(hosts, far, keys)
            every |= dict.fromkeys(keys)
        first, second = (had(two, host, hosts, [*every]) for host in range(2))
        far.close()
    return {
        "hits": round(loaded[True] / asked[True], 3),
        "both": len(first & second),
        "first alone": len(first - second),
        "second alone": len(second - first),
    }


def main() -> None:
    """See the module's text."""
    for name, case in CASES.items():
        sys.stdout.write(f"{json.dumps({'case': name} | measured(case))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
