"""``kvtier check`` on folders of a real tier and a real server: flipped bits, crashes, repair, and
a folder in use."""

import hashlib
import json
import os
import re

import pytest

from kvtier.core.errors import TierError
from kvtier.testing import content
from kvtier.tiers.nvme import files
from kvtier.tiers.nvme.check import check, discard
from kvtier.tiers.nvme.folder import INDEX_NAME, SLOTS_NAME, lock
from kvtier.tiers.nvme.index import RECORD_BYTES, Superblock, pack_record, payload_checksum
from tests.child_process import wait_for
from tests.command import kvtier
from tests.nvme_place import LAYOUT, SLOT, chunk_folder, fill, flip, held, room
from tests.server_process import ServerProcess, attached, run, save, short_folder

SLOTS = 8
KEYS = LAYOUT.keys(range(6))
RECORDS_AT = 4096


def filled(folder):
    """Six chunks in slots 0 to 5. Slots 6 and 7 are free."""
    tier = chunk_folder(folder, room(SLOTS))
    fill(tier, KEYS)
    tier.close()


def counts(report):
    return report.good, report.corrupt, report.damaged, report.stale, report.free


def bytes_of(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_whole_folder(tmp_path):
    filled(tmp_path / "nvme")
    before = bytes_of(tmp_path / "nvme")
    report = check(tmp_path / "nvme")
    assert counts(report) == (6, 0, 0, 0, 2)
    assert (report.slots, report.slot_bytes, report.closed, report.bad) == (
        SLOTS,
        SLOT,
        True,
        False,
    )
    assert bytes_of(tmp_path / "nvme") == before


def test_flipped_bits_are_found_and_nothing_is_changed(tmp_path):
    filled(tmp_path)
    flip(tmp_path / SLOTS_NAME, 1 * SLOT + 77)
    flip(tmp_path / SLOTS_NAME, 4 * SLOT + SLOT - 1)
    flip(tmp_path / INDEX_NAME, RECORDS_AT + 3 * RECORD_BYTES + 5)
    flip(tmp_path / SLOTS_NAME, 7 * SLOT)  # a free slot may hold anything
    before = bytes_of(tmp_path)
    report = check(tmp_path)
    assert counts(report) == (3, 2, 1, 0, 2)
    assert report.bad
    assert bytes_of(tmp_path) == before


def test_repair_frees_what_is_bad_and_keeps_what_is_good(tmp_path):
    filled(tmp_path)
    flip(tmp_path / SLOTS_NAME, 1 * SLOT)
    flip(tmp_path / INDEX_NAME, RECORDS_AT + 3 * RECORD_BYTES + 60)
    assert check(tmp_path, repair=True).repaired == 2
    assert counts(check(tmp_path)) == (4, 0, 0, 0, 4)
    tier = chunk_folder(tmp_path, room(SLOTS))
    assert tier.counts["corrupt"] == 0
    assert held(tier, KEYS) == {0, 2, 4, 5}
    fill(tier, [*LAYOUT.keys([100, 101, 102, 103])])
    tier.close()


def test_of_two_records_of_a_key_the_newer_is_the_chunk(tmp_path):
    filled(tmp_path / "nvme")
    key, folder = KEYS[0], tmp_path / "nvme"
    slots = folder / SLOTS_NAME
    whole = memoryview(content(key, SLOT))
    with slots.open("r+b") as file:
        file.seek(7 * SLOT)
        file.write(whole)
    with (folder / INDEX_NAME).open("r+b") as file:
        file.seek(RECORDS_AT + 7 * RECORD_BYTES)
        file.write(pack_record(7, SLOT, key, payload_checksum(key, whole), 1000))
    flip(slots, 0)  # the older one's, which nobody reads
    assert counts(check(folder, repair=True)) == (6, 0, 0, 1, 1)
    assert counts(check(folder)) == (6, 0, 0, 0, 2)
    with (folder / INDEX_NAME).open("r+b") as file:
        file.seek(RECORDS_AT)
        file.write(pack_record(0, SLOT, key, payload_checksum(key, whole), 1))
    assert discard(folder) == 6


def test_a_folder_of_another_version_is_not_ours_to_check_but_to_remove(tmp_path):
    filled(tmp_path / "nvme")
    with (tmp_path / "nvme" / INDEX_NAME).open("r+b") as file:
        file.write(Superblock(SLOT, SLOTS, 1, clean=True, version=2).pack())
    with pytest.raises(TierError, match="format version 2, expected 1; use its kvtier"):
        check(tmp_path / "nvme", repair=True)
    assert discard(tmp_path / "nvme") == 0 and not (tmp_path / "nvme").exists()


def test_files_that_are_short_or_gone(tmp_path):
    filled(tmp_path)
    os.truncate(tmp_path / SLOTS_NAME, 4 * SLOT)
    report = check(tmp_path)
    assert counts(report) == (4, 2, 0, 0, 2)
    assert any(SLOTS_NAME in problem for problem in report.problems)
    repaired = check(tmp_path, repair=True)
    assert repaired.repaired and repaired.bad, "the file is short still"
    (tmp_path / SLOTS_NAME).unlink()
    assert counts(check(tmp_path)) == (0, 4, 0, 0, 4)


def test_a_superblock_that_is_not_readable(tmp_path):
    filled(tmp_path)
    flip(tmp_path / INDEX_NAME, 10)
    report = check(tmp_path)
    assert report.bad
    assert "superblock" in report.problems[0]
    assert not check(tmp_path, repair=True).bad
    tier = chunk_folder(tmp_path, room(SLOTS))
    assert tier.held() == []
    tier.close()


def test_a_folder_in_use_is_refused(tmp_path):
    tier = chunk_folder(tmp_path, room(SLOTS))
    for look in (check, discard):
        with pytest.raises(TierError, match=f"in use by process {os.getpid()}"):
            look(tmp_path)
    tier.close()
    assert counts(check(tmp_path)) == (0, 0, 0, 0, SLOTS)


def test_the_disk_of_a_tier_comes_back_by_one_command(tmp_path):
    place = tmp_path / "kvtier"
    filled(place / "slots-8192")
    filled(place / "slots-9000")
    tier = chunk_folder(place / "slots-8192", room(SLOTS))
    refused = kvtier("clear", "--folder", place)
    assert refused.returncode == 2 and f"in use by process {os.getpid()}" in refused.stderr
    tier.close()
    done = kvtier("clear", "--folder", place)
    told = refused.stdout + done.stdout
    sizes = re.findall(r"slots-\d+: 6 chunks dropped, (\S+) KiB given back", told)
    assert len(sizes) == 2 and min(map(float, sizes)) >= SLOTS * SLOT / 1024
    assert not place.exists()


def test_what_cannot_be_given_back_holds_up_nothing_else(tmp_path):
    place = tmp_path / "place"
    for name in ("b", "c"):
        filled(place / name)
    filled(tmp_path / "elsewhere")
    (place / "a").symlink_to(tmp_path / "elsewhere")
    if os.geteuid() == 0:
        os.lchown(place / "a", 65534, 65534)
    busy = chunk_folder(place / "b", room(SLOTS))
    done = kvtier("clear", "--folder", place)
    busy.close()
    assert done.returncode == 2 and f"in use by process {os.getpid()}" in done.stderr
    assert done.stderr.count("\n") == 1 and not (place / "c").exists() and (place / "b").exists()
    if os.geteuid() == 0:
        assert (tmp_path / "elsewhere" / INDEX_NAME).exists(), "a stranger's link was followed"
        told = kvtier("check", "--nvme", place, "--json")
        assert told.returncode == 2 and [one["slots"] for one in json.loads(told.stdout)] == [SLOTS]


@pytest.mark.parametrize(
    ("slot_bytes", "slots"),
    [(SLOT, 1 << 44), (1 << 63, 8), (0, 8), (SLOT + 1, 8), (SLOT, 0), ((1 << 64) - 4096, 1)],
)
def test_a_superblock_that_says_what_no_tier_is_is_none(slot_bytes, slots, tmp_path):
    filled(tmp_path / "nvme")
    superblock(tmp_path / "nvme", slot_bytes, slots)
    report = check(tmp_path / "nvme")
    assert report.problems and report.bad
    tier = chunk_folder(tmp_path / "nvme", room(SLOTS))
    assert held(tier, KEYS) == set()
    tier.close()
    superblock(tmp_path / "nvme", slot_bytes, slots)
    assert discard(tmp_path / "nvme", 1) == 0 and not (tmp_path / "nvme").exists()


def superblock(folder, slot_bytes, slots):
    with (folder / INDEX_NAME).open("r+b") as file:
        file.write(Superblock(slot_bytes, slots, 1, clean=True).pack())


def test_of_two_owners_in_one_folder_one_owners_chunks_go(tmp_path):
    ours, theirs = 11, 22
    tier = chunk_folder(tmp_path / "nvme", room(SLOTS))
    for at, key in enumerate(KEYS):
        assert tier.write(key, content(key, SLOT), ours if at % 2 else theirs)
    tier.close()
    assert discard(tmp_path / "nvme", ours) == 3
    assert check(tmp_path / "nvme").free == SLOTS - 3
    again = chunk_folder(tmp_path / "nvme", room(SLOTS))
    assert held(again, KEYS) == {0, 2, 4} and set(again.owners(KEYS[::2])) == {theirs}
    again.close()
    assert discard(tmp_path / "nvme", theirs) == 3
    assert not (tmp_path / "nvme").exists(), "nobody's is left"


def test_a_start_that_meets_a_clear_says_so(tmp_path, monkeypatch):
    filled(tmp_path / "nvme")
    cleared: list[int] = []

    def late(index):
        if not cleared:
            cleared.append(discard(tmp_path / "nvme"))
        return lock(index)

    monkeypatch.setattr(files, "lock", late)
    with pytest.raises(TierError, match="another process has just removed it; start again"):
        chunk_folder(tmp_path / "nvme", room(SLOTS))
    assert cleared == [6]
    tier = chunk_folder(tmp_path / "nvme", room(SLOTS))
    fill(tier, KEYS)
    tier.close()
    assert check(tmp_path / "nvme").good == 6


def test_the_command(tmp_path):
    filled(tmp_path / "slots-8192")
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"nvme_path: {tmp_path}\n")
    whole = kvtier("check", "--config", config)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "6 good, 0 corrupt, 0 damaged, 0 stale, 2 free" in whole.stdout
    flip(tmp_path / "slots-8192" / SLOTS_NAME, 0)
    bad = kvtier("check", "--nvme", tmp_path, "--json")
    assert bad.returncode == 1
    (told,) = json.loads(bad.stdout)
    assert (told["good"], told["corrupt"], told["free"]) == (5, 1, 2)
    assert "--repair" in bad.stderr
    assert kvtier("check", "--nvme", tmp_path, "--repair").returncode == 0
    assert kvtier("check", "--nvme", tmp_path).returncode == 0
    assert kvtier("check").returncode == 2
    filled(tmp_path / "other" / "slots-8192")
    both = f"{tmp_path / 'slots-8192'},{tmp_path / 'other'}"
    config.write_text(f"nvme: {{path: [{both}]}}\n")
    assert kvtier("check", "--config", config).stdout.count("6 good") == 1
    cleared = kvtier("clear", "--folder", both).stdout
    assert cleared.count("chunks dropped") == 2 and not (tmp_path / "other").exists()


def test_after_kill_9_under_load_nothing_is_corrupt():
    with short_folder() as folder:
        server = ServerProcess(folder, nvme_path=folder / "nvme", nvme_bytes=1 << 20)
        with server, attached(server.access()) as client:
            for prompt in range(60):
                save(client, run(prompt, 5))
            refused = kvtier("check", "--nvme", folder / "nvme")
            assert refused.returncode == 2
            assert f"in use by process {server.pid}" in refused.stderr
            server.kill()
            done = kvtier("check", "--nvme", folder / "nvme", "--json")
            assert done.returncode == 0, done
            (told,) = json.loads(done.stdout)
            assert told["good"] > 0
            assert (told["corrupt"], told["damaged"], told["closed"]) == (0, 0, False)
            server.start()
            wait_for(
                lambda: client.stats().get("nvme_held") == told["good"],
                "what check counted is what came back",
            )
