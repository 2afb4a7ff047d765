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
            "lock or early or neither_cpu",
        ),
    },
    (
        Mutant(
            _KERNEL,
            "    in_blocks = base + block * pitch\n",
            "    in_blocks = base + (block * pitch).to(tl.int32)\n",
            "blocks beyond 2 GiB of a layer are read from and written to elsewhere",
        ),
        Mutant(
            _KERNEL,
            "    staged = chunk + offset + index * size\n",
            "    staged = chunk + offset\n",
            "all blocks of a chunk are loaded from its first",
        ),
        Mutant(
            _KERNEL,
            "    inside = word < size // WORD_BYTES\n",
            "    inside = word < TILE * 64\n",
            "a row's tail overwrites the next block",
        ),
        Mutant(
            _ROWS,
            "place.words[begin:end].view(shape)[:, first : first + count]",
            "place.words[begin:end].view(shape)[:, :count]",
            "without Triton a hit that begins inside a chunk loads the wrong blocks",
        ),
        Mutant(
            _STAGED,
            "                bases += [place.address - piece.start for place in places]\n",
            "                bases += [place.address for place in places]\n",
            "with little free memory the kernel writes outside staging memory",
        ),
        Mutant(
            _STAGED,
            "        _refill(batch, self._coming)\n",
            "",
            "a load overwrites staging memory that is still read",
        ),
        Mutant(
            _STAGED,
            "        _refill(batch, self._gathering)\n",
            "",
            "a save overwrites staging memory whose DMA is under way",
        ),
        Mutant(
            _STAGING,
            "    if 2 * largest > room:\n",
            "    if largest > room:\n",
            "staging memory takes what the engine needs for its own peaks",
        ),
        Mutant(
            _BLOCKS,
            '_SERVED = ("cpu", "cuda")',
            '_SERVED = ("cpu", "cuda", "xpu")',
            "an engine on XPU fails in torch.cuda instead of being told",
        ),
        Mutant(
            _PINNING,
            "            if self._held and not region.ended:\n",
            "            if False:\n",
            "a registration spoils a CUDA graph that is being captured",
        ),
        Mutant(
            _PINNING,
            "return tuple(one.where(number)[0] - start for number in numbers[1:])",
            "return ()",
            "one DMA goes over two registrations, which the driver may refuse",
        ),
        Mutant(
            _PINNING,
            "                    one.locked.difference_update(numbers)\n",
            "                    pass\n",
            "a device copies pages that a server gave back",
        ),
        Mutant(
            _PINNING,
            "            if number not in self.wanted:\n                self.locked.add(number)\n",
            "            self.locked.add(number)\n",
            "pages that were replaced while they were being locked are used",
        ),
        Mutant(
            "connectors/vllm/worker_side/worker.py",
            "self._span, is_lent=is_lent)\n",
            "self._span, is_lent=False)\n",
            "a server's pool is locked as if it were the engine's own",
        ),
        Mutant(
            "connectors/vllm/worker_side/worker.py",
            "                self._pools[address].renew(slots)\n",
            "                pass\n",
            "a worker does not know of pages that a server gave back",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/jobs.py",
            "                yield where, slots\n",
            "                yield where, []\n",
            "workers are not told of pages that a server gave back",
        ),
        Mutant(
            "client/client.py",
            "    held.attachment.pool.hear(claim.renewed)\n",
            "",
            "a device loads from the pages that a slot had before",
        ),
        Mutant(
            "client/client.py",
            "        held.attachment.pool.hear(answer.renewed)\n",
            "",
            "a device saves into the pages that a slot had before",
        ),
        Mutant(
            "client/attachment.py",
            "            if self._renewals.get(slot, 0) != times:\n",
            "            if slot not in self._renewals:\n",
            "pages that a server gave back twice are told of once",
        ),
        Mutant(
            _PINNING,
            "        self._want(region, () if is_lent else range(region.count))\n",
            "        self._want(region, range(region.count))\n",
            "an engine page-locks all of a pool that a server lends it",
        ),
        Mutant(
            _PINNING,
            "    if _LEAST_SPAN <= end - begin <= slot_bytes // 2:\n",
            "    if False:\n",
            "every tensor parallel rank page-locks the whole pool",
        ),
        Mutant(
            "connectors/vllm/worker_side/worker.py",
            "        self._map_early(metadata.pool)\n",
            "",
            "page-locking begins at the first job, which then goes through buffers",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "        if pool is not None and pool is not self._named_pool:\n",
            "        if False:\n",
            "page-locking begins at the first request, which then goes through buffers",
        ),
    ),
)
