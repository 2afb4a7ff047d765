"""TierFolder: this user's alone (:mod:`kvtier.tiers.own_folder`). Who may write its parents can
take it away, which :func:`leads_to` notices."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import iglob
from pathlib import Path

from kvtier.core.errors import TierError
from kvtier.tiers.own_folder import OwnFolder

INDEX_NAME = "index.kvtier"
SLOTS_NAME = "slots.kvtier"
LEARNT_NAME = "learnt.kvtier"


class TierFolder(OwnFolder):
    """An :class:`OwnFolder` that raises TierError and OSError."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        super().__init__(path, f"NVMe tier {path}", TierError, make=make)


def may_take(path: Path) -> bool:
    try:
        with TierFolder(path):
            return True
    except FileNotFoundError:
        return True
    except (OSError, TierError):
        return False


def leads_to(path: Path, fd: int) -> bool:
    """Whether ``path`` still names the open file. True too where a failing disk cannot tell."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def holders_of_removed(path: Path) -> list[int]:
    """Processes of this user (for root: all) that have a removed ``path`` open. Looks at every open
    file of theirs: some 0.1 s on a busy host."""
    gone, holders = f"{path} (deleted)", set()
    for link in iglob("/proc/[0-9]*/fd/*"):  # Path.glob fails when a process ends meanwhile
        with suppress(OSError):
            if os.readlink(link) == gone:
                holders.add(int(Path(link).parts[2]))
    return sorted(holders)
