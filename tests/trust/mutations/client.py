"""What an engine believes of a server's answers, and how long it waits for them."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "answers": (*PYTEST, "tests/unit/protocol/test_answers.py"),
        "slow": (*PYTEST, "tests/fault/test_slow_servers.py"),
        "hung": (*PYTEST, "tests/integration/test_server.py", "-k", "hangs or late or deadline"),
    },
    (
        # ---- answers ---
        Mutant(
            "protocol/answers.py",
            "    if answer.id != asked:",
            "    if False:",
            "an answer is taken for another question",
        ),
        Mutant(
            "client/client.py",
            "                        check_number(answer, self._number)",
            "                        pass",
            "an answer is taken for another question",
        ),
        Mutant(
            "client/client.py",
            "            check_number(answer, attachment.awaited.id)",
            "            pass",
            "any answer is taken for the one that is owed",
        ),
        Mutant(
            "client/client.py",
            "            if attachment.awaited is None or self._caught_up(attachment):",
            "            if True:",
            "a late answer ends the attachment",
        ),
        Mutant(
            "client/client.py",
            "                attachment.put(wire.End(answer.lease))",
            "                pass",
            "slots of an answer that came late are never given back",
        ),
        Mutant(
            "client/client.py",
            "                        check(answer, attachment)",
            "                        pass",
            "a rogue server's numbers raise in the engine's scheduler",
        ),
        Mutant(
            "client/client.py",
            "            attachment.awaited, attachment.overdue_since = asked, time.monotonic()",
            "            pass",
            "an answer that is late is taken for the next question's",
        ),
        Mutant(
            "protocol/answers.py",
            " or counts[-1] > chunks:",
            ":",
            "a prompt is said to be longer than it is",
        ),
        Mutant(
            "protocol/answers.py",
            "    if counts != sorted(counts) or",
            "    if",
            "fewer than no chunks are on their way",
        ),
        Mutant(
            "protocol/answers.py",
            "    if len(slots.places) != len(slots.slots):",
            "    if False:",
            "a save has chunks without slots",
        ),
        Mutant(
            "protocol/answers.py",
            "    if max(slots.places, default=0) >= max(chunks, 1) or",
            "    if",
            "a save of chunks that the prompt does not have raises in the scheduler",
        ),
        Mutant(
            "protocol/answers.py",
            "    if len(set(slots.slots)) < len(slots.slots):",
            "    if False:",
            "two chunks are written into one slot",
        ),
        Mutant(
            "protocol/answers.py",
            "    if len(claim.sources) != len(claim.slots):",
            "    if False:",
            "a load has chunks from nowhere",
        ),
        Mutant(
            "protocol/answers.py",
            "    if len(claim.slots) + claim.coming > chunks:",
            "    if False:",
            "a load brings more than was asked for",
        ),
        Mutant(
            "protocol/answers.py",
            "    if max(claim.sources, default=0) >= max(places, 1):",
            "    if False:",
            "a place that nobody named raises in the scheduler",
        ),
        Mutant(
            "protocol/answers.py",
            "    if last >= pool_slots:",
            "    if False:",
            "a copy goes beyond the pool",
        ),
        Mutant(
            "client/remote_tier.py",
            '        if getattr(answer, "id", self._number) != self._number:',
            "        if False:",
            "a far server's answer is taken for another question",
        ),
        # ---- time and size ---
        Mutant(
            "client/attachment.py",
            "            if left <= 0:\n                return None\n",
            "",
            "a frame of a megabyte is read to its end, whatever the time",
        ),
        Mutant(
            "client/deadline.py",
            "        sock.settimeout(self.left())\n        count",
            "        sock.settimeout(self._seconds)\n        count",
            "one byte a second holds a lane's thread and a slot for days",
        ),
        Mutant(
            "client/deadline.py",
            "            sock.settimeout(self.left())\n            rest",
            "            sock.settimeout(self._seconds)\n            rest",
            "a server that takes one piece at a time holds a lane's thread",
        ),
        Mutant(
            "client/connect.py",
            "        sock.settimeout(deadline.left())\n        data, passed",
            "        sock.settimeout(_WELCOME_S)\n        data, passed",
            "a greeting of one byte a second holds an engine's start",
        ),
        Mutant(
            "client/connect.py",
            "                sock.settimeout(deadline.left())\n                sock.connect",
            "                sock.settimeout(_CONNECT_S)\n                sock.connect",
            "a name with many addresses holds an engine's start",
        ),
        Mutant(
            "client/connect.py",
            "        if len(descriptors) > _ATTACH_DESCRIPTORS:\n"
            '            raise wire.WireError(f"the server passed {len(descriptors)} '
            'descriptors")\n'
            "        if not data",
            "        if not data",
            "a rogue server takes all descriptors of an engine",
        ),
        Mutant(
            "client/connect.py",
            "        for descriptor in descriptors:\n            os.close(descriptor)\n",
            "",
            "each refused greeting costs two descriptors",
        ),
        Mutant(
            "client/remote_tier.py",
            "wire.Get(self._begin(len(into)), key)",
            "wire.Get(self._begin(1 << 42), key)",
            "a read has no end",
        ),
        Mutant(
            "client/remote_tier.py",
            "        return self._breaker.reserves()",
            "        return True",
            "a far server that is away takes slots from RAM for every load",
        ),
        Mutant(
            "client/remote_tier.py",
            "wire.Put(self._begin(len(data)), key)",
            "wire.Put(self._begin(1 << 42), key)",
            "a write has no end",
        ),
        Mutant(
            "client/remote_tier.py",
            "Inbox(wire.StreamAnswer, _MAX_ANSWER)",
            "Inbox(wire.StreamAnswer)",
            "an answer takes a megabyte of memory for each connection",
        ),
    ),
)
