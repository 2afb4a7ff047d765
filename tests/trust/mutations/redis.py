"""What is believed of a Redis, a cluster and a Sentinel, and what one of their nodes may cost the
others."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "protocol": (
            *PYTEST,
            "tests/property/test_redis_wire.py",
            "tests/unit/tiers/test_redis_nodes.py",
        ),
        "hostile": (
            *PYTEST,
            "tests/fault/test_hostile_redis.py",
            "-k",
            "dribbled or garbage or forge or started or hundred",
        ),
        "faults": (
            *PYTEST,
            "tests/fault/test_redis_faults.py",
            "tests/unit/store/test_store.py",
            "-m",
            "not slow",
        ),
        "tier": (*PYTEST, "tests/contract/test_redis_tier.py", "-m", "not slow"),
    },
    (
        # ---- the protocol's bounds ----
        Mutant(
            "tiers/redis/wire.py",
            "        if count < 0 or self._items < 0 or depth < 1:",
            "        if count < 0 or depth < 1:",
            "a header of a hundred million items stops every thread of the engine",
        ),
        Mutant(
            "tiers/redis/wire.py",
            "        if count < 0 or self._items < 0 or depth < 1:",
            "        if count < 0 or self._items < 0:",
            "lists within lists end in a RecursionError in the engine",
        ),
        Mutant(
            "tiers/redis/wire.py",
            "        if size < 0 or self._size < 0:",
            "        if size < 0:",
            "a header of a gigabyte is waited for, and takes memory",
        ),
        Mutant(
            "tiers/redis/wire.py",
            "            if len(self._buffer) - self._at >= _LINE_BYTES:",
            "            if False:",
            "an endless line takes memory until the time is over",
        ),
        Mutant(
            "tiers/redis/wire.py",
            '        if self._at < len(self._buffer):\n            raise ProtocolError("the server '
            "says more",
            '        if False:\n            raise ProtocolError("the server says more',
            "an answer is taken for the answer to the next question",
        ),
        Mutant(
            "tiers/redis/wire.py",
            "        self._socket.settimeout(self._left())\n        if not (received",
            "        if not (received",
            "a small reply that is dribbled holds a lane for as long as the server likes",
        ),
        Mutant(
            "tiers/redis/wire.py",
            "            self._left()\n            self.fill(self._scratch[have : have + 1])",
            "            self.fill(self._scratch[have : have + 1])",
            "an error line that is dribbled holds a lane for ten times the promised time",
        ),
        Mutant(
            "tiers/redis/wire.py",
            "            memory = memory[got:]\n            if memory.nbytes:\n                "
            "self._left()",
            "            memory = memory[got:]",
            "a part that is dribbled holds a lane for as long as the server likes",
        ),
        Mutant(
            "tiers/redis/wire.py",
            '        if ending != b"\\r\\n":\n            raise ProtocolError("a value is longer',
            '        if False:\n            raise ProtocolError("a value is longer',
            "replies are read out of step",
        ),
        Mutant(
            "tiers/redis/wire.py",
            '        if bytes(line[:2]) != b"\\r\\n":',
            "        if False:",
            "a value that is too long puts all later replies out of step",
        ),
        Mutant(
            "tiers/redis/wire.py",
            '        if bytes(self._scratch[:5]) == b"+OK\\r\\n":\n            return None',
            "        if True:\n            return None",
            "a write that was refused counts as done",
        ),
        Mutant(
            "tiers/redis/wire.py",
            "            if not clean:",
            "            if False:",
            "a connection with unread replies is lent to the next caller",
        ),
        # ---- its words ----
        Mutant(
            "tiers/redis/wire.py",
            '            text = text.replace(secret, "***")',
            "            pass",
            "a server that repeats the password has it logged",
        ),
        Mutant(
            "tiers/redis/wire.py",
            're.sub(r"[^ -~]", "?", text)[:200])',
            "text[:200])",
            "a server forges lines in our log",
        ),
        Mutant(
            "tiers/redis/startup.py",
            '    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None',
            "    return int(text) if text else None",
            "an INFO of garbage ends an engine's start in a traceback",
        ),
        Mutant(
            "tiers/redis/wire.py",
            (
                "                case [bytes(cursor), [*names]] if _NUMBER.fullmatch(cursor) "
                "and all(\n"
                "                    map(_is_name, names)\n"
                "                ):\n"
            ),
            "                case [bytes(cursor), [*names]] if all(map(_is_name, names)):\n",
            "a SCAN of garbage ends an engine's start in a traceback",
        ),
        Mutant(
            "tiers/redis/wire.py",
            (
                "                case [bytes(cursor), [*names]] if _NUMBER.fullmatch(cursor) "
                "and all(\n"
                "                    map(_is_name, names)\n"
                "                ):\n"
            ),
            "                case [bytes(cursor), [*names]] if _NUMBER.fullmatch(cursor):\n",
            "a SCAN of numbers ends an engine's start in a traceback",
        ),
        Mutant(
            "tiers/redis/startup.py",
            "        policy=policy if _WORD.fullmatch(policy) else None,",
            "        policy=policy or None,",
            "a server forges lines in our log by its INFO",
        ),
        # ---- clusters and Sentinel ----
        Mutant(
            "tiers/redis/wire.py",
            '            case "ASK" | "TRYAGAIN":',
            '            case "TRYAGAIN":',
            "a slot that moves away counts against a node that is well",
        ),
        Mutant(
            "tiers/redis/tier.py",
            "                result = self._once(name, action)\n        except MovingError",
            "                raise MovingError\n        except MovingError",
            "the first call after a slot moved is lost though the node said where it is",
        ),
        Mutant(
            "tiers/redis/tier.py",
            "        except MovingError as error:\n            breaker.ok()\n            "
            "self._events.add(count)",
            "        except MovingError as error:\n            breaker.fault()\n            "
            "self._events.add(count)",
            "slots that move open the breaker of a node that is well",
        ),
        Mutant(
            "tiers/redis/nodes.py",
            "        if to in self._primaries:\n            self._map[slot] = to",
            "        if to is not None:\n            self._map[slot] = to",
            "one node sends the tier, with its login, to any address",
        ),
        Mutant(
            "tiers/redis/nodes.py",
            "    if len(set(drawn)) > MOST_NODES + 1:",
            "    if False:",
            "a map of 16,384 nodes is believed: as many connections and breakers",
        ),
        Mutant(
            "tiers/redis/nodes.py",
            "                self._candidates.append(self._candidates.pop(0))",
            "                pass",
            "one dead seed at the start, and the cluster is never found",
        ),
        Mutant(
            "tiers/redis/tier.py",
            '        if refusal.code == "READONLY":',
            "        if False:",
            "a primary that became a replica is written to for ever",
        ),
        Mutant(
            "tiers/redis/servers.py",
            "        except FAULTS:\n            self._nodes.suspect()\n            raise",
            "        except FAULTS:\n            raise",
            "a failover by Sentinel is never seen",
        ),
        Mutant(
            "tiers/redis/servers.py",
            "            if count and self._clock() > until:",
            "            if False:",
            "a thousand slow nodes hold up a start for minutes",
        ),
        Mutant(
            "tiers/redis/nodes.py",
            "            if not known:\n                raise",
            "            raise",
            "while no Sentinel answers a primary that is well is not used",
        ),
        Mutant(
            "tiers/redis/startup.py",
            '    if servers.kind != "cluster" and any(fact.cluster for fact in facts):',
            "    if False:",
            "one node of a cluster is taken for a server, and two thirds of all chunks fail",
        ),
        # ---- one node for itself ----
        Mutant(
            "tiers/redis/health.py",
            "        place = self._servers.node_of(name)\n",
            "        place = self._servers.label\n",
            "one node that is full or away stops all of them",
        ),
        Mutant(
            "tiers/redis/tier.py",
            "        return self._health.of(self._form.header_name(key)).away.reserves()\n",
            '        return self._health.of(b"").away.reserves()\n',
            "one node of a cluster that is away stops the reads of all of them",
        ),
        # ---- a chunk ----
        Mutant(
            "tiers/redis/chunk.py",
            '    if checksum == digest.digest():\n        return "reads"',
            '    if checksum:\n        return "reads"',
            "a wrong byte is served",
        ),
        Mutant(
            "tiers/redis/chunk.py",
            "    return bool(now == header)",
            "    return True",
            "a read drops the chunk that is written anew beside it",
        ),
        Mutant(
            "tiers/redis/layout.py",
            "    return len(header) == HEADER_BYTES and header",
            "    return len(header) == HEADER_BYTES or header",
            "a damaged header says whose a chunk is",
        ),
    ),
)
