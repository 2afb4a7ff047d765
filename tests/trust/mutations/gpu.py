"""Copies between blocks and slots on a device: the kernel, staging memory, page-locking."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_KERNEL, _ROWS, _STAGED = "gpu/kernel.py", "gpu/rows.py", "gpu/staged.py"
_STAGING, _PINNING, _BLOCKS = "gpu/staging.py", "gpu/pinning.py", "gpu/blocks.py"

ROOM = Room(
    {
        "rows": (*PYTEST, "tests/unit/gpu/test_gpu_rows.py"),
        "copies": (*PYTEST, "tests/unit/gpu/test_gpu_copy.py", "-k", "kernel and saved_is_loaded"),
        "pinning": (*PYTEST, "tests/unit/gpu/test_gpu_pinning.py"),
        "streams": (*PYTEST, "tests/unit/gpu/test_gpu_streams.py"),
        "other pages": (
            *PYTEST,
            "tests/unit/connectors/test_vllm_saves.py",
            "tests/unit/client/test_kvstore.py",
            "-k",
            "memory",
        ),
        "worker": (
            *PYTEST,
            "tests/unit/gpu/test_gpu_worker.py",
            "-k",
            "lock or early or neither_cpu or may_write_them",
        ),
        "reads on": (*PYTEST, "tests/unit/connectors/test_vllm_reads_on.py"),
    },
    (
        Mutant(
            "kernel._move_rows",
            "block * pitch",
            "(block * pitch).to(tl.int32)",
            "blocks beyond 2 GiB of a layer are read from and written to elsewhere",
        ),
        Mutant(
            "kernel._move_rows",
            "chunk + offset + index * size",
            "chunk + offset",
            "all blocks of a chunk are loaded from its first",
        ),
        Mutant(
            "kernel._move_rows",
            "size // WORD_BYTES",
            "TILE * 64",
            "a row's tail overwrites the next block",
        ),
        Mutant(
            "TorchRows._parts",
            "place.words[begin:end].view(shape)[:, first:first + count]",
            "place.words[begin:end].view(shape)[:, :count]",
            "without Triton a hit that begins inside a chunk loads the wrong blocks",
        ),
        Mutant(
            "StagedCopier._plan",
            "place.address - piece.start",
            "place.address",
            "with little free memory the kernel writes outside staging memory",
        ),
        Mutant(
            "StagedCopier._load_batch",
            "_refill(batch, self._coming)",
            "",
            "a load overwrites staging memory that is still read",
        ),
        Mutant(
            "StagedCopier._save_batch",
            "_refill(batch, self._gathering)",
            "",
            "a save overwrites staging memory whose DMA is under way",
        ),
        Mutant(
            "WorkerHalf.begin",
            "self._settle()",
            "",
            "a block is another request's while it is still read for a save",
        ),
        Mutant(
            "WorkerHalf.save",
            "metadata.reads_on",
            "True",
            "a finished request's blocks are another's while they are still read for a save",
        ),
        Mutant(
            "WorkerHalf.save",
            "metadata.reads_on",
            "False",
            "every step of a long prompt waits for its saves",
        ),
        Mutant(
            "StagedCopier.settle",
            "self._streams.current().wait_event(self._unread)",
            "",
            "an engine overwrites blocks that are not read yet",
        ),
        Mutant(
            "Saves.step",
            "self._geometry.is_gradual",
            "True",
            "blocks that leave a window are overwritten while they are read",
        ),
        Mutant(
            "Saves.step",
            "del goes_on[request_id]",
            "pass",
            "a resumed request counts as one that kept its blocks",
        ),
        Mutant(
            "Saves.step",
            "not self._reading <= goes_on.keys()",
            "False",
            "a preempted request's blocks are overwritten while they are read",
        ),
        Mutant(
            "Saves.step",
            "goes_on[request_id] + output.num_scheduled_tokens[request_id] "
            "< self._prompts[request_id].request.num_prompt_tokens",
            "True",
            "a request that may end with this step counts as one that keeps its blocks",
        ),
        Mutant(
            "Saves.step",
            "self._reading | saved if metadata.reads_on else set()",
            "saved if metadata.reads_on else set()",
            "only the last step's requests are looked at",
        ),
        Mutant(
            "staging.budget",
            "2 * largest > room",
            "largest > room",
            "staging memory takes what the engine needs for its own peaks",
        ),
        Mutant(
            "gpu.blocks",
            "('cpu', 'cuda')",
            "('cpu', 'cuda', 'xpu')",
            "an engine on XPU fails in torch.cuda instead of being told",
        ),
        Mutant(
            "Pinning._lock_piece",
            "self._held and (not region.ended)",
            "False",
            "a registration spoils a CUDA graph that is being captured",
        ),
        Mutant(
            "Pinning.cuts",
            "tuple((one.where(number)[0] - start for number in numbers[1:]))",
            "()",
            "one DMA goes over two registrations, which the driver may refuse",
        ),
        Mutant(
            "Pinning.renew",
            "one.locked.difference_update(numbers)",
            "pass",
            "a device copies pages that a server gave back",
        ),
        Mutant(
            "_Region.took",
            "if number not in self.wanted:\n    ...",
            "...",
            "pages that were replaced while they were being locked are used",
        ),
        Mutant(
            "_MappedPool.__init__",
            "pinning.begin(self.pool.buffer, address.slot_bytes, self._span, is_lent=is_lent)",
            "pinning.begin(self.pool.buffer, address.slot_bytes, self._span, is_lent=False)",
            "a server's pool is locked as if it were the engine's own",
        ),
        Mutant(
            "WorkerHalf.load",
            "self._pools[address].renew(slots)",
            "pass",
            "a worker does not know of pages that a server gave back",
        ),
        Mutant(
            "Jobs.renewed",
            "(where, slots)",
            "(where, [])",
            "workers are not told of pages that a server gave back",
        ),
        Mutant(
            "client._learn",
            "held.attachment.pool.hear(claim.renewed)",
            "",
            "a device loads from the pages that a slot had before",
        ),
        Mutant(
            "Client.save",
            "held.attachment.pool.hear(answer.renewed)",
            "",
            "a device saves into the pages that a slot had before",
        ),
        Mutant(
            "_Renewed.hear",
            "self._renewals.get(slot, 0) != times",
            "slot not in self._renewals",
            "pages that a server gave back twice are told of once",
        ),
        Mutant(
            "Pinning.begin",
            "() if is_lent else range(region.count)",
            "range(region.count)",
            "an engine page-locks all of a pool that a server lends it",
        ),
        Mutant(
            "pinning.cut_of",
            "_LEAST_SPAN <= end - begin <= slot_bytes // 2",
            "False",
            "every tensor parallel rank page-locks the whole pool",
        ),
        Mutant(
            "WorkerHalf.load",
            "self._map_early(metadata.pool)",
            "",
            "page-locking begins at the first job, which then goes through buffers",
        ),
        Mutant(
            "SchedulerHalf.expects_reports",
            "pool is not None and pool is not self._named_pool",
            "False",
            "page-locking begins at the first request, which then goes through buffers",
        ),
    ),
)
