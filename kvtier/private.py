"""What is nobody else's: folders that only this user may enter, and secrets in files that others cannot read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtier.errors import ConfigError

_MOST_SECRET_BYTES = 4096


def make_folder(folder: Path) -> None:
    """Make ``folder`` and every parent that is missing, each with mode 0700: in a parent that others may write, they
    could put a folder of their own in this one's place. What is there is left as it is. Raises OSError."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def read_secret(path: str, key: str) -> bytes:
    """What is in a file, without surrounding space. Raises ConfigError for a file others can read; ``key`` is the
    configuration's word for it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(_MOST_SECRET_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {error}") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{key}={path} is open to every user: chmod 600 {path}")
    return secret
