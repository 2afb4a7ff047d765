"""The region that processes share: its seals, its size, and when nobody has it mapped any more."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_SEALS = "_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL"

ROOM = Room(
    {
        "unit": (*PYTEST, "tests/unit/core/test_pool.py"),
        "processes": (*PYTEST, "tests/fault/test_hostile_memory.py", "-k", "shrink or views or later"),
    },
    (
        Mutant(
            "core/pool.py",
            _SEALS,
            "_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
            "an engine that shrinks the pool kills the server and every other engine",
        ),
        Mutant(
            "core/pool.py",
            _SEALS,
            "_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL",
            "an engine makes the pool grow until the host is out of memory",
        ),
        Mutant(
            "core/pool.py",
            _SEALS,
            "_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
            "an engine seals the pool against writing, and nobody can attach any more",
        ),
        Mutant(
            "core/pool.py",
            "            _refuse_unsealed(fd, size)\n",
            "",
            "a server that shrinks its memory kills its engines",
        ),
        Mutant(
            "core/pool.py",
            "    if seals & _SEALS != _SEALS:",
            "    if not seals & _SEALS:",
            "memory that is sealed in part is taken",
        ),
        Mutant(
            "core/pool.py",
            "    except OSError:  # no memfd\n        seals = 0",
            "    except OSError:  # no memfd\n        seals = _SEALS",
            "a file that anybody can shorten is taken for memory",
        ),
        Mutant(
            "core/pool.py",
            "    if found != size:",
            "    if False:",
            "a region that ends before the last slot is mapped",
        ),
        Mutant("core/pool.py", "    if found != size:", "    if found < size:", "a region of another layout is mapped"),
        Mutant(
            "core/pool.py",
            "            if fd is not None:\n                undo.callback(os.close, fd)\n",
            "",
            "each refused server costs a descriptor",
        ),
        Mutant(
            "core/pool.py",
            "            self._map = None\n        self._closer()",
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
            "        except BaseException:\n            os.close(witness)\n            raise\n        let_go",
            "        except BaseException:\n            raise\n        let_go",
            "each refused pool keeps its server waiting for an engine that never was",
        ),
    ),
)
