"""A library that lies to nobody but hangs, crashes, floods or is not there: what happens in its
process happens to no caller, and the next call starts another one."""

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.tiers.away.library_process import (
    HopelessError,
    Library,
    LibraryError,
    LibraryProcess,
    copied,
)
from tests.child_process import DEADLINE_S

pytestmark = pytest.mark.timeout(120)  # what should end is a hang otherwise

ROOM = 1 << 20
SECRET = "5ec3e75ec3e7"
LIBRARY = """
import os, resource, signal, sys, time

class Calls:
    def __init__(self, memory, room):
        self.memory, self.room = memory, room

    def pid(self, seat):
        return os.getpid()

    def doubled(self, seat, length):
        place = seat * self.room
        self.memory[place : place + length] = bytes(2 * b for b in self.memory[place:][:length])

    def takes(self, seat, size):
        return len(bytearray(size))

    def hangs(self, seat):
        time.sleep(60)

    def interrupts(self, seat):
        os.kill(os.getppid(), signal.SIGALRM)
        time.sleep(60)

    def halves(self, seat):
        os.write(int(sys.argv[4 + seat]), bytes([0, 0, 1, 0, 1]))
        time.sleep(60)

    def floods(self, seat):
        return "x" * (2 << 20)

    def nothing(self, seat, name):
        pass

    def core(self, seat):
        return resource.getrlimit(resource.RLIMIT_CORE)

    def crashes(self, seat):
        os.abort()

    def raises(self, seat):
        raise ValueError("x" * (64 << 20))

    def secret(self, seat):
        with open("/proc/self/cmdline") as words:
            return [os.environ["SECRET"], words.read()]

    def close(self):
        pass

def begin(setup, memory, room):
    if setup == "hangs":
        time.sleep(60)
    if setup != "well":
        raise RuntimeError(setup)
    return Calls(memory, room)
"""


CALLER = """
import os, sys, time
from kvtier.tiers.away.library_process import Library, LibraryProcess
library = Library("the trial", sys.argv[1], sys.executable, lambda: "well", 20.0)
with LibraryProcess(library, 4096, 1, 20.0, dict(os.environ)).seat() as (ask, _):
    pid = ask("pid")
fork = os.fork()
if fork:
    print(pid, fork, flush=True)
time.sleep(600)
"""


@contextmanager
def process(folder, *, setup="well", source=LIBRARY, limit_s=20.0, begin_s=20.0):
    (file := folder / "library.py").write_text(source)
    library = Library("the trial", str(file), sys.executable, lambda: setup, begin_s, 192 << 20)
    made = LibraryProcess(library, ROOM, 2, limit_s, {**os.environ, "SECRET": SECRET})
    yield made
    made.close()


def asked(library, *what):
    with library.seat() as (ask, _):
        return ask(*what)


def test_a_chunk_crosses_by_memory_and_calls_beside_it_have_their_own(tmp_path):
    with (
        process(tmp_path) as library,
        library.seat() as (ask, memory),
        library.seat() as (other, theirs),
    ):
        copied(b"\1\2", memory), copied(b"\3\4", theirs)
        ask("doubled", 2), other("doubled", 2)
        assert (bytes(memory[:2]), bytes(theirs[:2])) == (b"\2\4", b"\6\10")


@pytest.mark.parametrize(
    ("end", "limit_s"), [("crashes", 20.0), ("floods", 20.0), ("hangs", 2.0), ("halves", 2.0)]
)
def test_a_call_that_ends_or_holds_the_process_is_a_fault_and_the_next_one_is_well(
    tmp_path, end, limit_s
):
    """It may stop in the middle of its answer, or answer without end."""
    with process(tmp_path, limit_s=limit_s) as library:
        first = asked(library, "pid")
        with pytest.raises(LibraryError):
            asked(library, end)
        assert not Path(f"/proc/{first}").exists()
        assert asked(library, "pid") != first


def test_a_process_that_takes_no_question_is_a_fault_and_the_next_one_is_well(tmp_path):
    with process(tmp_path, limit_s=2.0) as library:
        first = asked(library, "pid")
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(LibraryError):
            asked(library, "nothing", "x" * (4 << 20))
        assert asked(library, "pid") != first


def test_the_answer_to_a_call_that_was_broken_off_is_nobodys(tmp_path):
    def break_off(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, break_off)
    try:
        with process(tmp_path) as library:
            first = asked(library, "pid")
            with library.seat() as (ask, _), pytest.raises(KeyboardInterrupt):
                ask("interrupts")
            assert asked(library, "pid") != first
    finally:
        signal.signal(signal.SIGALRM, before)


def test_who_finds_all_calls_taken_waits_for_a_bounded_time(tmp_path):
    with (
        process(tmp_path, limit_s=0.2) as library,
        library.seat(),
        library.seat(),
        pytest.raises(LibraryError, match="all calls wait for the trial's client"),
    ):
        asked(library, "pid")


def test_it_ends_with_a_caller_that_is_killed_though_a_fork_of_it_lives(tmp_path):
    """The fork holds the ends of all sockets open."""
    (file := tmp_path / "library.py").write_text(LIBRARY)
    words = [sys.executable, "-c", CALLER, str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pid, fork = map(int, caller.stdout.readline().split())
        (ended := select.poll()).register(descriptor := os.pidfd_open(pid), select.POLLIN)
        caller.kill()
        try:
            assert ended.poll(1000 * DEADLINE_S), "it lives on"
        finally:
            os.close(descriptor)
            os.kill(fork, signal.SIGKILL)


def test_a_crash_leaves_no_copy_of_chunks_on_the_disk(tmp_path):
    with process(tmp_path) as library:
        assert asked(library, "core") == [0, 0]


def test_more_memory_than_its_limit_is_not_there(tmp_path):
    with process(tmp_path) as library:
        assert asked(library, "takes", 64 << 20) == 64 << 20
        with pytest.raises(LibraryError, match="MemoryError"):
            asked(library, "takes", 256 << 20)


def test_of_an_error_however_long_only_the_beginning_is_told_and_never_in_a_message(tmp_path):
    with process(tmp_path) as library:
        with pytest.raises(LibraryError, match=r"library fails \(ValueError\)$") as raised:
            asked(library, "raises")
        assert (raised.value.kind, len(raised.value.text)) == ("ValueError", 16 << 10)
        assert asked(library, "pid"), "an error ends nothing"


def test_secrets_go_in_the_environment_and_not_on_the_command_line(tmp_path):
    with process(tmp_path) as library:
        secret, words = asked(library, "secret")
        assert secret == SECRET and SECRET not in words


@pytest.mark.parametrize(
    ("setup", "source", "words"),
    [
        ("no such bucket", LIBRARY, "no such bucket"),
        ("well", "import no_such_library", "library is not complete here .*no_such_library"),
    ],
)
def test_a_library_that_does_not_start_says_why(tmp_path, setup, source, words):
    with (
        process(tmp_path, setup=setup, source=source) as library,
        pytest.raises(HopelessError, match=words),
    ):
        asked(library, "pid")


def test_a_library_that_begins_without_end_is_given_up(tmp_path):
    with (
        process(tmp_path, setup="hangs", begin_s=1.0) as library,
        pytest.raises(LibraryError, match="no answer in 1 s"),
    ):
        asked(library, "pid")


def test_nothing_is_asked_after_its_end_and_no_process_is_left(tmp_path):
    with process(tmp_path) as library:
        pid = asked(library, "pid")
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(LibraryError, match="it is closed"):
        asked(library, "pid")
