"""Whatever the umask: every folder, file and socket that kvtier makes is this user's alone."""

import os
import stat
import subprocess
import sys

import pytest

from kvtier.client.connect import Address
from kvtier.core.errors import ConfigError
from kvtier.core.pool import Pool
from kvtier.core.secret_files import make_folder, read_secret
from kvtier.server.listeners import listen_unix
from kvtier.tiers.nvme.check import check
from tests.child_process import wait_for
from tests.command import ran
from tests.server_process import SLOT, ServerProcess, attached, run, save, short_folder

MADE = {
    "run",
    "run/kvtier.sock",
    "run/kvtier.sock.lock",
    "deep",
    "deep/er",
    f"deep/er/slots-{SLOT}",
    f"deep/er/slots-{SLOT}/index.kvtier",
    f"deep/er/slots-{SLOT}/slots.kvtier",
}


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder):
    return {
        path.relative_to(folder).as_posix(): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


@pytest.mark.usefixtures("umask")
def test_a_server_makes_nothing_that_others_may_read_write_or_enter():
    with short_folder() as folder:
        server = ServerProcess(
            folder, own_python=True, nvme_path=folder / "deep" / "er", nvme_bytes=1 << 20
        )
        with server, attached(server.access()) as client:
            save(client, run(1, 2))
            wait_for(lambda: client.stats().get("nvme_held") == 2, "spilled")
            found = modes(folder)
            del found["server.log"]  # the test's own
            assert found.keys() == MADE, "a new file? then it belongs in this list"
            assert {name for name, mode in found.items() if mode & 0o077} == set()
            assert {
                name: mode
                for name, mode in found.items()
                if not (folder / name).is_dir() and mode != 0o600
            } == {}
            assert server.stop() == 0
        assert check(folder / "deep" / "er" / f"slots-{SLOT}").good == 2
        after = modes(folder)
        assert after.keys() - {"server.log"} == MADE - {"run/kvtier.sock"}
        assert not any(mode & 0o077 for name, mode in after.items() if name != "server.log")


@pytest.mark.usefixtures("umask")
def test_a_socket_deep_down_has_no_parent_that_others_may_write():
    with short_folder() as folder:
        listener = listen_unix(Address(str(folder / "a" / "b" / "sock"), "", 0))
        found = modes(folder)
        listener.close()
        assert found == {"a": 0o700, "a/b": 0o700, "a/b/sock": 0o600, "a/b/sock.lock": 0o600}


def test_a_folder_that_is_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "a")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (tmp_path, tmp_path / "a")] == [
        0o755,
        0o700,
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("what", ["pool", "witness"])
def test_another_user_cannot_open_what_has_no_name(what):
    """Pool and witness are reached by /proc/PID/fd, which the kernel lets nobody else of lower rank
    enter."""
    pool = Pool(1, 4096)
    read_end, write_end = os.pipe()
    path = pool.path if what == "pool" else f"/proc/{os.getpid()}/fd/{write_end}"
    knock = f"import os; os.setuid(65534); os.open({path!r}, os.O_WRONLY)"
    refused = ran([sys.executable, "-c", knock])
    assert "PermissionError" in refused.stderr
    assert (
        subprocess.run(
            [sys.executable, "-c", knock.replace("os.setuid(65534); ", "")], check=False
        ).returncode
        == 0
    )
    os.close(read_end)
    os.close(write_end)
    pool.close()


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640, 0o660])
def test_a_secret_that_this_user_or_group_reads_is_taken(tmp_path, mode):
    secret = tmp_path / "secret"
    secret.write_bytes(b"  a secret\n")
    secret.chmod(mode)
    assert read_secret(str(secret), "key") == b"a secret"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644, 0o777])
def test_a_secret_that_every_user_may_open_is_refused(tmp_path, mode):
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret")
    secret.chmod(mode)
    with pytest.raises(ConfigError, match="is open to every user: chmod 600"):
        read_secret(str(secret), "server_token_file")
