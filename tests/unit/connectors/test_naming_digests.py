"""Digests of whole files: every byte counts, a second start reads nothing, and a record that is not
surely the file's is none."""

import hashlib
import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from kvtier.connectors.vllm.naming import digests
from kvtier.connectors.vllm.naming.digests import DigestError, FileDigests, content_files

SIZE = 1 << 20
LATER_S = 3600.0


class Counted(FileDigests):
    """Counts what is read. Its clock stands an hour after the files were written."""

    def __init__(self, folder, later_s=LATER_S):
        super().__init__(folder, lambda: os.stat(folder.parent).st_ctime + later_s)
        self.read = 0

    def _read(self, file, descriptor, before):
        self.read += 1
        return super()._read(file, descriptor, before)


@pytest.fixture
def model(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (place / name).write_bytes(name.encode() * (SIZE // 16))
    return place


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept"


def digest(made, place):
    return made.begin(content_files(place), place).result(60)


@pytest.mark.parametrize("at", [0, 1, 4096, SIZE // 2, SIZE - 1])
def test_every_byte_counts(model, kept, at):
    file = model / "model-2.safetensors"
    before = digest(FileDigests(kept), model)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert digest(FileDigests(kept), model) != before


def test_names_count_and_places_do_not(model, kept, tmp_path):
    before = digest(FileDigests(kept), model)
    model.rename(tmp_path / "elsewhere")
    assert digest(FileDigests(kept), tmp_path / "elsewhere") == before
    (tmp_path / "elsewhere" / "model-1.safetensors").rename(tmp_path / "elsewhere" / "a.bin")
    assert digest(FileDigests(kept), tmp_path / "elsewhere") != before


def test_a_second_start_reads_nothing(model, kept):
    first, second = Counted(kept), Counted(kept)
    assert digest(first, model) == digest(second, model)
    assert (first.read, second.read) == (2, 0)


def test_a_forked_process_reads_with_threads_of_its_own(model, kept):
    """As vLLM's, whose parent may have begun."""
    made = Counted(kept)
    whole = digest(made, model)

    def child():
        (model / "more.safetensors").write_bytes(b"more")
        os._exit(digest(made, model) == whole)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_file_that_has_just_changed_is_not_kept(model, kept):
    first, second = Counted(kept, later_s=0.0), Counted(kept)
    assert digest(first, model) == digest(second, model)
    assert second.read == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(b"X" * file.stat().st_size),
        lambda file: file.chmod(0o640),
        lambda file: os.utime(file, ns=(1, 1)),
        lambda file: _replaced(file),  # noqa: PLW0108 it is defined below
    ],
    ids=["written over", "rights", "time", "another file"],
)
def test_a_file_that_is_not_surely_the_same_is_read_again(model, kept, change):
    digest(Counted(kept), model)
    change(model / "model-1.safetensors")
    again = Counted(kept)
    digest(again, model)
    assert again.read == 1


def _replaced(file):
    content, stamp = file.read_bytes(), file.stat()
    new = file.with_suffix(".new")
    new.write_bytes(content)
    os.utime(new, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    new.replace(file)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.write_bytes(b""),
        lambda record: record.write_bytes(b"\xff" * 5000),
        lambda record: record.write_text("[]"),
        lambda record: _edit(record, sha256="0" * 64),
        lambda record: _edit(record, machine="another", whole=True),
        lambda record: _edit(record, file=[1, 2, 3, 4, 5], whole=True),
        lambda record: record.chmod(0o666),
        lambda record: record.unlink(),
    ],
    ids=["empty", "garbage", "no object", "edited", "machine", "file", "writable", "gone"],
)
def test_a_record_that_is_damaged_or_foreign_is_none(model, kept, damage):
    right = digest(Counted(kept), model)
    for record in kept.iterdir():
        damage(record)
    again = Counted(kept)
    assert digest(again, model) == right
    assert again.read == 2


def _edit(record, *, whole=False, **changed):
    """``whole``: with a checksum that agrees, as an honest writer on another machine makes it."""
    told = json.loads(record.read_text()) | changed
    if whole:
        told["check"] = digests._check(told["file"], told["machine"], told["sha256"])
    record.write_text(json.dumps(told))


def test_a_folder_that_others_may_write_is_not_used(model, kept):
    right = digest(Counted(kept), model)
    kept.chmod(0o777)
    again = Counted(kept)
    assert digest(again, model) == right
    assert again.read == 2


def test_without_a_folder_digests_are_made_all_the_same(model, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert digest(FileDigests(blocked / "below"), model) == digest(
        FileDigests(tmp_path / "kept"), model
    )


def test_records_are_bounded(model, kept, monkeypatch):
    monkeypatch.setattr(digests, "_MOST_RECORDS", 1)
    digest(Counted(kept), model)
    assert len([one for one in kept.iterdir() if not one.suffix]) == 1


def test_two_engines_that_start_at_once_read_once(model, kept):
    begun, go = threading.Event(), threading.Event()

    class Slow(Counted):
        def _read(self, file, descriptor, before):
            begun.set()
            assert go.wait(60)
            return super()._read(file, descriptor, before)

    file = [model / "model-1.safetensors"]
    first, second = Slow(kept), Counted(kept)
    one = first.begin(file, model)
    assert begun.wait(60)
    other = second.begin(file, model)
    go.set()
    assert one.result(60) == other.result(60)
    assert (first.read, second.read) == (1, 0)


class TestFailures:
    def test_a_file_that_changes_while_it_is_read(self, model, kept, monkeypatch):
        readv = os.readv

        def writes(*told):
            with (model / "model-1.safetensors").open("ab") as stream:
                stream.write(b"more")
            return readv(*told)

        monkeypatch.setattr(os, "readv", writes)
        with pytest.raises(DigestError, match=r"model-1\.safetensors changed while it was read"):
            digest(FileDigests(kept), model)

    def test_a_file_that_may_not_be_read(self, model, kept, monkeypatch):
        def refuses(self, *told, **more):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuses)
        with pytest.raises(DigestError, match="Permission denied"):
            digest(FileDigests(kept), model)

    def test_a_file_that_is_gone(self, model, kept):
        with pytest.raises(DigestError, match="No such file"):
            FileDigests(kept).begin([model / "gone"], model)

    def test_something_that_is_no_file(self, model, kept):
        (model / "model-1.safetensors").unlink()
        (model / "model-1.safetensors").symlink_to("/dev/zero")
        with pytest.raises(DigestError, match="is no file"):
            digest(FileDigests(kept), model)

    def test_a_folder_of_too_many_files(self, model, monkeypatch):
        monkeypatch.setattr(digests, "_MOST_FILES", 1)
        with pytest.raises(DigestError, match="more than 1 files"):
            content_files(model)


class TestWhichFiles:
    @pytest.mark.parametrize(
        "name",
        ["preprocessor_config.json", "modeling_own.py", "quantize_config.json", "video.json",
         "model.safetensors.index.json", "whatever.xyz", "audio/mel.json"],
    )  # fmt: skip
    def test_whatever_is_not_known_to_do_nothing_counts(self, model, name):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
        assert model / name in content_files(model)

    @pytest.mark.parametrize(
        "name",
        ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
         "generation_config.json", "README.md", "LICENSE", ".gitattributes", ".cache/x.json",
         "original/consolidated.00.pth", "onnx/model.onnx", "vocab.json", "merges.txt"],
    )  # fmt: skip
    def test_what_decides_tokens_or_is_read_by_others_does_not(self, model, name):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
        assert model / name not in content_files(model)

    def test_one_file_is_itself(self, model, kept):
        file = model / "model-1.safetensors"
        assert content_files(file) == [file]
        assert len(digest(FileDigests(kept), file)) == 64


def test_the_digest_of_one_file_is_plain_sha256(model, kept):
    """An operator can compare it with ``sha256sum``."""
    digest(Counted(kept), model)
    told = {json.loads(one.read_text())["sha256"] for one in kept.iterdir()}
    assert told == {hashlib.sha256(file.read_bytes()).hexdigest() for file in model.iterdir()}
