"""A stand-in for ``vllm serve`` on one of two hosts, which ``kvtier launch`` becomes. It takes
kvtier's configuration from its environment, as an engine does.

``--node-rank 0`` saves a prompt's chunks if no host has them, loads them, and tells where its part
of them came from. The other one joins its host's server as a worker does. Both end when their
standard input does. ``STANDIN_FOLDER``: where the first one's message to the other lies.
"""

import json
import os
import sys
from contextlib import closing
from pathlib import Path

from kvtier.assemble import assemble_hosts
from kvtier.client.attachment import FarPool
from kvtier.client.connect import Address, join
from kvtier.client.hosts import HostsPool
from kvtier.config.load import load
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.started import Started
from tests.child_process import DEADLINE_S, wait_for
from tests.server_process import run

SLOTS = 8192, 16384
"""Bytes of a chunk's part on each host."""
LAYOUTS = [
    ChunkLayout(fingerprint({"host": host}), 1, 1, (size,)) for host, size in enumerate(SLOTS)
]
KEYS = run(1, 4, LAYOUTS[0])


def lead(ticket):
    """The first host: the scheduler, and a worker."""
    with closing(assemble_hosts(Started(load()), LAYOUTS, [set(), set()])) as hosts:
        wait_for(lambda: hosts.pool is not None, "both servers are there")
        pool = hosts.pool
        assert isinstance(pool, HostsPool) and isinstance(pool.pools[1], FarPool)
        ticket.with_suffix(".new").write_bytes(pool.pools[1].ticket)
        ticket.with_suffix(".new").rename(ticket)
        wait_for(lambda: not ticket.exists(), "the other host's worker has joined")
        known = hosts.lookup(KEYS).known
        if not known:
            with hosts.save(KEYS) as saved:
                assert len(saved.keys) == len(KEYS)
                saved.commit()
            hosts.stats()  # a commit has no answer, and this one comes after it
        with hosts.load(KEYS) as lease:
            wait_for(lambda: lease.poll().coming == 0, "nothing is coming any more")
            told = {"known": known, "ready": lease.ready, "sources": sorted(set(lease.sources))}
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()
    sys.stdin.read()


def follow(ticket):
    wait_for(ticket.exists, "the first host has told")
    welcomed = join(
        Address.parse(load().server.addresses[0]), None, ticket.read_bytes(), DEADLINE_S
    )
    assert welcomed.welcome.slot_bytes == SLOTS[1]
    ticket.unlink()
    sys.stdin.read()


def main():
    ticket = Path(os.environ["STANDIN_FOLDER"]) / "ticket"
    words = sys.argv[1:]
    assert words[0] == "serve" and "--kv-transfer-config" in words
    if words[words.index("--node-rank") + 1] == "0":
        lead(ticket)
    else:
        assert "--headless" in words
        follow(ticket)
