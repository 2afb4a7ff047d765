"""SealedTier: every promise of a tier over real NVMe and Redis, and its own: nothing readable
below, nothing believed that was not sealed by our key for just this chunk."""

import logging
import shutil
import sys
from typing import Any

import pytest

from kvtier.config.load import ENCRYPTION_KEY
from kvtier.core.chunk import PAGE_BYTES, ChunkKey, ChunkLayout
from kvtier.core.errors import ConfigError, StateError
from kvtier.testing import DictTier, check_tier, content
from kvtier.tiers.nvme.check import check
from kvtier.tiers.nvme.folder import SLOTS_NAME
from kvtier.tiers.sealed import SealedTier, sealed_bytes
from tests.child_process import wait_for
from tests.nvme_place import FIVE, LAYOUT, ON_SETS, ONE, SLOT, TWO, flip, opened, section
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess, attached, load, run, save, short_folder
from tests.stores import assembled

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
KEYS = LAYOUT.keys(range(6))
SEALED = sealed_bytes(SLOT)


def on_disks(path, disks=ONE, size=SLOT, key=KEY):
    return SealedTier(opened(path, disks, sealed_bytes(size)), key, size)


def read(tier, key):
    into = memoryview(bytearray(SLOT))
    found = tier.read(key, into)
    assert not found or into == content(key, SLOT), "a lie"
    return found


@pytest.fixture
def below():
    """Where stored bytes can be damaged with no checksum of a tier's own in the way: as a forger
    would."""
    return DictTier(16)


@pytest.fixture
def tier(below):
    tier = SealedTier(below, KEY, SLOT)
    for key in KEYS:
        assert tier.write(key, content(key, SLOT))
    return tier


# ---- the promises of every tier ------------------------------------------------------------------


@pytest.mark.parametrize(("size", "disks"), [(1, ONE), (4096, TWO), (5000, FIVE)])
def test_over_nvme_it_keeps_every_promise_of_a_tier(tmp_path, size, disks):
    def make():
        shutil.rmtree(tmp_path / "tier", ignore_errors=True)
        return on_disks(tmp_path / "tier", disks, size)

    check_tier(make, chunk_bytes=size, reopen=lambda: on_disks(tmp_path / "tier", disks, size))


@pytest.mark.redis
def test_over_redis_it_keeps_every_promise_of_a_tier():
    with RedisServer() as server:

        def make():
            with server.admin() as admin:
                admin.flushall()
            return SealedTier(server.tier(size=sealed_bytes(10_000)), KEY, 10_000)

        check_tier(make, chunk_bytes=10_000)
        assert make().comes_whole, "a tier that seals another is like it"


# ---- what lies below -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "aad", "sealed"),
    [
        (b"\1" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (
            b"\3" * 32,
            b"c2sp.org/XAES-256-GCM",
            "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
        ),
    ],
)
def test_the_cipher_is_the_published_one(monkeypatch, key, aad, sealed, below):
    """The test vectors of https://c2sp.org/XAES-256-GCM."""
    monkeypatch.setattr("os.urandom", lambda count: b"ABCDEFGHIJKLMNOPQRSTUVWX"[:count])
    text = memoryview(b"XAES-256-GCM")
    assert SealedTier(below, key, len(text)).write(ChunkKey(aad), text)
    assert below.held[ChunkKey(aad)].startswith(bytes.fromhex(sealed) + b"ABCDEFGHIJKLMNOPQRSTUVWX")


def test_what_is_stored_is_whole_pages_one_more_than_the_chunk(below, tier):
    assert {len(stored) for stored in below.held.values()} == {SLOT + PAGE_BYTES} == {SEALED}
    found = [sealed_bytes(size) for size in (1, 4040, 4041, 1 << 20)]
    assert found == [4096, 4096, 8192, (1 << 20) + 4096]


