"""The region that processes share: its seals, its size, and when nobody has it mapped any more."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "unit": (*PYTEST, "tests/unit/core/test_pool.py", "tests/unit/core/test_region.py"),
        "processes": (
            *PYTEST,
            "tests/fault/test_hostile_memory.py",
            "-k",
            "shrink or views or later",
        ),
    },
    (
        Mutant(
            "core.region",
            "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
            "fcntl.F_SEAL_GROW",
            "an engine that shrinks the pool kills the server and every other engine",
        ),
        Mutant(
            "core.region",
            "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
            "fcntl.F_SEAL_SHRINK",
            "an engine makes the pool grow until the host is out of memory",
        ),
        Mutant(
            "core.region",
            "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
            "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
            "an engine seals the pool against writing, and nobody can attach any more",
        ),
        Mutant(
            "Pool.__init__",
            "size = _refuse_unsealed(fd, size, reserved)",
            "",
            "a server that shrinks its memory kills its engines",
        ),
        Mutant(
            "pool._refuse_unsealed",
            "seals & SEALS != SEALS",
            "not seals & SEALS",
            "memory that is sealed in part is taken",
        ),
        Mutant(
            "pool._refuse_unsealed",
            "seals = 0",
            "seals = SEALS",
            "a file that anybody can shorten is taken for memory",
        ),
        Mutant(
            "pool._refuse_unsealed",
            "found != size",
            "False",
            "a region that ends before the last slot is mapped",
        ),
        Mutant(
            "pool._refuse_unsealed",
            "found != size",
            "found < size",
            "a region of another layout is mapped",
        ),
        Mutant(
            "Pool.__init__",
            "if fd is not None:\n    ...",
            "",
            "each refused server costs a descriptor",
        ),
        Mutant(
            "Pool.close",
            "self._map = None",
            "",
            "a closed pool's slots never come back to the server",
        ),
        Mutant(
            "Pool.close",
            "self._view.release()",
            "",
            "a closed pool stays mapped by its own views",
        ),
        Mutant(
            "pool._refuse_unsealed",
            "in_reserved_pages(fd) and (not reserved)",
            "False",
            "a server that takes reserved pages away kills its engines",
        ),
        Mutant(
            "Pool.give_back",
            "not self.reserved",
            "True",
            "a reserved page that went back and cannot be had again kills who touches it",
        ),
        Mutant(
            "region.make_reserved_region",
            "os.posix_fallocate(fd, 0, _whole(size))",
            "pass",
            "a reserved page that is missing at the first touch kills who touches it",
        ),
        Mutant(
            "HugePages.split",
            "self._whole[first:after] = bytes(after - first)",
            "pass",
            "memory that went back counts as huge pages",
        ),
        Mutant(
            "region.map_region",
            "weakref.finalize(memory, _LIBC.munmap, base, size).atexit = False",
            "weakref.finalize(memory, _LIBC.munmap, base, size)",
            "a thread that copies while its process ends kills it",
        ),
        Mutant(
            "SharedPool.__init__",
            "weakref.finalize(self._map, os.close, witness)",
            "weakref.finalize(self, os.close, witness)",
            "others get slots that a thread still writes into",
        ),
        Mutant(
            "SharedPool.__init__",
            "let_go.atexit = False",
            "let_go.atexit = True",
            "others get slots while a thread of a process that ends still writes into them",
        ),
        Mutant(
            "SharedPool.__init__",
            "os.close(witness)",
            "",
            "each refused pool keeps its server waiting for an engine that never was",
        ),
    ),
)
