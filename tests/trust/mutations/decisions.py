"""The parts that decide: directory, store, leases, lower tiers, the NVMe tier, names of chunks."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "simulation": ("-m", "tests.trust.simulation", "--stop", "--seeds", "2500"),
        "unit": (
            *PYTEST,
            "tests/unit/store/test_directory.py",
            "tests/unit/store/test_directory_runs.py",
            "tests/unit/store/test_store.py",
            "tests/unit/store/test_store_writing.py",
            "tests/unit/core/test_chunk.py",
        ),
        "nvme": (
            *PYTEST,
            "tests/trust/test_slice.py",
            "tests/fault/test_nvme_faults.py",
            "-k",
            "test_nvme_faults and not redis or no_promise and (nvme or objects)",
        ),
        "machine": (*PYTEST, "tests/property/test_store_machine.py"),
    },
    slow=("machine",),
    mutants=(
        # ---- directory ---
        Mutant(
            "Directory._remove",
            "if entry.pins:\n    self._gone.add(entry)\nelse:\n    ...",
            "...",
            "a slot is reused under its readers",
        ),
        Mutant(
            "Directory._unpin",
            "self._free_slots((entry,))",
            "",
            "the slot of a forgotten chunk is lost with its last reader",
        ),
        Mutant(
            "Directory.reserve",
            "victim is None or victim.key in keep",
            "victim is None",
            "a run pushes out its own chunks",
        ),
        Mutant(
            "Directory._coldest",
            "not (entry := self._entries[first]).pins",
            "(entry := self._entries[first]).pins == entry.writes",
            "a chunk is evicted while it is spilled",
        ),
        Mutant(
            "Directory.spill_ended",
            "entry.state is not GONE",
            "True",
            "a chunk forgotten while it is spilled comes back",
        ),
        Mutant(
            "TierIndex.make_room",
            "len(self)",
            "len(self.order)",
            "writes under way do not count against a tier's capacity",
        ),
        Mutant(
            "TierIndex.takes",
            "key in self.order or key in self.writing or key in self.leaving",
            "key in self.order or key in self.writing",
            "a chunk is written while its delete is still to come",
        ),
        Mutant(
            "Directory.ready_run",
            "entry is None or entry.state is not READY",
            "entry is None",
            "a match counts chunks that are being filled",
        ),
        Mutant(
            "Directory._coldest",
            "self.order.part(owner) if owner else self.order",
            "()",
            "nothing is ever evicted",
        ),
        Mutant(
            "Directory._unpin",
            "if entry.pins:\n    ...",
            "",
            "the first of two readers to leave makes the chunk evictable",
        ),
        Mutant(
            "Directory.filled_run",
            "if not entry.pins:\n    ...",
            "...",
            "a chunk that arrives under a waiter counts as evictable",
        ),
        Mutant(
            "Directory.filled_run",
            "if entry.state is GONE:\n    ...",
            "",
            "a chunk that was forgotten while it was filled is served",
        ),
        Mutant(
            "Directory._leaving",
            "key in keep or (found and key in stays)",
            "found and key in stays",
            "a run that is saved pushes out its own chunks",
        ),
        Mutant(
            "Directory._leaving",
            "key in keep or (found and key in stays)",
            "key in keep",
            "what one owner keeps leaves all at once, and what others keep stays",
        ),
        Mutant(
            "Directory._leaving",
            "not entry.pins",
            "entry.pins == entry.writes",
            "a run that is saved evicts a chunk while it is spilled",
        ),
        Mutant(
            "Directory._leaving",
            "if read:\n    ...",
            "",
            "each save walks over all chunks that are being read",
        ),
        Mutant(
            "Directory.reserve_run",
            "min(most, self._idle)",
            "most",
            "where nothing can leave, a save walks over all chunks",
        ),
        Mutant(
            "Directory.reserve_run",
            "1 if self.slots.surplus > 0 else len(keys) - len(made)",
            "len(keys) - len(made)",
            "a save gives away chunks whose slots it does not get",
        ),
        Mutant(
            "Directory.reserve_run",
            "len(wanted) < len(keys) or not self._entries.keys().isdisjoint(wanted)",
            "len(wanted) < len(keys)",
            "a chunk has two slots, and one of them is lost",
        ),
        Mutant(
            "Directory.reserve_run",
            "len(wanted) < len(keys) or not self._entries.keys().isdisjoint(wanted)",
            "not self._entries.keys().isdisjoint(wanted)",
            "a chunk that a run names twice has two slots, and one of them is lost",
        ),
        Mutant(
            "Directory.invalidate",
            "entry is not None and entry.state is READY and may(owner, entry.owner)",
            "entry is not None and may(owner, entry.owner)",
            "a forget frees the slot that an engine is filling",
        ),
        Mutant(
            "TierIndex.lost",
            "self._drop(key, how)",
            "pass",
            "a chunk that a tier lost is promised for ever",
        ),
        Mutant(
            "Directory._free_slots",
            "self._used[entry.owner] -= 1",
            "pass",
            "an owner's quota is used up by chunks long gone",
        ),
        Mutant(
            "Directory.spill_ended",
            "del tier.writing[entry.key]",
            "",
            "a write never ends: its room is lost",
        ),
        Mutant(
            "Directory.spill_ended",
            "stored and wanted",
            "wanted",
            "a failed write counts as held",
        ),
        Mutant(
            "Directory.spill_ended",
            "self._unpin(entry)",
            "self.unpin((entry,))",
            "what was just written below becomes the hottest in RAM",
        ),
        Mutant(
            "Directory._offer",
            "entry.offered = True",
            "pass",
            "what a tier refused is offered to it for ever",
        ),
        Mutant(
            "Directory.pin_all",
            "if list(map(_STATE, pinned)).count(READY) < len(pinned):\n    ...",
            "",
            "a whole run is claimed with chunks that are being filled",
        ),
        Mutant(
            "Directory.pin_all",
            "for entry in pinned:\n    ...",
            "",
            "a whole run is claimed without pins",
        ),
        # ---- store ---
        Mutant(
            "Store._claim",
            "entry.state is FILLING and entry.origin is None",
            "False",
            "a load waits for a chunk that an engine may never finish",
        ),
        Mutant(
            "Store.poll_load",
            "entries[ready].state is READY",
            "entries[ready].state is not GONE",
            "a load serves chunks that have not arrived",
        ),
        Mutant(
            "Store.poll_load",
            "self._unpin(entries[whole:])",
            "pass",
            "a load that got shorter keeps its pins for ever",
        ),
        Mutant(
            "Store.end_load",
            "self._unpin(part)",
            "pass",
            "a closed load keeps its pins for ever",
        ),
        Mutant(
            "Store._find",
            "self._claim(lease) if lease.open else []",
            "self._claim(lease)",
            "an answer that comes after the close pins chunks for nobody",
        ),
        Mutant(
            "Promotions._give_up",
            "self._core.directory.fill_failed(entry)",
            "",
            "a full lane leaves chunks FILLING for ever",
        ),
        Mutant(
            "Spills._spill",
            "entry.state is READY and self._affords(entry.key)",
            "self._affords(entry.key)",
            "a spill of a chunk that has left raises on its lane",
        ),
        Mutant(
            "Spills._spill",
            "lower.delete(victims)",
            "",
            "what a tier has no room for is never deleted",
        ),
        Mutant(
            "LowerTier.was_read",
            "if whole:\n    ...",
            "if True:\n    ...",
            "a failed read is served",
        ),
        Mutant(
            "Store.end_save",
            "self._directory.fill_failed",
            "self._directory.filled",
            "an aborted save is served",
        ),
        Mutant(
            "Store.load",
            "lease.asking = False",
            "pass",
            "a question that a full lane refused is waited for for ever",
        ),
        Mutant(
            "Promotions._ended",
            "self.begin([(entry, again)])",
            "pass",
            "a failed read leaves the chunk FILLING when another tier has it too",
        ),
        Mutant(
            "Spills._ended",
            "if not self._directory.spill_ended(entry, lower.index, stored):\n"
            "    lower.discard(entry.key)",
            "self._directory.spill_ended(entry, lower.index, stored)",
            "a chunk forgotten while it is spilled stays in the tier",
        ),
        Mutant(
            "LowerTier.was_read",
            "whole is False",
            "True",
            "a clear does not reach what a tier could not read for a moment",
        ),
        Mutant(
            "Store._claim",
            "(index for index in directory.holders(key) if self.tiers[index].may_read(key))",
            "(index for index in directory.holders(key))",
            "a tier that is away takes slots from RAM for every load",
        ),
        Mutant(
            "Breaker.reserves",
            "self._reserved = True",
            "pass",
            "the slot that was taken for a trial read is given back without one",
        ),
        Mutant(
            "Promotions._promote",
            "try:\n    ...\nfinally:\n    self._ended(entry, lower, whole, call, since)",
            "try:\n"
            "    ...\n"
            "except ValueError:\n"
            "    raise\n"
            "self._ended(entry, lower, whole, call, since)",
            "a bug in a tier leaves chunks FILLING for ever",
        ),
        Mutant(
            "Spills._spill",
            "try:\n    ...\nfinally:\n    self._ended(entry, run, stored, call, begun)",
            "try:\n"
            "    ...\n"
            "except ValueError:\n"
            "    raise\n"
            "self._ended(entry, run, stored, call, begun)",
            "a bug in a tier leaves chunks pinned for ever",
        ),
        Mutant(
            "Promotions._ended",
            "(other for other in directory.holders(entry.key) if other > lower.index)",
            "directory.holders(entry.key)",
            "a tier that is away is asked for one chunk for ever",
        ),
        Mutant(
            "Spills._spill",
            "entry.state is READY and self._affords(entry.key)",
            "entry.state is READY",
            "a tier writes more than its budget",
        ),
        Mutant(
            "Store.close",
            "self._directory.all_out() if self._on_evict else []",
            "[]",
            "a restart of a store that writes on eviction is cold",
        ),
        # ---- lease, policy, chunk ---
        Mutant(
            "SaveLease.committing",
            "self.open = False",
            "",
            "a committed lease that is closed takes its chunks back",
        ),
        Mutant(
            "Store.poll_load",
            "entries[before:ready]",
            "entries[before:]",
            "a load shows slots that are not there yet",
        ),
        Mutant(
            "LRU.discard",
            "self._order.pop(key, None)",
            "pass",
            "a chunk that has left is evicted again",
        ),
        Mutant(
            "Directory.found",
            "tier.hold(key, owner)",
            "tier.hold(key)",
            "after a restart every chunk is nobody's",
        ),
        Mutant(
            "Directory.reserve",
            "self.tiers[origin].order.owner(key) or owner",
            "owner",
            "a promoted chunk is whose who asked for it, and outlives its owner's erasure",
        ),
        Mutant(
            "TierIndex.shrink",
            "for owner in owners:\n    ...",
            "for owner in ():\n    ...",
            "what a tier turns out to hold of an owner counts against no quota",
        ),
        Mutant(
            "NvmeTier.close",
            "pack_record(slot, self.slot_bytes, key, self._checksum(slot), seq, self._owner(slot))",
            "pack_record(slot, self.slot_bytes, key, self._checksum(slot), seq)",
            "a clean close makes every chunk nobody's",
        ),
        Mutant(
            "LRU.used",
            "reversed(run)",
            "run",
            "a prompt's beginning leaves before its end",
        ),
        Mutant(
            "Owned.add",
            "self._all.add(run, self._once.setdefault(owner, owner) if owner else 0)",
            "self._all.add(run)",
            "whose a chunk is is forgotten when it may leave",
        ),
        Mutant(
            "KeyChain._go_on",
            "index * step + step",
            "index * step + step - 4",
            "prompts that differ in a chunk's last token share keys",
        ),
        Mutant(
            "KeyChain.__init__",
            "_DOMAIN + layout.fingerprint + head + extra",
            "_DOMAIN + layout.fingerprint + head",
            "salts and adapters share keys",
        ),
        # ---- NVMe ---
        Mutant(
            "NvmeTier.read",
            "payload_checksum(key, into) == checksum",
            "True",
            "damaged payloads are served",
        ),
        Mutant(
            "NvmeTier.write",
            "self._free.append(slot)",
            "pass",
            "a failed write loses a slot",
        ),
        Mutant(
            "NvmeTier._empty",
            "self._files.write_record(slot, EMPTY_RECORD)",
            "pass",
            "what was deleted is back after a crash",
        ),
        Mutant(
            "NvmeTier._drop",
            "self._places.get(key) != place",
            "False",
            "a late reader drops a chunk that was written anew",
        ),
        Mutant(
            "NvmeTier._recover",
            "unused[np.fromiter((place % self.capacity for place in self._places.values()), "
            "dtype=np.int64, count=len(self._places))] = False",
            "unused[np.fromiter((place % self.capacity for place in self._places.values()), "
            "dtype=np.int64, count=len(self._places))] = True",
            "recovered chunks are written over",
        ),
        Mutant(
            "SlotFiles.write_payload",
            "os.pwritev(self._payload, [room.data], at) != room.nbytes",
            "os.pwritev(self._payload, [room.data], at) < 0",
            "a short write counts as whole",
        ),
        Mutant(
            "SlotFiles._adopt",
            "old and old.version == FORMAT_VERSION and (old.slot_bytes == self.slot_bytes)",
            "old and old.slot_bytes == self.slot_bytes",
            "a foreign version is believed",
        ),
        Mutant(
            "index.read_records",
            "known & (rows['seq'][used] - np.uint64(1) < most)",
            "rows['seq'][used] - np.uint64(1) < most",
            "damaged records are believed",
        ),
        Mutant(
            "index.payload_checksum",
            "int.from_bytes(own_half(key), 'little')",
            "0",
            "a payload is believed under another key",
        ),
    ),
)