def test_what_is_stored_tells_nothing_and_is_never_the_same_twice(below, tier):
    for key in KEYS:
        plain, before = bytes(content(key, SLOT)), below.held[key]
        assert not any(plain[at : at + 16] in before for at in range(0, SLOT, 16))
        assert tier.write(key, memoryview(plain))
        assert below.held[key][:SLOT] != before[:SLOT]
        assert bytes(key) not in before and KEY not in before


# ---- what does not open --------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, SLOT // 2, SLOT - 1, SLOT, SLOT + 15, SLOT + 16, SLOT + 39])
def test_a_changed_bit_of_bytes_tag_or_nonce_is_a_counted_miss(below, tier, at):
    stored = bytearray(below.held[KEYS[0]])
    stored[at] ^= 1
    below.held[KEYS[0]] = bytes(stored)
    assert read(tier, KEYS[0]) is False
    assert KEYS[0] not in below.held, "deleted"
    assert (tier.counts["unopened"], tier.counts["corrupt"]) == (1, 1)
    assert all(read(tier, key) for key in KEYS[1:])


def test_a_chunk_under_another_chunks_name_does_not_open(below, tier):
    below.held[KEYS[0]], below.held[KEYS[1]] = below.held[KEYS[1]], below.held[KEYS[0]]
    assert [read(tier, key) for key in KEYS[:3]] == [False, False, True]


@pytest.mark.parametrize(
    "stored", [bytes(SEALED), b"\xff" * SEALED, bytes(content(KEYS[0], SEALED))]
)
def test_bytes_that_were_never_sealed_do_not_open(below, tier, stored):
    below.held[KEYS[0]] = stored
    assert read(tier, KEYS[0]) is False
    assert tier.counts["unopened"] == 1


def test_sealed_by_another_key_is_a_miss_and_the_log_says_so_once(below, tier, caplog):
    other = SealedTier(below, OTHER_KEY, SLOT)
    assert [read(other, key) for key in KEYS] == [False] * len(KEYS)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "sealed by another key" in told[0]
    assert other.counts["unopened"] == len(KEYS)


def test_a_miss_below_is_no_broken_seal(tier):
    assert read(tier, LAYOUT.keys([99])[0]) is False
    assert tier.counts["unopened"] == tier.counts["corrupt"] == 0


def test_not_now_is_passed_on_and_costs_nothing(below, tier, monkeypatch):
    monkeypatch.setattr(below, "read", lambda key, into: None)
    assert read(tier, KEYS[0]) is None
    assert KEYS[0] in below.held
    assert tier.counts["unopened"] == 0


def test_a_chunk_of_another_size_is_a_bug(tier):
    for call in (tier.write, tier.read):
        with pytest.raises(StateError, match="a chunk of 5 bytes"):
            call(KEYS[0], memoryview(bytearray(5)))
    with pytest.raises(StateError, match="expected 32"):
        SealedTier(DictTier(1), b"short", SLOT)


# ---- a key that was changed ----------------------------------------------------------------------


@ON_SETS
def test_after_a_change_of_key_a_folder_starts_empty_and_whole(tmp_path, caplog, disks):
    tier = on_disks(tmp_path / "tier", disks)
    assert all(tier.write(key, content(key, SLOT)) for key in KEYS)
    tier.close()
    changed = on_disks(tmp_path / "tier", disks, key=OTHER_KEY)
    assert list(changed.recovered()) == []
    assert caplog.text.count("was the encryption key changed?") == 1
    assert changed.find(KEYS) == 0
    every = LAYOUT.keys(range(changed.capacity))
    assert all(changed.write(key, content(key, SLOT)) for key in every), "all of its room is free"
    assert all(read(changed, key) for key in every)
    changed.close()
    again = on_disks(tmp_path / "tier", disks, key=OTHER_KEY)
    assert len(again.recovered()) == len(every)
    again.close()


def test_of_several_disks_one_with_another_key_costs_its_own(tmp_path):
    for own, keys, place in ((KEY, KEYS[3:], tmp_path), (OTHER_KEY, KEYS[:3], tmp_path / "new")):
        tier = on_disks(place, (3,), key=own)
        assert all(tier.write(key, content(key, SLOT)) for key in keys)
        tier.close()
    (tmp_path / "new/disk0").rename(tmp_path / "disk1")
    tier = on_disks(tmp_path, (3, 3))
    assert sorted(tier.recovered()) == sorted(KEYS)
    assert [read(tier, key) for key in KEYS] == [False] * 3 + [True] * 3
    tier.close()


