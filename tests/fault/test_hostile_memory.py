"""Memory that processes share: what a hostile engine, server or user does with it kills and
deceives nobody else."""

import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, hello
from kvtier.core.errors import ConfigError
from kvtier.core.lookup import Progress
from tests.child_process import DEADLINE_S, wait_for
from tests.rogue_server import NOBODY, rogue_process
from tests.server_process import (
    LAYOUT,
    SLOT,
    ServerProcess,
    at_rest,
    attached,
    load,
    run,
    save,
    serving,
    short_folder,
)

pytestmark = pytest.mark.usefixtures("patient")

TOKEN = b"a secret of more than 16 bytes"
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


def door_at(path, token=None):
    return ServerAccess(
        Address(str(path), "", 0), hello(LAYOUT.fingerprint, SLOT, stream=False), token
    )


SHRINK = """
import os, sys
from tests.engine_process import attached_at
pool = attached_at(sys.argv[1]).pool
for size in (0, 4096, pool.slots * pool.slot_bytes // 2):
    try:
        os.ftruncate(pool.fd, size)
    except PermissionError:
        print("refused")
"""


def test_an_attached_engine_that_shrinks_the_pool_kills_nobody():
    with short_folder() as folder:
        server = ServerProcess(folder, nvme_path=folder / "nvme", nvme_bytes=1 << 20)
        with server, attached(server.access()) as honest:
            save(honest, run(1, 5))
            hostile = [sys.executable, "-c", SHRINK, str(server.socket)]
            said = subprocess.run(
                hostile, check=True, timeout=DEADLINE_S, capture_output=True, text=True
            ).stdout
            assert said.split() == ["refused"] * 3
            assert load(honest, run(1, 5)) == ["ram"] * 5
            for prompt in range(2, 8):
                save(honest, run(prompt, 5))
            wait_for(
                lambda: honest.stats()["nvme_held"] >= 30,
                "the server reads its slots to spill them",
            )
            at_rest(honest)
            assert honest.counts["lost"] == 0


def test_memory_that_a_server_could_shrink_is_refused_at_the_start():
    with (
        short_folder() as folder,
        rogue_process("unsealed", folder / "sock"),
        pytest.raises(ConfigError, match="not sealed against shrinking"),
    ):
        Client(door_at(folder / "sock"), DEADLINE_S)


def test_an_engine_that_meets_such_a_server_later_goes_on_without_and_comes_back(caplog):
    with serving() as server, attached(server.access()) as client:
        save(client, run(1, 3))
        server.kill()
        server.socket.unlink()
        with rogue_process("unsealed", server.socket):
            assert client.lookup(run(1, 3)).progress == Progress(0, 0)
            wait_for(lambda: "not sealed against shrinking" in caplog.text, "refused")
            assert client.pool is None
            assert save(client, run(1, 3)) == 0
        server.socket.unlink()
        server.start()
        wait_for(lambda: client.pool is not None, "attached to the right one")
        assert save(client, run(1, 3)) == 3
        assert load(client, run(1, 3)) == ["ram"] * 3


def test_slots_under_an_open_view_are_nobody_elses_though_the_client_is_closed():
    with serving() as server, attached(server.access()) as other:
        closing = Client(server.access(), DEADLINE_S)
        lease = closing.save(run(1, 4))
        views = lease.views()
        closing.close()
        others = [run(prompt, 5) for prompt in range(10, 20)]
        for keys in others:
            save(other, keys)
        for view in views:
            view[:] = b"\xee" * SLOT
        held = [keys for keys in others if other.lookup(keys).ready == 5]
        assert held
        for keys in held:
            assert load(other, keys) == ["ram"] * 5
        assert other.stats()["ram_filling"] == 4
        del view, views
        gc.collect()
        at_rest(other)
        assert other.stats()["ram_filling"] == 0


@AS_ROOT
def test_a_server_of_another_user_gets_no_kv():
    with short_folder() as folder:
        folder.chmod(0o1777)
        with (
            rogue_process("sealed", folder / "sock", NOBODY),
            pytest.raises(ConfigError, match=f"runs as user {NOBODY}, expected user 0 or root"),
        ):
            Client(door_at(folder / "sock"), DEADLINE_S)


@AS_ROOT
def test_another_user_who_takes_the_place_of_a_dead_server_gets_no_kv(caplog):
    with serving() as server, attached(server.access()) as client:
        server.kill()
        server.socket.unlink()
        server.socket.parent.chmod(0o777)
        server.socket.parent.parent.chmod(0o755)
        with rogue_process("sealed", server.socket, NOBODY):
            assert client.lookup(run(1, 3)).progress == Progress(0, 0)
            wait_for(lambda: f"runs as user {NOBODY}" in caplog.text, "refused")
            assert client.pool is None
        server.socket.unlink()
        server.socket.parent.chmod(0o700)
        server.start()
        wait_for(lambda: client.pool is not None, "attached to the right one")


@AS_ROOT
def test_a_token_vouches_for_a_server_of_another_user():
    with short_folder() as folder:
        folder.chmod(0o1777)
        access = door_at(folder / "sock", TOKEN)
        with rogue_process("sealed", folder / "sock", NOBODY, TOKEN), attached(access) as client:
            assert client.lookup(run(1, 3)).ready == 3
        (folder / "sock").unlink(missing_ok=True)
        with (
            rogue_process("sealed", folder / "sock", NOBODY, b"another secret of enough bytes"),
            pytest.raises(ConfigError, match="does not know our token"),
        ):
            Client(access, DEADLINE_S)


def test_a_server_of_our_own_user_must_have_our_token_too(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(TOKEN)
    file.chmod(0o600)
    with (
        serving(server_token_file=file) as server,
        attached(replace(server.access(), token=TOKEN)) as client,
    ):
        save(client, run(1, 3))
        assert load(client, run(1, 3)) == ["ram"] * 3
    with serving() as server, pytest.raises(ConfigError, match="does not know our token"):
        Client(replace(server.access(), token=TOKEN), DEADLINE_S)
