"""The background work for prompts and hints is done in pieces, whatever their length. Work is
counted, not timed: each lookup and each move of a chunk asks for its key's hash."""

import pytest

from kvtier.core.chunk import ChunkKey
from kvtier.core.lookup import ANONYMOUS
from kvtier.core.steps import PIECE_CHUNKS
from kvtier.eviction.adaptive import Adaptive
from kvtier.eviction.hints import Hint
from kvtier.eviction.order import Segments
from kvtier.store.directory import Directory
from kvtier.store.observers.follower import Follower
from tests.clock import Clock

MOST = 16 * PIECE_CHUNKS
"""Hashes in one piece: that of 128 chunks, each looked up, moved and stored, where others make room
and are remembered."""
LONG = 40 * PIECE_CHUNKS


class Key(bytes):
    hashes = 0

    def __hash__(self):
        Key.hashes += 1
        return super().__hash__()


def keys(name, count):
    return [ChunkKey(Key(name.to_bytes(20) + number.to_bytes(20))) for number in range(count)]


class Watch:
    """A lock that knows for how many hashes it was held at most, and the same of pieces."""

    def __init__(self):
        self.held = self.longest = self._locked = self._begun = 0

    def __enter__(self):
        self._locked = Key.hashes

    def __exit__(self, kind, error, traceback):
        self.held = max(self.held, Key.hashes - self._locked)

    def pause(self):
        self.longest, self._begun = max(self.longest, Key.hashes - self._begun), Key.hashes

    def begin(self):
        self.held = self.longest = 0
        self._begun = Key.hashes


class Place:
    """RAM for so many chunks above another place, and the work for its prompts."""

    def __init__(self, room):
        self.watch, self.adaptive = Watch(), Adaptive()
        self.directory = Directory(room, (4 * room,), self.adaptive, lower=(Segments,))
        rooms = {"ram": room, "nvme": 4 * room}
        self.follower = Follower(self.directory, self.watch, self.adaptive, Clock(), rooms)

    def work(self):
        """On all that waits. Returns the hashes in the longest piece."""
        self.watch.begin()
        while self.follower.work(self.watch.pause):
            self.watch.pause()
        self.watch.pause()
        return self.watch.longest

    def prompt(self, run):
        self.follower.prompt(run, ANONYMOUS)
        return self.work()


@pytest.mark.parametrize("rule", [0, 1])
def test_no_piece_of_the_work_for_a_prompt_grows_with_its_length(rule):
    place, long = Place(2048), keys(1, LONG)
    for number in range(400):
        place.prompt(keys(100 + number, 8))
    place.adaptive.places[0][1].now = rule
    for run in (long, long, long[: LONG // 2] + keys(2, LONG), long[::2], keys(3, 1)):
        assert place.prompt(run) < MOST
        place.follower.hint(run, "", Hint(over=True))
        assert place.work() < MOST
