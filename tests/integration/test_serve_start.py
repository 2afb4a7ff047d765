"""The start of a real ``kvtier serve``: what it tries before it lets engines in, and what it tells
systemd."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest

from kvtier.cli.vllm_command import API_SERVER
from tests.admin_server import AdminServer
from tests.admin_server import administered as in_any_python
from tests.child_process import DEADLINE_S, wait_for
from tests.command import bare, ran
from tests.memory_cgroup import entering, memory_cgroup
from tests.redis_server import RedisServer
from tests.server_process import SLOT, ServerProcess, attached, load, run, save, short_folder

MIB = 1 << 20


administered = partial(in_any_python, own_python=True)


def refused(**settings):
    with short_folder() as folder:
        return ServerProcess(folder, **settings).refusal()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"nvme_path": "DIR/nvme", "nvme_bytes": "900TiB"},
            r"900 TiB \(environment KVTIER_NVME_BYTES\) of .*lower nvme_bytes below",
        ),
        (
            {"nvme_path": "DIR/file", "nvme_bytes": MIB},
            "DIR/file is not a folder; name a folder of its own in nvme_path",
        ),
        ({"encryption_key_file": "DIR/none", "nvme_path": "DIR/n"}, "=DIR/none cannot be read"),
        ({"slot_bytes": 5000}, "slot_bytes=5,000: expected a multiple of 4,096"),
        (
            {"ram_bytes": "10TiB", "slot_bytes": 4096},
            r"ram_bytes=10 TiB \(environment KVTIER_RAM_BYTES\) is more RAM",
        ),
    ],
    ids=["no room", "a file", "no key", "no whole pages", "more RAM than there is"],
)
def test_what_can_never_be_had_fails_the_start(tmp_path, given, words):
    (tmp_path / "file").touch()

    def here(value):
        return value.replace("DIR", str(tmp_path)) if isinstance(value, str) else value

    said = refused(**{name: here(value) for name, value in given.items()})
    assert re.search(here(words), said), said


@pytest.mark.redis
@pytest.mark.parametrize(
    ("there", "given", "expected"),
    [
        (
            {"cluster_enabled": "yes"},
            {"redis_bytes": MIB},
            "this is a node of a Redis Cluster; write redis+cluster://",
        ),
        ({"requirepass": "secret"}, {"redis_bytes": MIB}, "login refused"),
        ({}, {}, "redis_bytes is not given and the server sets no maxmemory; give redis_bytes"),
    ],
    ids=["a cluster's node", "a wrong password", "no size"],
)
def test_a_redis_that_can_never_be_used_fails_the_start(there, given, expected):
    with RedisServer(**there) as redis:
        assert expected in refused(redis_url=redis.url, **given)


def _in_words(done, group):
    assert done.returncode == 2, done
    assert "ram_bytes=1 GiB" in done.stderr and f"of cgroup /{group.parent.name}" in done.stderr
    assert "Lower ram_bytes below" in done.stderr


def test_ram_beyond_the_cgroup_is_an_error_in_serve_launch_and_engine():
    environment = bare(KVTIER_RAM_BYTES="1GiB", KVTIER_ADMIN="off")
    engine = (
        "import sys; from kvtier.assemble import assemble; from kvtier.core.chunk import "
        "ChunkLayout\n"
        "from kvtier.config.load import load; from kvtier.core.errors import ConfigError\n"
        "from kvtier.started import Started\n"
        "try: assemble(Started(load()), ChunkLayout(bytes(32), 1, 1, (1 << 20,)))\n"
        "except ConfigError as error: sys.exit(print(error, file=sys.stderr) or 2)"
    )
    with memory_cgroup(512 * MIB) as group, short_folder() as folder:
        for words in (
            ["-m", "kvtier", "serve", "--listen", f"unix://{folder}/run/kvtier.sock"],
            f"-m kvtier launch --print -- python3 -m {API_SERVER} --model m".split(),
            ["-c", engine],
        ):
            command = entering(group, [sys.executable, *words])
            _in_words(ran(command, environment), group)


def test_ram_within_the_cgroup_is_touched_to_the_last_page():
    with (
        memory_cgroup(512 * MIB) as group,
        administered(ram_bytes=256 * MIB, slot_bytes=MIB, nvme_path=None, nvme_bytes=None) as plain,
    ):
        plain.stop()
        plain._command = entering(group, plain._command)
        plain.start()
        wait_for(lambda: plain.ask("GET", "/healthz/ready").status == 200, "ready")
        assert plain.ask("GET", "/v1/stats").body["memory"]["pools"] >= 256 * MIB
        assert plain.stop() == 0


def test_with_a_size_everything_is_there_before_the_first_engine():
    with administered(slot_bytes=SLOT) as server:
        wait_for(lambda: server.ask("GET", "/healthz/ready").status == 200, "ready")
        stats = server.ask("GET", "/v1/stats").body
        (size_class,) = stats["size_classes"]
        assert (size_class["slot_bytes"], [tier["tier"] for tier in size_class["tiers"]]) == (
            SLOT,
            ["ram", "nvme"],
        )
        assert stats["memory"]["pools"] >= 32 * SLOT, "touched"
        with attached(server.access()) as client:
            assert save(client, run(1, 2)) == 2
            assert load(client, run(1, 2)) == ["ram"] * 2


def test_with_a_size_a_folder_that_is_taken_fails_the_start():
    with administered(slot_bytes=SLOT) as first, short_folder() as folder:
        wait_for(lambda: first.ask("GET", "/healthz/ready").status == 200, "ready")
        nvme = first.socket.parents[1] / "nvme"
        said = AdminServer(folder, slot_bytes=SLOT, nvme_path=nvme).refusal()
    assert f"slots-{SLOT}" in said and "kvtier: " in said
    assert "Traceback" not in said


def test_without_a_size_the_log_says_who_decides_it():
    with administered() as server:
        assert "slot_bytes is not set: the first engine decides it" in server.said()


@pytest.mark.redis
@pytest.mark.parametrize(("slot_bytes", "bytes_"), [(None, None), (SLOT, MIB)])
def test_a_redis_that_is_away_is_trouble_until_it_is_back(slot_bytes, bytes_):
    with RedisServer(maxmemory="64mb") as redis:
        redis.kill()
        settings = {
            "redis_url": redis.url,
            "redis_bytes": bytes_,
            "nvme_path": None,
            "nvme_bytes": None,
        }
        with administered(slot_bytes=slot_bytes, **settings) as server:
            wait_for(
                lambda: server.ask("GET", "/healthz/ready").status == 200,
                "RAM serves: engines are let in",
            )
            (words, *_) = server.ask("GET", "/healthz").body["trouble"]
            assert "redis cannot be reached" in words
            assert str(redis.port) not in words, (
                "anybody may ask for it; where Redis is says the log"
            )
            assert f"redis 127.0.0.1:{redis.port} cannot be reached" in server.said()
            assert server.metric("kvtier_ready") == 1
            assert server.metric("kvtier_trouble") >= 1
            assert "TROUBLE: redis" in server.cli("stats").stdout
            with attached(server.access()) as client:
                assert save(client, run(1, 2)) == 2
                assert load(client, run(1, 2)) == ["ram"] * 2
            redis.start()
            with attached(
                server.access()
            ) as client:  # a tier that was given up is tried again when it is asked for

                def well():
                    load(client, run(99, 1))
                    return not server.ask("GET", "/healthz").body["trouble"]

                wait_for(well, "no trouble")
                assert save(client, run(2, 2)) == 2
                held = partial(server.metric, "kvtier_held_chunks", tier="redis")
                wait_for(lambda: held() >= 2, "Redis has what is saved from now on")
            assert "redis can be reached now" in server.said()
            assert server.metric("kvtier_trouble") == 0


def test_the_configuration_is_logged_once_and_without_passwords():
    with administered(redis_url="redis://me:S3cret@127.0.0.1:1/0", redis_bytes="1MiB") as server:
        (line,) = re.findall(r"configuration: (.*)", server.said())
        assert "ram_bytes=256 KiB (environment KVTIER_RAM_BYTES)" in line
        assert "redis_bytes=1 MiB (environment KVTIER_REDIS_BYTES)" in line
        assert line.endswith("all else by default")
        assert "S3cret" not in server.said()


@contextmanager
def manager(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(DEADLINE_S)
        yield sock


def told(sock):
    return dict(line.split("=", 1) for line in sock.recv(4096).decode().splitlines())


def test_systemd_is_told_ready_alive_and_stopping():
    with short_folder() as folder:
        name = f"@{folder}/notify"
        with manager(name.replace("@", "\0")) as sock:
            server = ServerProcess(folder, own_python=True, slot_bytes=SLOT)
            server._env |= {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "300000"}
            with server:
                first = told(sock)
                assert first["READY"] == "1"
                assert "the pool and the tiers are ready" in server.said(), "not before"
                assert f"serving at unix://{server.socket}" in server.said()
                with attached(server.access()) as client:
                    save(client, run(1, 1))
                    beat = {"WATCHDOG": "1", "STATUS": "1 connections"}
                    for _ in range(3):  # the first one comes at once
                        wait_for(lambda: told(sock) == beat, "alive, with one engine")
                os.kill(server.pid, signal.SIGTERM)
                wait_for(lambda: "STOPPING" in told(sock), "stopping")


def test_systemd_is_told_what_is_wrong_and_a_manager_that_is_gone_stops_nobody():
    with short_folder() as folder:
        with manager(f"{folder}/notify") as sock:
            server = ServerProcess(
                folder, own_python=True, redis_url="redis://127.0.0.1:1", redis_bytes=MIB
            )
            server._env |= {"NOTIFY_SOCKET": f"{folder}/notify"}
            with server:
                first = told(sock)
                assert first["READY"] == "1" and "redis cannot be reached" in first["STATUS"]
                assert server.stop() == 0
                assert told(sock)["STOPPING"] == "1"
        with server, attached(server.access()) as client:
            assert save(client, run(1, 1)) == 1
            wait_for(lambda: "cannot be told READY=1" in server.said(), "the log says it")
            assert server.stop() == 0


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_socket_that_systemd_has_made_is_taken_and_left(mode):
    """As sd_listen_fds(3) says: descriptor 3, and the number of the process. Another socket before
    it is not taken."""
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{folder}/other")
        server = ServerProcess(folder, own_python=True, slot_bytes=SLOT)
        server.socket.parent.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(server.socket))
            server.socket.chmod(mode)
            made.listen(8)
            fds = [fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (other, made)]
            shell = "exec 3<&{} 4<&{}; LISTEN_PID=$$ LISTEN_FDS=2".format(*fds)
            command = ["bash", "-c", f'{shell} exec "$@"', "bash", *server.command()]
            started = subprocess.Popen(
                command, env=server._env, pass_fds=fds, stderr=subprocess.PIPE, text=True
            )
            for one in fds:
                os.close(one)
            try:
                if mode == 0o666:
                    said = started.communicate(timeout=DEADLINE_S)[1]
                    assert started.returncode == 2 and "SocketMode=0600" in said
                    return
                assert started.stderr is not None
                assert any("serving at" in line for line in started.stderr), "it serves"
                with attached(server.access()) as client:
                    assert save(client, run(1, 1)) == 1
            finally:
                started.terminate()
                started.communicate()
            assert started.returncode == 0 and server.socket.is_socket()
