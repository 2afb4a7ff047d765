"""What is nobody else's: folders that only this user may enter, secrets in files that others cannot read, and who is at
the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from kvtier.errors import ConfigError

_MOST_SECRET_BYTES = 4096
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))


def make_folder(folder: Path) -> None:
    """Make ``folder`` and every parent that is missing, each with mode 0700: in a parent that others may write, they
    could put a folder of their own in this one's place. What is there is left as it is. Raises OSError."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def refuse_shared_folder(folder: Path) -> None:
    """For a folder that holds a socket. Raises ConfigError where others could put their own socket in its place: they
    may write in the folder, or own it. The sticky bit does not help: they may be there first. Raises OSError."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid}, expected user {os.geteuid()} or root: they could put their own "
            "socket there; give the socket a folder of its own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mend = "" if status.st_mode & stat.S_ISVTX else f", or chmod 700 {folder}"
        raise ConfigError(
            f"others may write in {folder} (mode {stat.S_IMODE(status.st_mode):o}), and so put their own socket there: "
            f"give the socket a folder of its own{mend}"
        )


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket: who connected, or who began to listen."""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


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
