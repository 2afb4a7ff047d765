"""The region that processes share: its seals, its size, and when nobody has it mapped any more."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_SEALS = "SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL"

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
            "core/region.py",
            _SEALS,
            "SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
            "an engine that shrinks the pool kills the server and every other engine",
        ),
        Mutant(
            "core/region.py",
            _SEALS,
            "SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL",
            "an engine makes the pool grow until the host is out of memory",
        ),
        Mutant(
            "core/region.py",
            _SEALS,
            "SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
            "an engine seals the pool against writing, and nobody can attach any more",
        ),
        Mutant(
            "core/pool.py",
            "            size = _refuse_unsealed(fd, size, reserved)\n",
            "",
            "a server that shrinks its memory kills its engines",
        ),
        Mutant(
            "core/pool.py",
            "    if seals & SEALS != SEALS:",
            "    if not seals & SEALS:",
            "memory that is sealed in part is taken",
        ),
        Mutant(
            "core/pool.py",
            "    except OSError:  # it is not a memfd\n        seals = 0",
            "    except OSError:  # it is not a memfd\n        seals = SEALS",
            "a file that anybody can shorten is taken for memory",
        ),
        Mutant(
            "core/pool.py",
            "    if found != size:",
            "    if False:",
            "a region that ends before the last slot is mapped",
        ),
        Mutant(
            "core/pool.py",
            "    if found != size:",
            "    if found < size:",
            "a region of another layout is mapped",
        ),
        Mutant(
            "core/pool.py",
            "            if fd is not None:\n                undo.callback(os.close, fd)\n",
            "",
            "each refused server costs a descriptor",
        ),
        Mutant(
            "core/pool.py",
            "        self._map = None\n        self._closer()",
            "        self._closer()",
            "a closed pool's slots never come back to the server",
        ),
        Mutant(
            "core/pool.py",
            "        self._view.release()\n",
            "",
            "a closed pool stays mapped by its own views",
        ),
        Mutant(
            "core/pool.py",
            "    if in_reserved_pages(fd) and not reserved:",
            "    if False:",
            "a server that takes reserved pages away kills its engines",
        ),
        Mutant(
            "core/pool.py",
            "        if not self.reserved:\n            begin",
            "        if True:\n            begin",
            "a reserved page that went back and cannot be had again kills who touches it",
        ),
        Mutant(
            "core/region.py",
            "            os.posix_fallocate(fd, 0, _whole(size))\n",
            "            pass\n",
            "a reserved page that is missing at the first touch kills who touches it",
        ),
        Mutant(
            "core/region.py",
            "        self._whole[first:after] = bytes(after - first)",
            "        pass",
            "memory that went back counts as huge pages",
        ),
        Mutant(
            "core/region.py",
            "    weakref.finalize(memory, _LIBC.munmap, base, size).atexit = False",
            "    weakref.finalize(memory, _LIBC.munmap, base, size)",
            "a thread that copies while its process ends kills it",
        ),
        Mutant(
            "client/attachment.py",
            "weakref.finalize(self._map, os.close, witness)",
            "weakref.finalize(self, os.close, witness)",
            "others get slots that a thread still writes into",
        ),
        Mutant(
            "client/attachment.py",
            "        let_go.atexit = False",
            "        let_go.atexit = True",
            "others get slots while a thread of a process that ends still writes into them",
        ),
        Mutant(
            "client/attachment.py",
            "        except BaseException:\n            os.close(witness)\n            raise\n     "
            "   self.witness_path",
            "        except BaseException:\n            raise\n        self.witness_path",
            "each refused pool keeps its server waiting for an engine that never was",
        ),
    ),
)
