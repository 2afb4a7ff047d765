"""Engines over several hosts, as unit tests, real servers and simulated engines see them."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_HOSTS = "client/hosts.py"

ROOM = Room(
    {
        "hosts": (*PYTEST, "tests/unit/client/test_hosts.py"),
        "layouts": (*PYTEST, "tests/unit/connectors/test_vllm_several_hosts.py"),
        "servers": (*PYTEST, "tests/integration/test_server_hosts.py"),
        "engines": ("-m", "tests.trust.engine", "--hosts", "--steps", "200", "--every", "2"),
    },
    slow=("engines",),
    mutants=(
        Mutant(
            _HOSTS,
            "    known = min(result.known for result in results)\n",
            "    known = max(result.known for result in results)\n",
            "the longest answer is promised",
        ),
        Mutant(
            _HOSTS,
            "        ready = min(one.ready for one in progress)\n",
            "        ready = progress[0].ready\n",
            "what the first host has is loaded on all",
        ),
        Mutant(
            _HOSTS,
            "            if any(slot is not None for slot in slots):\n",
            "            if all(slot is not None for slot in slots):\n",
            "a host that lost its chunks is not filled again",
        ),
        Mutant(
            _HOSTS,
            "            None if own == fingerprints[0] else",
            "            None if own else",
            "chunks have the same names on all hosts",
        ),
        Mutant(
            _HOSTS,
            "            for lease in leases:\n                lease.close()\n",
            "",
            "slots stay reserved when another host does not answer",
        ),
        Mutant(
            "connectors/vllm/hosts.py",
            '{"host": host, "hosts": hosts.number}',
            '{"hosts": hosts.number}',
            "the fingerprint has no host's place",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/jobs.py",
            "        return len(self._parts)\n",
            "        return -(-len(self._parts) // 2)\n",
            "a save is committed when the first host's ranks have confirmed",
        ),
        Mutant(
            "connectors/vllm/worker_side/own_host.py",
            "        if len(found) == len(slots):\n",
            "        if True:\n",
            "a worker fills a slot with the blocks of a chunk that its host has",
        ),
        Mutant(
            "server/connection.py",
            "        self._host.steered.pop(self._ticket, None)\n",
            "",
            "a worker is let in after its scheduler was lost",
        ),
        Mutant(
            "server/session.py",
            "lease.committing() if self._mapped() else lease.closing()",
            "lease.committing()",
            "a client of another host names what others left in a slot, and reads it",
        ),
        Mutant(
            "server/witnesses.py",
            "        self._ends.add(ours)\n",
            "",
            "slots of a lost scheduler are free while its worker maps the pool",
        ),
        Mutant(
            "client/client.py",
            "None if answer is None else pool, keys)",
            "None, keys)",
            "a host that has all chunks counts as one that does not answer",
        ),
    ),
)
