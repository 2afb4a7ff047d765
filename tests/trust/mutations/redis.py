"""What is believed of a Redis, a cluster and a Sentinel, and what one of their nodes may cost the
others."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "protocol": (
            *PYTEST,
            "tests/property/test_redis_wire.py",
            "tests/unit/extensions/redis/test_redis_nodes.py",
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
        "upkeep": (*PYTEST, "tests/unit/extensions/redis/test_redis_upkeep.py"),
    },
    (
        # ---- the protocol's bounds ----
        Mutant(
            "_Replies._list",
            "count < 0 or self._items < 0 or depth < 1",
            "count < 0 or depth < 1",
            "a header of a hundred million items stops every thread of the engine",
        ),
        Mutant(
            "_Replies._list",
            "count < 0 or self._items < 0 or depth < 1",
            "count < 0 or self._items < 0",
            "lists within lists end in a RecursionError in the engine",
        ),
        Mutant(
            "_Replies._spend",
            "size < 0 or self._size < 0",
            "size < 0",
            "a header of a gigabyte is waited for, and takes memory",
        ),
        Mutant(
            "_Replies._line",
            "len(self._buffer) - self._at >= _LINE_BYTES",
            "False",
            "an endless line takes memory until the time is over",
        ),
        Mutant(
            "_Replies.end",
            "self._at < len(self._buffer)",
            "False",
            "an answer is taken for the answer to the next question",
        ),
        Mutant(
            "Wire.some",
            "self._socket.settimeout(self._left())",
            "",
            "a small reply that is dribbled holds a lane for as long as the server likes",
        ),
        Mutant(
            "Wire._line",
            "self._left()",
            "",
            "an error line that is dribbled holds a lane for ten times the promised time",
        ),
        Mutant(
            "Wire.fill",
            "if memory.nbytes:\n    ...",
            "",
            "a part that is dribbled holds a lane for as long as the server likes",
        ),
        Mutant(
            "_Replies._bulk",
            "ending != b'\\r\\n'",
            "False",
            "replies are read out of step",
        ),
        Mutant(
            "Wire._receive",
            "bytes(line[:2]) != b'\\r\\n'",
            "False",
            "a value that is too long puts all later replies out of step",
        ),
        Mutant(
            "Wire._acknowledged",
            "bytes(self._scratch[:5]) == b'+OK\\r\\n'",
            "True",
            "a write that was refused counts as done",
        ),
        Mutant(
            "Wire.get",
            "not clean",
            "False",
            "a connection with unread replies is lent to the next caller",
        ),
        # ---- its words ----
        Mutant(
            "Wire.refusal",
            "text = text.replace(secret, '***')",
            "pass",
            "a server that repeats the password has it logged",
        ),
        Mutant(
            "Wire.refusal",
            "re.sub('[^ -~]', '?', text)",
            "text",
            "a server forges lines in our log",
        ),
        Mutant(
            "startup._size",
            "re.fullmatch('[0-9]{1,18}', text)",
            "text",
            "an INFO of garbage ends an engine's start in a traceback",
        ),
        Mutant(
            "Wire.page",
            "_NUMBER.fullmatch(cursor) and all(map(_is_name, names))",
            "all(map(_is_name, names))",
            "a SCAN of garbage ends an engine's start in a traceback",
        ),
        Mutant(
            "Wire.page",
            "_NUMBER.fullmatch(cursor) and all(map(_is_name, names))",
            "_NUMBER.fullmatch(cursor)",
            "a SCAN of numbers ends an engine's start in a traceback",
        ),
        Mutant(
            "startup.facts_of",
            "policy if _WORD.fullmatch(policy) else None",
            "policy or None",
            "a server forges lines in our log by its INFO",
        ),
        # ---- clusters and Sentinel ----
        Mutant(
            "Wire._checked",
            "match reply.code:\n"
            "    case 'NOAUTH' | 'WRONGPASS':\n"
            "        raise login_error(reply)\n"
            "    case 'MOVED':\n"
            "        raise _moved(words)\n"
            "    case 'ASK' | 'TRYAGAIN':\n"
            "        raise MovingError('these names move to another node of the cluster "
            "now')\n"
            "    case 'CLUSTERDOWN' | 'MASTERDOWN' | 'LOADING':\n"
            "        raise RedisError(str(reply))",
            "match reply.code:\n"
            "    case 'NOAUTH' | 'WRONGPASS':\n"
            "        raise login_error(reply)\n"
            "    case 'MOVED':\n"
            "        raise _moved(words)\n"
            "    case 'TRYAGAIN':\n"
            "        raise MovingError('these names move to another node of the cluster "
            "now')\n"
            "    case 'CLUSTERDOWN' | 'MASTERDOWN' | 'LOADING':\n"
            "        raise RedisError(str(reply))",
            "a slot that moves away counts against a node that is well",
        ),
        Mutant(
            "RedisTier._call",
            "breaker = self._health.of(name).away\nresult = self._once(name, action)",
            "breaker = self._health.of(name).away\nraise MovingError",
            "the first call after a slot moved is lost though the node said where it is",
        ),
        Mutant(
            "RedisTier._call",
            "breaker.ok()\nself._events.add(count)",
            "breaker.fault()\nself._events.add(count)",
            "slots that move open the breaker of a node that is well",
        ),
        Mutant(
            "ClusterNodes.moved",
            "to in self._primaries",
            "to is not None",
            "one node sends the tier, with its login, to any address",
        ),
        Mutant(
            "nodes.cluster_map",
            "len(set(drawn)) > MOST_NODES + 1",
            "False",
            "a map of 16,384 nodes is believed: as many connections and breakers",
        ),
        Mutant(
            "_Asked._ask",
            "self._candidates.append(self._candidates.pop(0))",
            "pass",
            "one dead seed at the start, and the cluster is never found",
        ),
        Mutant(
            "RedisTier._refused",
            "refusal.code == 'READONLY'",
            "False",
            "a primary that became a replica is written to for ever",
        ),
        Mutant(
            "RedisServers._watched",
            "self._nodes.suspect()",
            "",
            "a failover by Sentinel is never seen",
        ),
        Mutant(
            "RedisServers.wires",
            "count and self._clock() > until",
            "False",
            "a thousand slow nodes hold up a start for minutes",
        ),
        Mutant(
            "_Asked._renew",
            "if not known:\n    ...",
            "...",
            "while no Sentinel answers a primary that is well is not used",
        ),
        Mutant(
            "startup.wrong_kind",
            "servers.kind != 'cluster' and any((fact.cluster for fact in facts))",
            "False",
            "one node of a cluster is taken for a server, and two thirds of all chunks fail",
        ),
        # ---- room in a full one ----
        Mutant(
            "Upkeep._free",
            "reply == 0",
            "reply != 1",
            "a sign that cannot be read is none, and a fleet that runs loses chunks",
        ),
        Mutant(
            "Upkeep._unsigned",
            "idle[chunk] >= 0",
            "True",
            "what Redis says no time of goes first",
        ),
        # ---- one node for itself ----
        Mutant(
            "NodeHealth.of",
            "self._servers.node_of(name)",
            "self._servers.label",
            "one node that is full or away stops all of them",
        ),
        Mutant(
            "RedisTier.may_read",
            "self._form.header_name(key)",
            "b''",
            "one node of a cluster that is away stops the reads of all of them",
        ),
        # ---- a chunk ----
        Mutant(
            "chunk.get_chunk",
            "checksum == digest.digest()",
            "checksum",
            "a wrong byte is served",
        ),
        Mutant(
            "chunk._is_still",
            "bool(now == header)",
            "True",
            "a read drops the chunk that is written anew beside it",
        ),
        Mutant(
            "layout._is_whole",
            "len(header) == HEADER_BYTES and header[_CHECK_AT:] == "
            "_CHECK.pack(xxh3_64_intdigest(header[:_CHECK_AT]))",
            "len(header) == HEADER_BYTES or header[_CHECK_AT:] == "
            "_CHECK.pack(xxh3_64_intdigest(header[:_CHECK_AT]))",
            "a damaged header says whose a chunk is",
        ),
    ),
)
