"""A real memory cgroup for tests."""

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_PLACES = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


@contextmanager
def memory_cgroup(limit, *, inner=True):
    """An inner group of one that is limited to so many bytes, or that one. A process enters it
    through its ``cgroup.procs``. Skips the test where none can be made."""
    place, name = next((one for one in _PLACES if (Path(one[0]) / one[1]).exists()), _PLACES[1])
    group = Path(place) / f"kvtier-test-{os.getpid()}"
    with ExitStack() as undo:
        try:
            group.mkdir()
            undo.callback(group.rmdir)
            (group / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        if inner:
            if name == "memory.max":
                (group / "cgroup.subtree_control").write_text("+memory")
            group /= "inner"
            group.mkdir()
            undo.callback(group.rmdir)
        yield group


def entering(group, command):
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
