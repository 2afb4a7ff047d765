"""The parts that decide: directory, store, leases, lower tiers, the NVMe tier, names of chunks."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "simulation": ("-m", "tests.trust.simulation", "--stop", "--seeds", "2500"),
        "unit": (
            *PYTEST,
            "tests/unit/store/test_directory.py",
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
            "store/directory.py",
            "        if entry.pins:\n            self._gone.add(entry)\n"
            "        else:\n            self._free_slot(entry)",
            "        self._free_slot(entry)",
            "a slot is reused under its readers",
        ),
        Mutant(
            "store/directory.py",
            "            self._gone.discard(entry)\n            self._free_slot(entry)",
            "            self._gone.discard(entry)",
            "the slot of a forgotten chunk is lost with its last reader",
        ),
        Mutant(
            "store/directory.py",
            "            if victim is None or victim.key in keep:",
            "            if victim is None:",
            "a run pushes out its own chunks",
        ),
        Mutant(
            "store/directory.py",
            "            if not entry.pins:\n                found = entry",
            "            if entry.pins == entry.writes:\n                found = entry",
            "a chunk is evicted while it is spilled",
        ),
        Mutant(
            "store/directory.py",
            "        wanted = entry.state is not GONE",
            "        wanted = True",
            "a chunk forgotten while it is spilled comes back",
        ),
        Mutant(
            "store/tier_index.py",
            "        if not spent and len(self) < self.capacity:",
            "        if not spent and len(self.order) < self.capacity:",
            "writes under way do not count against a tier's capacity",
        ),
        Mutant(
            "store/tier_index.py",
            "        return not (key in self.order or key in self.writing or key in self.leaving)",
            "        return not (key in self.order or key in self.writing)",
            "a chunk is written while its delete is still to come",
        ),
        Mutant(
            "store/directory.py",
            "            if entry is None or entry.state is not READY:\n                "
            "return index",
            "            if entry is None:\n                return index",
            "a match counts chunks that are being filled",
        ),
        Mutant(
            "store/directory.py",
            "        for key in self.order.part(owner) if owner else self.order:",
            "        for key in ():",
            "nothing is ever evicted",
        ),
        Mutant(
            "store/directory.py",
            "        entry.pins -= 1\n        if entry.pins:\n            return\n",
            "        entry.pins -= 1\n",
            "the first of two readers to leave makes the chunk evictable",
        ),
        Mutant(
            "store/directory.py",
            "        if not entry.pins:\n            self._count_idle((entry,), 1)\n\n    def "
            "fill_failed",
            "        self._count_idle((entry,), 1)\n\n    def fill_failed",
            "a chunk that arrives under a waiter counts as evictable",
        ),
        Mutant(
            "store/directory.py",
            "        if entry is not None and entry.state is READY and may(owner, entry.owner):",
            "        if entry is not None and may(owner, entry.owner):",
            "a forget frees the slot that an engine is filling",
        ),
        Mutant(
            "store/tier_index.py",
            "            self._drop(key, how)\n",
            "            pass\n",
            "a chunk that a tier lost is promised for ever",
        ),
        Mutant(
            "store/directory.py",
            "            self._used[entry.owner] -= 1",
            "            pass",
            "an owner's quota is used up by chunks long gone",
        ),
        Mutant(
            "store/directory.py",
            "        tier = self.tiers[index]\n        del tier.writing[entry.key]",
            "        tier = self.tiers[index]",
            "a write never ends: its room is lost",
        ),
        Mutant(
            "store/directory.py",
            "        if stored and wanted:",
            "        if wanted:",
            "a failed write counts as held",
        ),
        Mutant(
            "store/directory.py",
            "        entry.writes -= 1\n        self._unpin(entry)",
            "        entry.writes -= 1\n        self.unpin(entry)",
            "what was just written below becomes the hottest in RAM",
        ),
        Mutant(
            "store/directory.py",
            "            entry.offered = True\n",
            "            pass\n",
            "what a tier refused is offered to it for ever",
        ),
        Mutant(
            "store/directory.py",
            "        if list(map(_STATE, pinned)).count(READY) < len(pinned):\n"
            "            return None\n",
            "",
            "a whole run is claimed with chunks that are being filled",
        ),
        Mutant(
            "store/directory.py",
            "        for entry in pinned:\n            entry.pins += 1\n",
            "",
            "a whole run is claimed without pins",
        ),
        # ---- store ---
        Mutant(
            "store/store.py",
            "            elif entry.state is FILLING and entry.origin is None:\n             "
            "   break",
            "            elif False:\n                break",
            "a load waits for a chunk that an engine may never finish",
        ),
        Mutant(
            "store/store.py",
            "            while ready < len(entries) and entries[ready].state is READY:",
            "            while ready < len(entries) and entries[ready].state is not GONE:",
            "a load serves chunks that have not arrived",
        ),
        Mutant(
            "store/store.py",
            "                self._unpin(entries[whole:])",
            "                pass",
            "a load that got shorter keeps its pins for ever",
        ),
        Mutant(
            "store/store.py",
            "                self._unpin(part)\n",
            "                pass\n",
            "a closed load keeps its pins for ever",
        ),
        Mutant(
            "store/store.py",
            "            promotions = self._claim(lease) if lease.open else []",
            "            promotions = self._claim(lease)",
            "an answer that comes after the close pins chunks for nobody",
        ),
        Mutant(
            "store/lower/promotion.py",
            '["promotion_refused"] += 1\n            self._core.directory.fill_failed(entry)',
            '["promotion_refused"] += 1',
            "a full lane leaves chunks FILLING for ever",
        ),
        Mutant(
            "store/lower/spill.py",
            "            takes = entry.state is READY and self._affords(entry.key)",
            "            takes = self._affords(entry.key)",
            "a spill of a chunk that has left raises on its lane",
        ),
        Mutant(
            "store/lower/spill.py",
            "            return\n        lower.delete(victims)\n",
            "            return\n",
            "what a tier has no room for is never deleted",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            "        if whole:\n            self._counts",
            "        if True:\n            self._counts",
            "a failed read is served",
        ),
        Mutant(
            "store/store.py",
            "                    else:\n                        "
            "self._directory.fill_failed(entry)\n",
            "                    else:\n                        self._directory.filled(entry)\n",
            "an aborted save is served",
        ),
        Mutant(
            "store/store.py",
            "                lease.asking = False\n        return lease",
            "                pass\n        return lease",
            "a question that a full lane refused is waited for for ever",
        ),
        Mutant(
            "store/lower/promotion.py",
            "            self.begin([(entry, again)])",
            "            pass",
            "a failed read leaves the chunk FILLING when another tier has it too",
        ),
        Mutant(
            "store/lower/spill.py",
            "            if not self._directory.spill_ended(entry, lower.index, stored):\n"
            "                lower.discard(entry.key)",
            "            self._directory.spill_ended(entry, lower.index, stored)",
            "a chunk forgotten while it is spilled stays in the tier",
        ),
        Mutant(
            "store/lower/lower_tier.py",
            "        if whole is False:\n            self.chunks.lost",
            "        if True:\n            self.chunks.lost",
            "a clear does not reach what a tier could not read for a moment",
        ),
        Mutant(
            "store/store.py",
            "if self.tiers[index].may_read(key)),",
            "),",
            "a tier that is away takes slots from RAM for every load",
        ),
        Mutant(
            "tiers/breaker.py",
            "            self._reserved = True\n",
            "            pass\n",
            "the slot that was taken for a trial read is given back without one",
        ),
        Mutant(
            "store/lower/promotion.py",
            "        finally:\n            self._ended(entry, lower, whole, call, since)\n",
            "        except ValueError:\n            raise\n"
            "        self._ended(entry, lower, whole, call, since)\n",
            "a bug in a tier leaves chunks FILLING for ever",
        ),
        Mutant(
            "store/lower/spill.py",
            "        finally:\n            self._ended(entry, run, stored, call, begun)\n",
            "        except ValueError:\n            raise\n"
            "        self._ended(entry, run, stored, call, begun)\n",
            "a bug in a tier leaves chunks pinned for ever",
        ),
        Mutant(
            "store/lower/promotion.py",
            (
                "                again = next(\n"
                "                    (other for other in directory.holders(entry.key) if other > "
                "lower.index), None\n"
                "                )\n"
            ),
            "                again = next(directory.holders(entry.key), None)\n",
            "a tier that is away is asked for one chunk for ever",
        ),
        Mutant(
            "store/lower/spill.py",
            "            takes = entry.state is READY and self._affords(entry.key)",
            "            takes = entry.state is READY",
            "a tier writes more than its budget",
        ),
        Mutant(
            "store/store.py",
            "            left = self._directory.all_out() if self._on_evict else []",
            "            left = []",
            "a restart of a store that writes on eviction is cold",
        ),
        # ---- lease, policy, chunk ---
        Mutant(
            "store/lease.py",
            "        self.open = False\n        return self._keeper.end_save(self, commit=True)",
            "        return self._keeper.end_save(self, commit=True)",
            "a committed lease that is closed takes its chunks back",
        ),
        Mutant(
            "store/store.py",
            "lease.slots += [entry.slot for entry in entries[before:ready]]",
            "lease.slots += [entry.slot for entry in entries[before:]]",
            "a load shows slots that are not there yet",
        ),
        Mutant(
            "eviction/order.py",
            "        self._order.pop(key, None)",
            "        pass",
            "a chunk that has left is evicted again",
        ),
        Mutant(
            "store/directory.py",
            "                tier.hold(key, owner)\n                grown",
            "                tier.hold(key)\n                grown",
            "after a restart every chunk is nobody's",
        ),
        Mutant(
            "store/directory.py",
            "self.tiers[origin].order.owner(key) or owner",
            "owner",
            "a promoted chunk is whose who asked for it, and outlives its owner's erasure",
        ),
        Mutant(
            "store/tier_index.py",
            "        for owner in owners:\n",
            "        for owner in ():\n",
            "what a tier turns out to hold of an owner counts against no quota",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            (
                "            record = pack_record(\n"
                "                slot, self.slot_bytes, key, self._checksum(slot), seq, "
                "self._owner(slot)\n"
                "            )\n"
            ),
            "            record = pack_record(slot, self.slot_bytes, key, "
            "self._checksum(slot), seq)\n",
            "a clean close makes every chunk nobody's",
        ),
        Mutant(
            "eviction/order.py",
            "        order = self._order\n        for key in reversed(run):",
            "        order = self._order\n        for key in run:",
            "a prompt's beginning leaves before its end",
        ),
        Mutant(
            "eviction/order.py",
            "self._all.add(key, self._once.setdefault(owner, owner) if owner else 0)",
            "self._all.add(key)",
            "whose a chunk is is forgotten when it may leave",
        ),
        Mutant(
            "core/chunk.py",
            "packed[index * step : index * step + step]",
            "packed[index * step : index * step + step - 4]",
            "prompts that differ in a chunk's last token share keys",
        ),
        Mutant("core/chunk.py", "+ head + extra)", "+ head)", "salts and adapters share keys"),
        # ---- NVMe ---
        Mutant(
            "tiers/nvme/tier.py",
            "            if payload_checksum(key, into) == checksum:",
            "            if True:",
            "damaged payloads are served",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            "                else:\n                    self._free.append(slot)",
            "                else:\n                    pass",
            "a failed write loses a slot",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            "            self._files.write_record(slot, EMPTY_RECORD)",
            "            pass",
            "what was deleted is back after a crash",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            "            if self._places.get(key) != place:",
            "            if False:",
            "a late reader drops a chunk that was written anew",
        ),
        Mutant(
            "tiers/nvme/tier.py",
            "        ] = False\n",
            "        ] = True\n",
            "recovered chunks are written over",
        ),
        Mutant(
            "tiers/nvme/files.py",
            "            if os.pwritev(self._payload, [room.data], at) != room.nbytes:\n",
            "            if os.pwritev(self._payload, [room.data], at) < 0:\n",
            "a short write counts as whole",
        ),
        Mutant(
            "tiers/nvme/files.py",
            "        if old and old.version == FORMAT_VERSION and old.slot_bytes == "
            "self.slot_bytes:",
            "        if old and old.slot_bytes == self.slot_bytes:",
            "a foreign version is believed",
        ),
        Mutant(
            "tiers/nvme/index.py",
            '    good = used[rows["check"][used] == np.array(checks, dtype=np.uint64)]',
            "    good = used",
            "damaged records are believed",
        ),
        Mutant(
            "tiers/nvme/index.py",
            'seed=int.from_bytes(own_half(key), "little")',
            "seed=0",
            "a payload is believed under another key",
        ),
    ),
)