def test_a_shared_tier_is_not_judged_by_the_chunks_of_others():
    below = DictTier(16, shared=True)
    assert SealedTier(below, KEY, SLOT).write(KEYS[0], content(KEYS[0], SLOT))
    assert SealedTier(below, OTHER_KEY, SLOT).write(KEYS[1], content(KEYS[1], SLOT))
    ours = SealedTier(below, KEY, SLOT)
    assert list(ours.recovered()) == list(KEYS[:2])
    assert list(below.held) == list(KEYS[:2]), "nobody's chunks are deleted"


def test_one_damaged_chunk_is_not_taken_for_a_change_of_key(tmp_path):
    tier = on_disks(tmp_path / "tier")
    assert all(tier.write(key, content(key, SLOT)) for key in KEYS)
    tier.close(KEYS[::-1])
    flip(tmp_path / "tier/disk0" / SLOTS_NAME, 77)
    again = on_disks(tmp_path / "tier")
    assert sorted(again.recovered()) == sorted(KEYS)
    assert [read(again, key) for key in KEYS] == [False, *[True] * 5]
    again.close()


# ---- kvtier check --------------------------------------------------------------------------------


def test_check_needs_no_key_to_find_damage(tmp_path):
    tier = on_disks(tmp_path)
    assert all(tier.write(key, content(key, SLOT)) for key in KEYS)
    tier.close()
    report = check(tmp_path / "disk0")
    assert (report.slot_bytes, report.good, report.corrupt) == (SEALED, 6, 0)
    flip(tmp_path / "disk0" / SLOTS_NAME, 2 * SEALED + 5)
    report = check(tmp_path / "disk0")
    assert (report.good, report.corrupt) == (5, 1)


# ---- from the configuration ----------------------------------------------------------------------


def key_file(folder, text=None, mode=0o600):
    path = folder / "key"
    path.write_text((KEY.hex() if text is None else text) + "\n")
    path.chmod(mode)
    return str(path)


@pytest.fixture
def settings(tmp_path):
    return {"ram_bytes": 8 * SLOT} | section(tmp_path / "nvme", ONE, SEALED)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (KEY.hex(), 0o644, "open to every user: chmod 600"),
        (KEY.hex()[1:], 0o600, "63 characters that are not a key, expected 64 hexadecimal digits"),
        ("", 0o600, "openssl rand -hex 32"),
        ("x" * 64, 0o600, "are not a key"),
    ],
)
def test_a_key_file_that_is_none_is_refused_and_not_shown(tmp_path, settings, text, mode, words):
    with pytest.raises(ConfigError, match=words) as raised:
        assembled(LAYOUT, encryption_key_file=key_file(tmp_path, text, mode), **settings)
    assert not text or text not in str(raised.value)
    assert not (tmp_path / "nvme").exists()


def test_a_key_file_that_is_missing_is_refused(tmp_path, settings):
    with pytest.raises(ConfigError, match="encryption_key_file=/nowhere/key cannot be read"):
        assembled(LAYOUT, encryption_key_file="/nowhere/key", **settings)
    assert not (tmp_path / "nvme").exists()


def test_a_server_with_a_key_that_is_none_does_not_start():
    with short_folder() as folder:
        server = ServerProcess(folder, nvme_path=folder / "nvme", encryption_key="no key")
        assert "has 6 characters that are not a key" in server.refusal()


@pytest.mark.parametrize(
    ("given", "words"), [("", "has 0 characters"), (KEY.hex(), "two encryption keys")]
)
def test_a_variable_that_is_empty_or_one_too_many_is_refused(
    tmp_path, settings, monkeypatch, given, words
):
    monkeypatch.setenv(ENCRYPTION_KEY, given)
    both = key_file(tmp_path) if given else None
    with pytest.raises(ConfigError, match=words):
        assembled(LAYOUT, encryption_key_file=both, **settings)


