"""Whose an NVMe tier's folder and files are: a stranger's are refused and left alone. A lost folder
is told."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from kvtier.assemble import assemble
from kvtier.bench.processes.servers import free_port
from kvtier.config.load import load as load_config
from kvtier.core.errors import TierError
from kvtier.core.secret_files import open_folder
from kvtier.started import Started
from kvtier.testing import content
from kvtier.tiers.nvme.check import check, discard
from kvtier.tiers.nvme.folder import (
    INDEX_NAME,
    SLOTS_NAME,
    holders_of_removed,
    leads_to,
    wait_until_free,
)
from tests.child_process import wait_for
from tests.descriptors import descriptors
from tests.nvme_place import LAYOUT, SLOT, chunk_folder, fill, holds, room
from tests.server_process import SLOT as SERVED_SLOT
from tests.server_process import ServerProcess, attached, load, run, save, short_folder

ROOM = room(8)
KEYS = LAYOUT.keys(range(8))
NOBODY = 65534
FILES = pytest.mark.parametrize("name", [INDEX_NAME, SLOTS_NAME])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def open_place():
    """A folder that every user may write, as /tmp is."""
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def nobody(code, *words, imports=""):
    """Run Python as a user who has nothing to do with us. Returns what it prints. He
    may not be able to import anything."""
    become = f"import os, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    command = [sys.executable, "-c", imports + become + code, *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def checked(folder):
    command = [sys.executable, "-m", "kvtier", "check", "--nvme", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_folder_in_use_is_waited_for_and_not_for_ever(tmp_path):
    wait_until_free([tmp_path / "none", tmp_path], 0.0)
    tier = chunk_folder(tmp_path, ROOM)
    with pytest.raises(TierError, match=f"still in use by process {os.getpid()} after 0 s; end it"):
        wait_until_free([tmp_path], 0.0)
    tier.close()
    wait_until_free([tmp_path], 0.0)


def test_who_holds_a_removed_file_is_found_while_other_processes_end(tmp_path, monkeypatch):
    look = os.scandir

    def ended(place):
        if str(place).endswith("/fd") and f"/{os.getpid()}/" not in str(place):
            raise FileNotFoundError(place)
        return look(place)

    file = tmp_path / "slots"
    with file.open("wb"):
        file.unlink()
        monkeypatch.setattr(os, "scandir", ended)
        assert holders_of_removed(file) == [os.getpid()]


def refused(folder, words):
    """By the tier, by a store that is made from the configuration, by the check and by an erase."""
    with pytest.raises(TierError, match=words):
        chunk_folder(folder, ROOM)
    settings = {
        "KVTIER_NVME_PATH": str(folder),
        "KVTIER_NVME_BYTES": f"{ROOM}B",
        "KVTIER_RAM_BYTES": f"{8 * SLOT}B",
    }
    with pytest.raises(TierError, match=words):
        assemble(Started(load_config(env=settings)), LAYOUT)
    with pytest.raises(TierError, match=words):
        check(folder)
    if (
        SLOTS_NAME not in words
    ):  # an erase removes the payloads' name in our own folder, whatever is behind it
        with pytest.raises(TierError, match=words):
            discard(folder)


def closed_tier(folder):
    tier = chunk_folder(folder, ROOM)
    fill(tier, KEYS)
    tier.close()


# ---- whose it is ---------------------------------------------------------------------------------


@as_root
def test_a_folder_that_another_user_has_made_is_refused_with_all_that_is_in_it(open_place):
    nobody(
        f"path = sys.argv[1]; os.mkdir(path, 0o700); open(path + '/{INDEX_NAME}', 'w')",
        open_place / "tier",
    )
    refused(open_place / "tier", f"the folder has owner {NOBODY}, expected 0")
    assert [file.name for file in (open_place / "tier").iterdir()] == [INDEX_NAME]
    assert (open_place / "tier" / INDEX_NAME).stat().st_size == 0


@as_root
def test_the_folder_of_root_is_refused_by_an_ordinary_user(open_place):
    (open_place / "tier").mkdir(mode=0o755)
    words = nobody(
        "try: TierFolder(Path(sys.argv[1]))\nexcept TierError as error: print(error)",
        open_place / "tier",
        imports="from kvtier.tiers.nvme.folder import *\n",
    )
    assert f"owner 0, expected {NOBODY}" in words


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_refused(tmp_path, mode):
    (tmp_path / "tier").mkdir()
    closed_tier(tmp_path / "tier")
    (tmp_path / "tier").chmod(mode)
    refused(
        tmp_path / "tier",
        f"the folder has mode {mode:04o}, expected no write access for others; look who",
    )
    assert "chmod 700" in checked(tmp_path / "tier").stderr


def test_a_folder_that_others_may_enter_and_list_is_taken(tmp_path):
    (tmp_path / "tier").mkdir(mode=0o755)
    closed_tier(tmp_path / "tier")
    assert check(tmp_path / "tier").good == len(KEYS)


@as_root
@FILES
def test_a_strangers_file_is_neither_believed_nor_changed(tmp_path, name):
    """He made it while he could, has it open still, and could read and forge chunks in it."""
    closed_tier(tmp_path / "tier")
    os.chown(tmp_path / "tier" / name, NOBODY, NOBODY)
    before = (tmp_path / "tier" / name).read_bytes()
    refused(tmp_path / "tier", f"{name} has owner {NOBODY}, expected 0")
    assert (tmp_path / "tier" / name).read_bytes() == before
    assert f"remove {tmp_path / 'tier' / name}" in checked(tmp_path / "tier").stderr
    (tmp_path / "tier" / name).unlink()
    chunk_folder(tmp_path / "tier", ROOM).close()


@FILES
@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_file_that_others_may_have_opened_is_refused_and_keeps_its_mode(tmp_path, name, mode):
    closed_tier(tmp_path / "tier")
    (tmp_path / "tier" / name).chmod(mode)
    refused(tmp_path / "tier", f"{name} has mode {mode:04o}, expected 0600")
    assert stat.S_IMODE((tmp_path / "tier" / name).stat().st_mode) == mode


@FILES
def test_through_a_symbolic_link_nothing_is_opened_and_no_mode_changed(tmp_path, name):
    closed_tier(tmp_path / "tier")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "victim").chmod(0o644)
    (tmp_path / "tier" / name).unlink()
    (tmp_path / "tier" / name).symlink_to(tmp_path / "victim")
    refused(tmp_path / "tier", f"{name} is a link or a pipe, expected a regular file")
    assert stat.S_IMODE((tmp_path / "victim").stat().st_mode) == 0o644
    assert (tmp_path / "victim").read_text() == "mine"


@FILES
def test_a_file_that_has_another_name_is_refused(tmp_path, name):
    """It may be another file of ours that somebody has linked into the folder."""
    closed_tier(tmp_path / "tier")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "victim").chmod(0o600)
    (tmp_path / "tier" / name).unlink()
    os.link(tmp_path / "victim", tmp_path / "tier" / name)
    refused(tmp_path / "tier", f"{name} has 2 names, expected one")
    assert (tmp_path / "victim").read_text() == "mine"


@FILES
def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(tmp_path, name):
    closed_tier(tmp_path / "tier")
    (tmp_path / "tier" / name).unlink()
    os.mkfifo(tmp_path / "tier" / name, 0o600)
    refused(tmp_path / "tier", f"{name} has another kind than a regular file")


def test_files_that_a_narrow_umask_made_can_be_opened_again(tmp_path):
    (tmp_path / "tier").mkdir()
    before = os.umask(0o277)
    try:
        closed_tier(tmp_path / "tier")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "tier").iterdir()}
    assert modes == {0o600}


# ---- the way there -------------------------------------------------------------------------------


def test_a_folder_that_kvtier_makes_itself_may_lie_where_everybody_writes(open_place):
    closed_tier(open_place / "deep" / "tier")
    assert [
        stat.S_IMODE(each.stat().st_mode)
        for each in (open_place / "deep", open_place / "deep" / "tier")
    ] == [0o700, 0o700]
    assert check(open_place / "deep" / "tier").good == len(KEYS)


@as_root
def test_a_strangers_link_on_the_way_leads_nowhere(open_place, tmp_path):
    (tmp_path / "victim").mkdir()
    nobody("os.symlink(sys.argv[2], sys.argv[1])", open_place / "link", tmp_path / "victim")
    for place in (open_place / "link", open_place / "link" / "tier"):
        with pytest.raises(
            TierError, match=f"user {NOBODY} made the symbolic link to {tmp_path / 'victim'}"
        ):
            chunk_folder(place, ROOM)
        with pytest.raises(TierError, match=f"user {NOBODY} made the symbolic link"):
            check(place)
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.parametrize("target", ["there", "../{name}/there", "{place}/there"])
def test_a_link_of_our_own_is_followed(tmp_path, target):
    (tmp_path / "there").mkdir()
    (tmp_path / "first").symlink_to(target.format(name=tmp_path.name, place=tmp_path))
    (tmp_path / "link").symlink_to("first")
    closed_tier(tmp_path / "link" / "tier")
    assert check(tmp_path / "there" / "tier").good == len(KEYS)


def test_links_that_lead_in_a_circle_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links") as told:
        open_folder(tmp_path / "a")
    assert told.value.errno == errno.ELOOP


def test_a_way_that_ends_leaves_no_descriptor_open(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    before = descriptors()
    for wrong in ("file", "file/tier", "link", "nothing", "nothing/tier"):
        with pytest.raises(OSError, match=wrong):
            open_folder(tmp_path / wrong)
    os.close(open_folder(tmp_path))
    assert descriptors() == before


# ---- a folder that is lost while it is in use ----------------------------------------------------


def remove(folder):
    shutil.rmtree(folder)


def replace(folder):
    """Another folder, with files of the same names."""
    folder.rename(folder.with_name("before"))
    closed_tier(folder)


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def take_payloads(folder):
    (folder / SLOTS_NAME).unlink()


@pytest.mark.parametrize("lose", [remove, replace, empty, take_payloads])
def test_a_lost_folder_is_told_and_written_no_more(tmp_path, lose):
    tier = chunk_folder(tmp_path / "tier", ROOM)
    for key in KEYS[:3]:
        assert tier.write(key, content(key, SLOT))
    assert tier.trouble == ""
    lose(tmp_path / "tier")
    lost = [tier.write(key, memoryview(bytes(SLOT))) for key in KEYS[3:6]]
    assert lost == [False] * 3
    assert tier.counts["refused"] == 3
    into = memoryview(bytearray(SLOT))
    for key in KEYS[:3]:
        assert tier.read(key, into), "what it holds is served"
        assert into == content(key, SLOT)
    assert tier.trouble == "its folder was removed or replaced"
    tier.close()


def test_a_read_notices_it_too(tmp_path):
    tier = chunk_folder(tmp_path / "tier", ROOM)
    fill(tier, KEYS[:1])
    remove(tmp_path / "tier")
    whole = memoryview(bytearray(SLOT))
    assert tier.read(KEYS[0], whole)
    assert "was removed" in tier.trouble
    tier.close()


def test_when_the_folder_is_back_it_is_written_again(tmp_path):
    tier = chunk_folder(tmp_path / "tier", ROOM)
    (tmp_path / "tier").rename(tmp_path / "away")
    assert not tier.write(KEYS[0], memoryview(bytes(SLOT)))
    (tmp_path / "away").rename(tmp_path / "tier")
    fill(tier, KEYS)
    assert tier.trouble == ""
    tier.close()


def test_a_disk_that_cannot_be_asked_is_no_lost_folder(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EIO, "simulated")

    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr("kvtier.tiers.nvme.folder.os.stat", fails)
        assert leads_to(tmp_path / "file", file.fileno())


def test_who_opens_the_same_path_next_is_told_of_the_first(tmp_path, caplog):
    first = chunk_folder(tmp_path / "tier", ROOM)
    fill(first, KEYS[:1])
    remove(tmp_path / "tier")
    second = chunk_folder(tmp_path / "tier", ROOM)
    assert f"process {os.getpid()} still uses the files that were removed from here" in caplog.text
    fill(second, KEYS[1:2])
    assert (holds(first, KEYS[0]), holds(second, KEYS[0])) == (True, False)
    first.close()
    second.close()
    assert check(tmp_path / "tier").good == 1


def test_a_servers_health_names_a_lost_folder_and_the_server_goes_on():
    with short_folder() as folder:
        port = free_port()
        server = ServerProcess(
            folder, nvme_path=folder / "nvme", nvme_bytes=1 << 20, admin=f"http://127.0.0.1:{port}"
        )

        def trouble():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
                told: list[str] = json.load(answer)["trouble"]
                return told

        with server, attached(server.access()) as client:
            save(client, run(1, 2))
            wait_for(lambda: client.stats().get("nvme_held") == 2, "spilled")
            assert trouble() == []
            shutil.rmtree(folder / "nvme")
            save(client, run(2, 1))
            wait_for(lambda: bool(trouble()), "the lost folder is told")
            lost = folder / "nvme" / f"slots-{SERVED_SLOT}"
            assert f"nvme: {lost} (its folder was removed or replaced)" in trouble()[0]
            save(client, run(3, 2))
            assert load(client, run(3, 2)) == ["ram", "ram"]
            assert server.said().count("was removed or replaced") == 1
            assert not (folder / "nvme").exists()
            assert server.stop() == 0
