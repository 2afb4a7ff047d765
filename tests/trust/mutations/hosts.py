"""Engines over several hosts, as unit tests, real servers and simulated engines see them."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

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
            "hosts.shortest",
            "min((result.known for result in results))",
            "max((result.known for result in results))",
            "the longest answer is promised",
        ),
        Mutant(
            "Hosts.poll_load",
            "min((one.ready for one in progress))",
            "progress[0].ready",
            "what the first host has is loaded on all",
        ),
        Mutant(
            "Hosts.save",
            "any((slot is not None for slot in slots))",
            "all((slot is not None for slot in slots))",
            "a host that lost its chunks is not filled again",
        ),
        Mutant(
            "Hosts.__init__",
            "own == fingerprints[0]",
            "own",
            "chunks have the same names on all hosts",
        ),
        Mutant(
            "Hosts.save",
            "for lease in leases:\n    ...",
            "",
            "slots stay reserved when another host does not answer",
        ),
        Mutant(
            "hosts.by_host",
            "{'host': host, 'hosts': hosts.number}",
            "{'hosts': hosts.number}",
            "the fingerprint has no host's place",
        ),
        Mutant(
            "Jobs.ranks",
            "len(self._parts)",
            "-(-len(self._parts) // 2)",
            "a save is committed when the first host's ranks have confirmed",
        ),
        Mutant(
            "OwnHost._move",
            "len(found) == len(slots)",
            "True",
            "a worker fills a slot with the blocks of a chunk that its host has",
        ),
        Mutant(
            "Connection.connection_lost",
            "self._host.steered.pop(self._ticket, None)",
            "",
            "a worker is let in after its scheduler was lost",
        ),
        Mutant(
            "Session._commit",
            "lease.committing() if self._mapped() else lease.closing()",
            "lease.committing()",
            "a client of another host names what others left in a slot, and reads it",
        ),
        Mutant(
            "Witnesses.lend",
            "self._ends.add(ours)",
            "",
            "slots of a lost scheduler are free while its worker maps the pool",
        ),
        Mutant(
            "Client.save",
            "None if answer is None else pool",
            "None",
            "a host that has all chunks counts as one that does not answer",
        ),
    ),
)
