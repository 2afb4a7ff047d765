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
            "Recorder._id",
            "blake2b(name, key=self._salt, digest_size=_ID_BYTES)",
            "blake2b(name, digest_size=_ID_BYTES)",
            "ids of two recordings can be joined",
        ),
        Mutant(
            "Recorder._has_room",
            "len(self._waiting) >= _MOST_WAITING or keys >= _MOST_KEYS",
            "len(self._waiting) >= _MOST_WAITING",
            "long prompts that wait to be written take memory without a bound",
        ),
        Mutant(
            "RecordWriter._undo",
            "os.ftruncate(self._file, self._size)",
            "",
            "a full disk leaves half a line in a trace",
        ),
        Mutant(
            "RecordWriter._write",
            "self._path.stat()",
            "pass",
            "lines that go into a removed file are counted as recorded",
        ),
        Mutant(
            "RecordFolder.__init__",
            "fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "",
            "two engines remove each other's recordings",
        ),
        Mutant(
            "Rotation.place",
            "self._held + self._size + count",
            "self._held",
            "a recording takes more of the disk than its bound",
        ),
        Mutant(
            "RecordFolder.__init__",
            "folder.open('salt', os.O_RDWR, make=True)",
            "os.open(path / 'salt', os.O_RDWR | os.O_CREAT, 384)",
            "a salt that is a link or another user's is believed and written",
        ),
        Mutant(
            "RecordFolder.__init__",
            "_OURS.fullmatch(entry.name)",
            "entry.name.startswith('requests-')",
            "a file of another name ends the recording",
        ),
        Mutant(
            "Store._note_prompt",
            "not asker.again",
            "True",
            "a request that asks again is recorded as another prompt",
        ),
        Mutant(
            "Recorder.take",
            "self.release(_LONGEST_OPEN_S)",
            "",
            "a prompt whose end is lost is never written",
        ),
        Mutant(
            "Recorder.prompt",
            "if len(self._open) > _MOST_OPEN:\n    ...",
            "",
            "prompts whose ends are lost take memory without a bound",
        ),
        Mutant(
            "Recorder._document",
            "item.ended.stop if item.ended.stop in STOPS else STOPS[-1]",
            "item.ended.stop",
            "a word of an engine that nobody knows gets into the trace",
        ),
        Mutant(
            "Session._request",
            "self._number << 32 | number",
            "number",
            "the end of one engine's request is told of another engine's",
        ),
        Mutant(
            "RecordWriter.close",
            "self._recorder.release()",
            "",
            "prompts whose requests run when a server stops are lost",
        ),
        Mutant(
            "Session._load",
            "Asker(owners_session(self._owner, question.session), question.tokens, "
            "question.again, question.request and self._request(question.request), "
            "self._owner)",
            "Asker(owners_session(self._owner, question.session), question.tokens, "
            "question.request and self._request(question.request), self._owner)",
            "a server takes each question of a waiting request for another prompt",
        ),
        Mutant(
            "RecordWriter.close",
            "self.write_all()",
            "",
            "what was noted last is lost when a server stops",
        ),
        Mutant(
            "Replay._load",
            "int(np.count_nonzero(differing))",
            "0",
            "a replay says that wrong bytes are right",
        ),
    ),
)
