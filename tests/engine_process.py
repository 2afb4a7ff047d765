"""Stand-ins for engines, to be killed.

:func:`churn` saves and loads random prompts for ever, as an engine's scheduler and worker would,
and compares every byte it is served. A wrong byte ends it with status 3. It tells what it does, a
letter each: ``h`` load of at least one chunk, ``m`` load of none, ``s`` in the middle of a save,
``c`` commit.

``python -m tests.engine_process hold SOCKET`` begins a save, starts a worker process of its own,
which writes rubbish into the reserved slots for ever, and does not come to an end. It prints the
worker's process id once that writes.
"""

import os
import random
import signal
import subprocess
import sys
import time

from kvtier.client.attachment import SharedPool
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.testing import content
from tests.child_process import DEADLINE_S, wait_for
from tests.server_process import LAYOUT, SLOT, run

PROMPTS, LONGEST = 12, 6
_SLOW_S = 0.2


def client_at(path, timeout_s=_SLOW_S):
    access = ServerAccess(
        Address(path, "", 0),
        hello(LAYOUT.fingerprint, LAYOUT.chunk_bytes, stream=False, client="engine"),
    )
    return Client(access, timeout_s)


def attached_at(path):
    client = client_at(path, DEADLINE_S)
    wait_for(lambda: client.pool is not None, "attached")
    return client


def say(letter):
    os.write(1, letter)


def churn(client, seed):
    draw = random.Random(seed)
    while True:
        keys = run(draw.randrange(PROMPTS), draw.randint(1, LONGEST))
        load_some(client, keys)
        save_some(client, keys)
        if client.pool is None:
            time.sleep(0.001)


def load_some(client, keys):
    with client.load(keys) as lease:
        until = time.monotonic() + _SLOW_S
        while lease.poll().coming and time.monotonic() < until:
            client.wait(0.002)
        say(b"h" if lease.ready else b"m")
        for key, view in zip(lease.keys, lease.views(), strict=False):
            if view != content(key, SLOT):
                sys.stderr.write(f"wrong bytes of {key.hex()}\n")
                sys.exit(3)


def save_some(client, keys):
    with client.save(keys) as lease:
        for key, view in zip(lease.keys, lease.views(), strict=True):
            view[:] = b"\xdd" * SLOT
            say(b"s")
            view[:] = content(key, SLOT)
        if lease.keys:
            lease.commit()
            say(b"c")


def hold(client):
    lease = client.save(run(1000, 4))
    pool = client.pool
    assert pool is not None
    words = [pool.path, str(pool.witness_path), str(pool.slots), *map(str, lease.slots)]
    subprocess.Popen(
        [sys.executable, "-m", "tests.engine_process", "worker", *words], start_new_session=True
    )
    signal.pause()


def worker(path, witness_path, slots, *mine):
    pool = SharedPool.join(path, witness_path, slots, SLOT)
    rubbish = b"\xee" * SLOT
    told = False
    while True:
        for slot in mine:
            pool.view(slot)[:] = rubbish
        if not told:
            say(f"{os.getpid()}\n".encode())
            told = True


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "hold":
        hold(attached_at(rest[0]))
    else:
        worker(rest[0], rest[1], *map(int, rest[2:]))
