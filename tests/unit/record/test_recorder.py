"""The recorder: what it writes, what it never writes, and that nobody waits for it."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.assemble import assemble_store
from kvtier.bench.traces.mooncake import lines_of, read
from kvtier.cli.main import main
from kvtier.cli.vllm_command import API_SERVER
from kvtier.config.keys import Config
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.errors import ConfigError
from kvtier.core.lookup import Asker, Ended
from kvtier.eviction.hints import Hint
from kvtier.started import Started
from kvtier.store.observers.record import Recorder, RecordFolder, RecordWriter, write_on_lane
from kvtier.testing import ManualLane
from tests.clock import Clock

SLOT = 4096
LAYOUT = ChunkLayout(fingerprint({"model": "record"}), 1, 1, (SLOT,))


def run(prompt, length=3):
    return LAYOUT.keys([prompt, *range(length - 1)])


class Recording:
    """A recorder whose lane works when it is told to."""

    def __init__(self, path):
        self.path, self.clock, self.lane = path, Clock(), ManualLane(bound=1)
        self.folder = RecordFolder(path)
        self.recorder = Recorder(self.folder.salt, self.clock)
        self.writer = RecordWriter(self.recorder, self.folder, self.clock)
        write_on_lane(self.recorder, self.writer, self.lane)

    def prompt(self, keys, **asker):
        self.recorder.prompt(keys, Asker(**asker))

    def lines(self):
        return [json.loads(line) for line in lines_of(str(self.path))]

    def trace(self):
        return list(read(lines_of(str(self.path))))

    def counts(self):
        return self.recorder.counts["recorded"], self.recorder.counts["unrecorded"]


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path / "record")


def test_a_prompt_is_one_line_of_mooncakes_form(recording):
    recording.clock.now = 1_700_000_000.25
    recording.prompt(run(1), session="mine", tokens=700)
    recording.prompt(run(2, 2))
    recording.lane.run()
    first, second = recording.lines()
    assert (first["timestamp"], first["input_length"]) == (1_700_000_000_250, 700)
    assert len(first["hash_ids"]) == 3 and all(0 <= each < 2**64 for each in first["hash_ids"])
    assert "input_length" not in second and "session" not in second
    assert recording.counts() == (2, 0)


def test_a_trace_says_which_prompts_share_chunks_and_sessions(recording):
    longer = [*run(1), *run(9)]
    for keys, session in ((run(1), "a"), (longer, "a"), (run(1), "b")):
        recording.prompt(keys, session=session, tokens=1700)
    recording.lane.run()
    one, two, three = recording.trace()
    assert [len(request.run) for request in (one, two, three)] == [3, 6, 3], "none is cut off"
    assert two.run[:3] == one.run == three.run
    assert one.session == two.session != three.session


def test_nothing_that_is_written_can_be_joined_with_keys_or_names(recording, tmp_path):
    other = Recording(tmp_path / "other")
    for each in (recording, other):
        each.prompt(run(1), session="alice@example.org")
        each.lane.run()
    written = b"".join(path.read_bytes() for path in recording.path.glob("*.jsonl"))
    for key in run(1):
        assert key.hex().encode() not in written
        assert str(int.from_bytes(key[:8], "big")).encode() not in written
        assert str(int.from_bytes(key[:8], "little")).encode() not in written
    assert b"alice" not in written
    ours, theirs = recording.lines()[0], other.lines()[0]
    assert not set(ours["hash_ids"]) & set(theirs["hash_ids"]), "each folder has a salt of its own"
    assert ours["session"] != theirs["session"]
    assert {path.stat().st_mode & 0o777 for path in recording.path.iterdir()} == {0o600}


def test_another_start_goes_on_with_the_same_ids(recording):
    recording.prompt(run(1))
    assert recording.recorder.close(1.0)
    again = Recording(recording.path)
    again.clock.now = 5.0
    again.prompt(run(1))
    again.lane.run()
    one, two = again.trace()
    assert one.run == two.run


def test_a_hint_is_about_its_own_prompt(recording):
    recording.prompt(run(1))
    recording.recorder.hint([*run(1), *run(8)], "", Hint(over=True))
    recording.recorder.hint((), "mine", Hint(keep_s=60.0))
    recording.lane.run()
    prompt, over, keep = recording.trace()
    assert over.about is not None
    assert (over.run, over.hint.over, over.about[:3]) == ((), True, prompt.run)
    assert (keep.hint.over, keep.about, keep.session != "") == (False, (), True)
    assert recording.lines()[2]["keep_s"] == 60.0


def test_a_full_queue_drops_and_counts(recording):
    for number in range(5000):
        recording.prompt(run(number, 1))
    recording.lane.run()
    assert recording.counts() == (4096, 904)
    recording.prompt(run(1, 300_000))
    recording.prompt(run(2))
    assert recording.counts() == (4096, 905), "keys have a bound too"
    recording.lane.run()
    recording.prompt(run(2))
    recording.lane.run()
    assert recording.counts() == (4098, 905)


def test_a_disk_that_is_full_costs_lines_and_leaves_no_half_ones(recording, monkeypatch):
    write, full = os.write, [False]

    def writes(descriptor, data):
        if full[0]:
            full[0] = len(data) > 1
            if not full[0]:
                raise OSError(errno.ENOSPC, "no space left on device")
            return write(descriptor, data[: len(data) // 2])
        return write(descriptor, data)

    recording.prompt(run(1))
    recording.lane.run()
    monkeypatch.setattr("kvtier.store.observers.record.os.write", writes)
    full[0] = True
    recording.prompt(run(2))
    recording.lane.run()
    recording.clock.now = 1.0
    recording.prompt(run(3))
    recording.lane.run()
    assert recording.counts() == (2, 1)
    assert len(recording.trace()) == 2


def test_a_folder_that_is_removed_costs_lines_until_it_is_back(recording):
    recording.prompt(run(1))
    recording.lane.run()
    shutil.rmtree(recording.path)
    for _ in range(2):
        recording.prompt(run(2))
        recording.lane.run()
    assert recording.counts() == (1, 2)
    recording.path.mkdir(0o700)
    recording.prompt(run(3))
    recording.lane.run()
    assert recording.counts() == (2, 2)
    assert len(recording.trace()) == 1


def store_of(config):
    return assemble_store(Started(config), LAYOUT)


def test_an_engine_records_each_request_once(tmp_path):
    store = store_of(Config().with_keys(ram_bytes=64 * SLOT, record=str(tmp_path / "record")))
    store.load(run(1), asker=Asker("mine", 900)).close()
    for _ in range(3):
        store.load(run(1), asker=Asker("mine", 900, again=True)).close()
    store.hint(run(1), Hint(over=True), "mine")
    assert store.close()
    prompt, hint = read(lines_of(str(tmp_path / "record")))
    assert (len(prompt.run), hint.about) == (3, prompt.run)
    assert store.stats()["recorded"] == 2


def test_how_a_request_ended_is_in_the_line_of_its_prompt(recording):
    for number in (1, 2, 3):
        recording.prompt(run(number), request=number)
        recording.clock.now += 1
    recording.lane.run()
    assert recording.lines() == [], "they wait for their ends"
    recording.recorder.finished(Ended(2, 31, "length"))
    words: Any = "a sentence of a user's"
    recording.recorder.finished(Ended(1, 0, words))
    recording.recorder.finished(Ended(77, 5, "stop"))
    recording.lane.run()
    ends = [(one["output_length"], one["stop"]) for one in recording.lines()]
    assert ends == [(31, "length"), (0, "other")]
    assert recording.recorder.close(1.0)
    told = sorted(recording.trace(), key=lambda request: request.at)
    found = [(one.at, one.output, one.stop) for one in told]
    assert found == [(0.0, 0, "other"), (1.0, 31, "length"), (2.0, None, "")]


def test_a_prompt_whose_end_is_not_told_is_written_without_it(recording):
    recording.prompt(run(1), request=1)
    recording.clock.now = 601.0
    recording.prompt(run(2))
    recording.lane.run()
    assert len(recording.lines()) == 2, "it is too old"
    for number in range(1, 1100):
        recording.prompt(run(number, 1), request=number)
    recording.lane.run()
    assert len(recording.lines()) == 2 + 1099 - 1024, "too many wait"
    recording.prompt(run(3), request=1099)
    recording.lane.run()
    assert len(recording.lines()) == 3 + 1099 - 1024, "it came again"
    assert recording.recorder.close(1.0)
    assert len(recording.lines()) == 3 + 1099
    assert recording.counts() == (1102, 0)


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path):
    store = store_of(Config().with_keys(ram_bytes=64 * SLOT))
    store.load(run(1)).close()
    assert "recorded" not in store.stats()
    assert store.close()


@pytest.mark.parametrize("place", ["a file", "a folder of others", "somebody records there"])
def test_a_folder_that_cannot_be_written_ends_the_start_in_words(
    place, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "record"
    if place == "a file":
        path.write_text("")
    elif place == "a folder of others":
        path = Path("/proc/1/record")
    else:
        held = RecordFolder(path)
    config = Config().with_keys(ram_bytes=64 * SLOT, record=str(path))
    for start in (store_of, lambda config: Started(config).require_record()):
        with pytest.raises(ConfigError, match=f"record={path}"):
            start(config)
    monkeypatch.setenv("KVTIER_RECORD", str(path))
    monkeypatch.setenv("KVTIER_RAM_BYTES", "1MiB")
    monkeypatch.setenv("KVTIER_ADMIN", "off")
    for words in (
        ["launch", "--print", "--", "python3", "-m", API_SERVER, "--model", "m"],
        ["serve", "--listen", f"unix://{tmp_path}/run/s.sock"],
    ):
        assert main(words) == 2
        assert f"record={path}" in capsys.readouterr().err
    if place == "somebody records there":
        held.close()
        Started(config).require_record()


VICTIM, STRANGER = b"somebody's own file", 65534
PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file of ours": lambda salt, victim: salt.symlink_to(victim),
    "a link to a file that would be made": lambda salt, _: salt.symlink_to(
        salt.parent.parent / "no"
    ),
    "a second name of a file of ours": lambda salt, victim: salt.hardlink_to(victim),
    "a salt that all may read": lambda salt, _: os.close(os.open(salt, os.O_CREAT, 0o644)),
    "a folder that all may write": lambda salt, _: salt.parent.chmod(0o777),
    "a stranger's folder": lambda salt, _: os.chown(salt.parent, STRANGER, STRANGER),
    "a stranger's salt": lambda salt, _: os.chown(salt, STRANGER, STRANGER),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_folder_that_is_not_ours_alone_is_refused_and_left_alone(planted, tmp_path):
    if "stranger" in planted and os.geteuid():
        pytest.skip("only root can give a file to another user")
    path, victim = tmp_path / "record", tmp_path / "victim"
    path.mkdir(0o700)
    victim.write_bytes(VICTIM)
    victim.chmod(0o600)
    if planted == "a stranger's salt":
        (path / "salt").touch(0o600)
    PLANTED[planted](path / "salt", victim)
    with pytest.raises(ConfigError, match=f"record={path}"):
        RecordFolder(path)
    assert victim.read_bytes() == VICTIM and not (tmp_path / "no").exists()
    assert {each.name for each in path.iterdir()} <= {"salt"}


def test_files_of_other_names_are_left_alone_and_recording_goes_on(tmp_path):
    path = tmp_path / "record"
    path.mkdir(0o700)
    *odd, link = (path / f"requests-{name}.jsonl" for name in ("zzz", "", "000000000000001"))
    for each in odd:
        each.touch()
    link.symlink_to(path / "nowhere")
    odd.append(link)
    recording = Recording(path)
    recording.prompt(run(1))
    recording.lane.run()
    assert (recording.counts(), recording.writer.trouble) == ((1, 0), "")
    ours = [each for each in path.glob("requests-*.jsonl") if each not in odd]
    assert len(ours) == 1 and len(ours[0].read_text().splitlines()) == 1
    assert all(each.is_symlink() or each.exists() for each in odd)


def test_a_folder_that_others_may_write_meanwhile_costs_lines_and_is_told(recording):
    recording.path.chmod(0o777)
    recording.prompt(run(1))
    recording.lane.run()
    assert recording.counts() == (0, 1)
    assert "chmod 700" in recording.writer.trouble
    recording.path.chmod(0o700)
    recording.prompt(run(2))
    recording.lane.run()
    assert (recording.counts(), recording.writer.trouble) == ((1, 1), "")


def test_whatever_is_wrong_with_a_file_never_ends_the_recording(recording, monkeypatch):
    def fails(*_):
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(recording.folder.rotation, "place", fails)
        recording.prompt(run(1))
        recording.lane.run()
    assert "a bug" in recording.writer.trouble
    recording.prompt(run(2))
    recording.lane.run()
    assert (recording.counts(), recording.writer.trouble) == ((1, 1), "")


def test_replicas_have_folders_of_their_own(tmp_path):
    config = Config().with_keys(ram_bytes=64 * SLOT, record=str(tmp_path / "record"))
    stores = [assemble_store(Started(config), LAYOUT, replica) for replica in range(2)]
    for store in stores:
        store.load(run(1)).close()
        assert store.close()
    assert len(list((tmp_path / "record" / "replica1").glob("*.jsonl"))) == 1
