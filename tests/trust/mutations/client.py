"""What an engine believes of a server's answers, and how long it waits for them."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "answers": (*PYTEST, "tests/unit/protocol/test_answers.py"),
        "reach": (*PYTEST, "tests/unit/client/test_connect.py"),
        "slow": (*PYTEST, "tests/fault/test_slow_servers.py"),
        "hung": (*PYTEST, "tests/integration/test_server.py", "-k", "hangs or late or deadline"),
    },
    (
        # ---- answers ---
        Mutant(
            "answers.check_number",
            "answer.id != asked",
            "False",
            "an answer is taken for another question",
        ),
        Mutant(
            "Client._asking",
            "check_number(answer, self._number)",
            "pass",
            "an answer is taken for another question",
        ),
        Mutant(
            "Client._caught_up",
            "check_number(answer, attachment.awaited.id)",
            "pass",
            "any answer is taken for the one that is owed",
        ),
        Mutant(
            "Client._asking",
            "attachment.awaited is None or self._caught_up(attachment)",
            "True",
            "a late answer ends the attachment",
        ),
        Mutant(
            "Client._caught_up",
            "attachment.put(wire.End(answer.lease))",
            "pass",
            "slots of an answer that came late are never given back",
        ),
        Mutant(
            "Client._asking",
            "check(answer, attachment)",
            "pass",
            "a rogue server's numbers raise in the engine's scheduler",
        ),
        Mutant(
            "Client._asking",
            "attachment.awaited, attachment.overdue_since = (asked, time.monotonic())",
            "pass",
            "an answer that is late is taken for the next question's",
        ),
        Mutant(
            "answers.check_lookup",
            "counts != sorted(counts) or counts[-1] > chunks",
            "counts != sorted(counts)",
            "a prompt is said to be longer than it is",
        ),
        Mutant(
            "answers.check_lookup",
            "counts != sorted(counts) or counts[-1] > chunks",
            "counts[-1] > chunks",
            "fewer than no chunks are on their way",
        ),
        Mutant(
            "answers.check_slots",
            "len(slots.places) != len(slots.slots)",
            "False",
            "a save has chunks without slots",
        ),
        Mutant(
            "answers.check_slots",
            "max(slots.places, default=0) >= max(chunks, 1) or len(set(slots.places)) < "
            "len(slots.places)",
            "len(set(slots.places)) < len(slots.places)",
            "a save of chunks that the prompt does not have raises in the scheduler",
        ),
        Mutant(
            "answers.check_slots",
            "len(set(slots.slots)) < len(slots.slots)",
            "False",
            "two chunks are written into one slot",
        ),
        Mutant(
            "answers.check_claim",
            "len(claim.sources) != len(claim.slots)",
            "False",
            "a load has chunks from nowhere",
        ),
        Mutant(
            "answers.check_claim",
            "len(claim.slots) + claim.coming > chunks",
            "False",
            "a load brings more than was asked for",
        ),
        Mutant(
            "answers.check_claim",
            "max(claim.sources, default=0) >= max(places, 1)",
            "False",
            "a place that nobody named raises in the scheduler",
        ),
        Mutant(
            "answers._check_in_pool",
            "last >= pool_slots",
            "False",
            "a copy goes beyond the pool",
        ),
        Mutant(
            "_Line._receive",
            "getattr(answer, 'id', self._number) != self._number",
            "False",
            "a far server's answer is taken for another question",
        ),
        # ---- time and size ---
        Mutant(
            "Attachment.take",
            "if left <= 0:\n    ...",
            "",
            "a frame of a megabyte is read to its end, whatever the time",
        ),
        Mutant(
            "Deadline.receive",
            "self.left()",
            "self._seconds",
            "one byte a second holds a lane's thread and a slot for days",
        ),
        Mutant(
            "Deadline.send",
            "self.left()",
            "self._seconds",
            "a server that takes one piece at a time holds a lane's thread",
        ),
        Mutant(
            "connect._receive",
            "deadline.left()",
            "_WELCOME_S",
            "a greeting of one byte a second holds an engine's start",
        ),
        Mutant(
            "deadline.reach",
            "min(deadline.left(), pause_s) if places else deadline.left()",
            "2.0",
            "a name with many addresses holds an engine's start",
        ),
        Mutant(
            "connect._receive",
            "if len(descriptors) > _ATTACH_DESCRIPTORS:\n    ...",
            "",
            "a rogue server takes all descriptors of an engine",
        ),
        Mutant(
            "connect.enter",
            "for descriptor in descriptors:\n    ...",
            "",
            "each refused greeting costs two descriptors",
        ),
        Mutant(
            "_Line.get",
            "self._begin(len(into))",
            "self._begin(1 << 42)",
            "a read has no end",
        ),
        Mutant(
            "RemoteTier.may_read",
            "self._breaker.reserves()",
            "True",
            "a far server that is away takes slots from RAM for every load",
        ),
        Mutant(
            "_Line.put",
            "self._begin(len(data))",
            "self._begin(1 << 42)",
            "a write has no end",
        ),
        Mutant(
            "_Line.__init__",
            "Inbox(wire.StreamAnswer, _MAX_ANSWER)",
            "Inbox(wire.StreamAnswer)",
            "an answer takes a megabyte of memory for each connection",
        ),
    ),
)
