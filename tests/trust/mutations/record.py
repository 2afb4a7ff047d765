"""What a recording tells, that nobody waits for it, and that a replay compares."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "recorder": (*PYTEST, "tests/unit/record", "tests/property/test_record_rotation.py"),
        "recorded": (*PYTEST, "tests/integration/test_record_replay.py"),
    },
    (
        Mutant(
            "store/observers/record/recorder.py",
            "        digest = blake2b(name, key=self._salt, digest_size=_ID_BYTES).digest()\n",
            "        digest = blake2b(name, digest_size=_ID_BYTES).digest()\n",
            "ids of two recordings can be joined",
        ),
        Mutant(
            "store/observers/record/recorder.py",
            "        if len(self._waiting) >= _MOST_WAITING or keys >= _MOST_KEYS:\n",
            "        if len(self._waiting) >= _MOST_WAITING:\n",
            "long prompts that wait to be written take memory without a bound",
        ),
        Mutant(
            "store/observers/record/folder.py",
            "                os.ftruncate(self._file, self._size)\n",
            "",
            "a full disk leaves half a line in a trace",
        ),
        Mutant(
            "store/observers/record/folder.py",
            "            self._path.stat()  # a removed file would lose its lines\n",
            "            pass\n",
            "lines that go into a removed file are counted as recorded",
        ),
        Mutant(
            "store/observers/record/folder.py",
            "            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            "",
            "two engines remove each other's recordings",
        ),
        Mutant(
            "store/observers/record/folder.py",
            "        while self._ended and self._held + self._size + count > self._most_bytes:\n",
            "        while self._ended and self._held > self._most_bytes:\n",
            "a recording takes more of the disk than its bound",
        ),
        Mutant(
            "store/observers/record/folder.py",
            '                self._lock = folder.open("salt", os.O_RDWR, make=True)',
            '                self._lock = os.open(path / "salt", os.O_RDWR | os.O_CREAT, 0o600)',
            "a salt that is a link or another user's is believed and written",
        ),
        Mutant(
            "store/observers/record/folder.py",
            "if _OURS.fullmatch(entry.name) and",
            'if entry.name.startswith("requests-") and',
            "a file of another name ends the recording",
        ),
        Mutant(
            "store/store.py",
            "        if not asker.again:\n",
            "        if True:\n",
            "a request that asks again is recorded as another prompt",
        ),
        Mutant(
            "store/observers/record/recorder.py",
            "        self.release(_LONGEST_OPEN_S)\n",
            "",
            "a prompt whose end is lost is never written",
        ),
        Mutant(
            "store/observers/record/recorder.py",
            "                    if len(self._open) > _MOST_OPEN:\n"
            "                        _, left = self._open.popitem(last=False)\n",
            "",
            "prompts whose ends are lost take memory without a bound",
        ),
        Mutant(
            "store/observers/record/recorder.py",
            " if item.ended.stop in STOPS else STOPS[-1]",
            "",
            "a word of an engine that nobody knows gets into the trace",
        ),
        Mutant(
            "server/session.py",
            "        return self._number << 32 | number\n",
            "        return number\n",
            "the end of one engine's request is told of another engine's",
        ),
        Mutant(
            "store/observers/record/folder.py",
            "        self._recorder.release()\n",
            "",
            "prompts whose requests run when a server stops are lost",
        ),
        Mutant(
            "server/session.py",
            "                    question.again,\n",
            "",
            "a server takes each question of a waiting request for another prompt",
        ),
        Mutant(
            "store/observers/record/folder.py",
            "        self.write_all()\n        self._end()\n",
            "        self._end()\n",
            "what was noted last is lost when a server stops",
        ),
        Mutant(
            "bench/traces/replay.py",
            '                    found["wrong"] += int(np.count_nonzero(differing))\n',
            '                    found["wrong"] += 0\n',
            "a replay says that wrong bytes are right",
        ),
    ),
)
