"""Real server processes and their clients on this host: sharing, isolation, quotas, bounds in time,
socket files."""

import os
import subprocess
import sys

import pytest

from kvtier.client.attachment import Attachment
from kvtier.client.client import Client
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.lookup import Progress
from kvtier.core.pool import Pool
from kvtier.protocol import wire
from kvtier.testing import content
from tests.child_process import DEADLINE_S, wait_for
from tests.command import ran
from tests.server_process import (
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

NVME = 1 << 20


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def client(server):
    with attached(server.access()) as client:
        yield client


def test_what_one_engine_saved_another_loads(server, client):
    assert save(client, run(1, 5)) == 5
    with attached(server.access()) as other:
        assert other.lookup(run(1, 8)).progress == Progress(5, 0)
        assert load(other, run(1, 8)) == ["ram"] * 5
        assert save(other, run(1, 8)) == 3
    assert client.lookup(run(1, 8)).progress == Progress(8, 0)
    assert client.stats()["saved"] == 8
    at_rest(client)


@pytest.mark.parametrize("call", ["save", "load"])
def test_slots_of_answers_that_come_too_late_are_given_back(server, client, monkeypatch, call):
    keys = run(1, 24)
    assert save(client, keys) == 24
    for prompt in range(2, 5):
        with server.paused(), monkeypatch.context() as changed:
            changed.setattr(client, "_timeout_s", 0.01)
            late = client.save(run(prompt, 24)) if call == "save" else client.load(keys)
            assert (late.slots, late.pool) == ([], None)
            late.close()
        wait_for(lambda: "saved" in client.stats(), "the late answer has come")
        at_rest(client)
    assert save(client, run(9, 24)) == 24


def test_a_run_that_is_longer_than_a_message_is_asked_for_as_far_as_one_goes(client, monkeypatch):
    keys = run(1, 10)
    save(client, keys)
    monkeypatch.setattr(wire, "MAX_KEYS", 4)
    assert client.lookup(keys).ready == 4
    assert client.known(keys) == [True] * 4 + [False] * 6
    with client.load(keys) as lease:
        assert (lease.poll(), len(lease.keys)) == (Progress(4, 0), 4)
    assert save(client, keys[4:]) == 0
    client.invalidate([])
    client.invalidate(keys)
    assert [client.known([key]) for key in keys] == [[False]] * 10


def test_a_worker_maps_the_pool_by_its_path(client):
    pool = client.pool
    assert pool is not None
    worker = (
        "from kvtier.client.attachment import SharedPool; import sys; path, witness, slot = "
        "sys.argv[1:];"
        "SharedPool.join(path, witness, 32, 8192).view(int(slot))[:4] = b'mine'"
    )
    with client.save(run(1, 1)) as lease:
        words = [pool.path, str(pool.witness_path), str(lease.slots[0])]
        subprocess.run([sys.executable, "-c", worker, *words], check=True)
        assert bytes(lease.views()[0][:4]) == b"mine"


def of_size(slot_bytes):
    return ChunkLayout(fingerprint({"slot": slot_bytes}), 1, 1, (slot_bytes,))


def test_an_engine_that_cannot_be_served_goes_on_without_a_cache(server):
    with attached(server.access(of_size(64 * SLOT)), later=True) as client:
        assert (client.pool, client.lookup(run(1, 2)).progress) == (None, Progress(0, 0))
        assert save(client, run(1, 2)) == 0
    with attached(server.access()) as other:
        assert save(other, run(1, 2)) == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_may_not_attach(server, client):
    knock = (
        "import os, socket; os.setuid(65534); sock = socket.socket(socket.AF_UNIX);"
        f"sock.connect({str(server.socket)!r}); print(sock.recv(9))"
    )
    refused = ran([sys.executable, "-c", knock])
    assert "PermissionError" in refused.stderr, "the file's mode"
    server.socket.parent.chmod(0o755)
    server.socket.parent.parent.chmod(0o755)
    server.socket.chmod(0o666)
    refused = ran([sys.executable, "-c", knock])
    assert refused.stdout == "b''\n" or "ConnectionReset" in refused.stderr, "the credentials"
    assert "user 65534 may not attach" in server.said()
    assert client.lookup(run(1, 1)).progress == Progress(0, 0)


def test_a_stale_socket_is_replaced_and_a_live_one_is_not():
    with short_folder() as folder:
        server = ServerProcess(folder)
        with server:
            server.kill()
            assert server.socket.exists()
            server.start()
            with attached(server.access()) as client:
                assert "another kvtier server has it" in ServerProcess(folder).refusal()
                assert client.lookup(run(1, 1)).progress == Progress(0, 0)
            assert server.stop() == 0
            assert not server.socket.exists()


@pytest.mark.parametrize(
    ("mode", "mend"),
    [
        (0o777, "or chmod 700"),
        (0o770, "or chmod 700"),
        (0o707, "or chmod 700"),
        (0o1777, "a folder of its own\n"),
    ],
)
def test_a_folder_that_others_may_write_is_refused(mode, mend):
    """The sticky bit, as of /tmp, does not keep others from being there first."""
    with short_folder() as folder:
        server = ServerProcess(folder)
        server.socket.parent.mkdir()
        server.socket.parent.chmod(mode)
        refusal = server.refusal()
        assert f"others may write in {server.socket.parent} (mode {mode:o})" in refusal
        assert mend in refusal


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused():
    with short_folder() as folder:
        server = ServerProcess(folder)
        server.socket.parent.mkdir(mode=0o755)
        os.chown(server.socket.parent, 65534, 65534)
        assert "belongs to user 65534, expected user 0 or root" in server.refusal()


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_folder_that_others_may_enter_only_will_do(mode):
    with short_folder() as folder:
        server = ServerProcess(folder)
        server.socket.parent.mkdir()
        server.socket.parent.chmod(mode)
        with server, attached(server.access()) as client:
            assert client.pool is not None


def test_an_engine_starts_without_its_server_and_gets_it_later():
    with short_folder() as folder:
        server = ServerProcess(folder)
        with attached(server.access(), later=True) as client:
            assert (client.pool, client.lookup(run(1, 2)).progress) == (None, Progress(0, 0))
            assert save(client, run(1, 2)) == 0
            assert load(client, run(1, 2)) == []
            with server:
                wait_for(lambda: client.pool is not None, "attached")
                save(client, run(1, 2))
                assert load(client, run(1, 2)) == ["ram"] * 2


def test_a_server_that_hangs_costs_one_deadline_and_then_nothing(server, client, monkeypatch):
    save(client, run(1, 4))
    waited: list[float] = []
    take = Attachment.take

    def taking(attachment, timeout_s):
        waited.append(timeout_s)
        return take(attachment, timeout_s)

    hasty = Client(server.access(), DEADLINE_S)
    held = hasty.load(run(1, 4))
    with server.paused(), monkeypatch.context() as changed:
        changed.setattr(hasty, "_timeout_s", 0.05)
        changed.setattr(Attachment, "take", taking)
        assert hasty.load(run(1, 4)).poll() == Progress(0, 0)
        for _ in range(1000):
            assert hasty.lookup(run(1, 4)).progress == Progress(0, 0)
            assert hasty.save(run(2, 4)).keys == []
        assert 0 < sum(waited) <= 0.05, "2001 calls and one deadline"
        assert held.views() == [content(key, SLOT) for key in run(1, 4)]
        held.close()
    wait_for(lambda: hasty.lookup(run(1, 4)).progress == Progress(4, 0), "answers again")
    assert hasty.counts["lost"] == 0
    at_rest(client)
    hasty.close()


def test_a_late_answer_goes_back_although_the_engine_is_idle(server, client):
    save(client, run(1, 4))
    hasty = Client(server.access(), timeout_s=0.05)
    with server.paused():
        assert hasty.load(run(1, 4)).slots == []
    at_rest(client)
    hasty.close()


def test_a_late_answer_to_a_lease_that_was_closed_meanwhile():
    with short_folder() as folder:
        server = ServerProcess(folder, nvme_path=folder / "nvme", nvme_bytes=NVME)
        with server, attached(server.access()) as client:
            save(client, run(1, 20))
            server.stop()
            server.start()
            wait_for(lambda: client.lookup(run(1, 20)).coming == 20, "warm")
            hasty = Client(server.access(), timeout_s=0.05)
            lease = hasty.load(run(1, 20))
            with server.paused():
                if lease.poll().coming == 0:
                    pytest.skip("everything came before the answer did")
                lease.close()
            wait_for(lambda: sum(hasty.lookup(run(1, 20)).progress) == 20, "answers again")
            assert hasty.counts["lost"] == 0
            assert "dropped" not in server.said()
            at_rest(client)
            hasty.close()


def test_a_load_that_was_ready_stays_readable_without_the_server(server, client):
    save(client, run(1, 3))
    lease, filling = client.load(run(1, 3)), client.save(run(2, 3))
    server.kill()
    assert client.lookup(run(1, 3)).progress == Progress(0, 0)
    assert (client.pool, lease.poll()) == (None, Progress(3, 0))
    assert lease.views() == [content(key, SLOT) for key in run(1, 3)]
    assert len(filling.views()) == 3
    filling.commit()
    lease.close()


def test_a_new_server_means_a_new_pool(server, client):
    before = client.pool
    assert before is not None
    lease = client.save(run(1, 3))
    server.kill()
    server.start()
    assert client.lookup(run(1, 3)).progress == Progress(0, 0)
    wait_for(lambda: client.pool is not None, "attached again")
    assert client.pool is not before
    assert Pool.attach(before.path, before.slots, before.slot_bytes).slots == 32, (
        "its lease still needs it"
    )
    lease.commit()
    assert client.lookup(run(1, 3)).progress == Progress(0, 0), "that was another server's"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before.fd)
    save(client, run(1, 3))
    assert load(client, run(1, 3)) == ["ram"] * 3
    at_rest(client)