def test_without_the_library_it_is_an_error_that_names_the_extra(tmp_path, settings, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvtier.tiers.sealed", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match=r"install 'cryptography>=\d+', or remove the key"):
        assembled(LAYOUT, encryption_key_file=key_file(tmp_path), **settings)


@pytest.mark.redis
@pytest.mark.parametrize(("way", "disks"), [("file", ONE), ("variable", TWO), ("file", FIVE)])
def test_a_server_keeps_nothing_readable_and_finds_it_again_with_the_same_key_only(way, disks):
    keys = run(1, 3)
    with short_folder() as folder, RedisServer() as redis:
        place: dict[str, Any] = section(folder, disks, SEALED)
        place |= {"redis_url": redis.url, "redis_bytes": 1 << 20, "patient": True}
        by_file = {"encryption_key_file": key_file(folder)}
        key = by_file if way == "file" else {"encryption_key": KEY.hex() + "\n"}
        server = ServerProcess(folder, **place, **key)
        with server, redis.admin() as behind, attached(server.access()) as client:
            save(client, keys)
            wait_for(
                lambda: client.stats().get("redis_held") == client.stats().get("nvme_held") == 3,
                "spilled",
            )
            below = [bytes(behind.get(name) or b"") for name in chunks_in(behind)]
            below += [each.read_bytes() for each in folder.glob(f"disk*/*/{SLOTS_NAME}")]
            assert len(below) == 6 + len(disks)
            assert not any(
                bytes(content(key, SLOT)[at : at + 64]) in one
                for key in keys
                for at in (0, SLOT // 2)
                for one in below
            )
            assert server.stop() == 0
            assert KEY.hex() not in server.said()
        with server, attached(server.access()) as client:
            assert load(client, keys) == ["nvme"] * 3
            assert server.stop() == 0
        other = ServerProcess(folder, **place, encryption_key=OTHER_KEY.hex())
        with other, attached(other.access()) as client:
            assert load(client, keys) == []
            assert save(client, keys) == 3
            assert "was the encryption key changed?" in other.said()
            with redis.admin() as behind:
                wait_for(
                    lambda: len(chunks_in(behind)) == 12,
                    "beside the first server's, under names of its own",
                )


def chunks_in(behind):
    """Names of chunks and of their parts, without the signs of who lives."""
    return [name for name in behind.scan_iter() if not name.endswith(b"{signed}")]


@ON_SETS
def test_switched_on_and_off_a_folder_starts_empty(tmp_path, settings, monkeypatch, disks):
    settings |= section(tmp_path, disks, SEALED)

    def held(*, encrypted):
        monkeypatch.setenv(ENCRYPTION_KEY, KEY.hex())
        if not encrypted:
            monkeypatch.delenv(ENCRYPTION_KEY)
        store = assembled(LAYOUT, **settings)
        found = store.stats()["nvme_held"]
        save(store, KEYS[:1])
        wait_for(lambda: store.stats()["nvme_held"] == 1, "spilled")
        assert store.close()
        return found

    assert [held(encrypted=on) for on in (False, False, True, True, False)] == [0, 1, 0, 1, 0]


def test_the_layouts_own_size_is_kept_to(tmp_path):
    """A chunk is not a whole number of pages. The Store's slots are, and so are sealed ones."""
    layout = ChunkLayout(bytes(32), 1, 1, (5000,))
    place = {"nvme_path": str(tmp_path), "nvme_bytes": 1 << 20}
    store = assembled(layout, ram_bytes=8 * SLOT, encryption_key_file=key_file(tmp_path), **place)
    save(store, layout.keys([1, 2]))
    wait_for(lambda: store.stats()["nvme_held"] == 2, "spilled")
    assert store.close()
    assert check(tmp_path).slot_bytes == layout.slot_bytes + PAGE_BYTES


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv(ENCRYPTION_KEY, raising=False)
