"""Folders that only this user may enter, secrets that others cannot read, users of Unix sockets."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from kvtier.core.errors import ConfigError

_MOST_SECRET_BYTES = 4096
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
_MOST_LINKS = 40
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(folder: Path) -> None:
    """Make ``folder`` and every missing parent, each with mode 0700. In a parent where others may
    write, they could put a folder of their own in its place. Folders that exist stay as they are.
    Raises OSError."""
    os.close(open_folder(folder, make=True))


def open_folder(folder: Path, *, make: bool = False) -> int:
    """Open ``folder`` with ``O_PATH``. ``make``: make missing folders, see :func:`make_folder`.

    Each folder is opened from the one above it, so no other user can exchange a part of the path in
    the meantime. A symbolic link on the path must belong to root or to this user, because another's
    could lead into any folder. Raises OSError."""
    here, ahead, links = -1, list(reversed(folder.absolute().parts)), 0
    try:
        while ahead:
            found = _enter(here, ahead.pop(), make=make)
            target = _target(found, links)
            if target is None:
                here, found = found, here
            else:
                ahead += reversed(target.parts)
                links += 1
            if found >= 0:
                os.close(found)
    except OSError as error:
        if here >= 0:
            os.close(here)
        raise OSError(error.errno, error.strerror, str(folder)) from error
    if not stat.S_ISDIR(os.fstat(here).st_mode):
        os.close(here)
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return here


def _enter(here: int, name: str, *, make: bool) -> int:
    """Open one part of a path, without following a link. For "/" any ``here`` will do."""
    try:
        return os.open(name, _STEP, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=here)
    return os.open(name, _STEP, dir_fd=here)


def _target(found: int, links: int) -> Path | None:
    """Return the target of the symbolic link ``found``, after ``links`` others, or None if it is no
    link. Raises OSError, with ``found`` closed, for another user's link and for too many."""
    state = os.fstat(found)
    if not stat.S_ISLNK(state.st_mode):
        return None
    target = os.readlink("", dir_fd=found)
    if links >= _MOST_LINKS:
        os.close(found)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if state.st_uid not in (0, os.geteuid()):
        os.close(found)
        raise OSError(
            errno.EPERM,
            f"user {state.st_uid} made the symbolic link to {target} that is on its way",
        )
    return Path(target)


def refuse_shared_folder(folder: Path) -> None:
    """Check the folder of a socket. Raises ConfigError where others could put their own socket in
    its place: they may write in the folder, or own it. The sticky bit does not help, because they
    may be there first. Raises OSError."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid}, expected user {os.geteuid()} or root: they "
            "could put their own socket there; give the socket a folder of its own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = "" if status.st_mode & stat.S_ISVTX else f", or chmod 700 {folder}"
        raise ConfigError(
            f"others may write in {folder} (mode {stat.S_IMODE(status.st_mode):o}), and so put "
            f"their own socket there: give the socket a folder of its own{remedy}"
        )


def peer_uid(sock: socket.socket) -> int:
    """Return the user who connected to a Unix socket, or who began to listen at it."""
    return _peer(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    return _peer(sock)[0]


def _peer(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid), int(uid)


def read_secret(path: str, key: str) -> bytes:
    """Read a file, without surrounding space. ``key`` is the configuration key that names the file.
    Raises ConfigError for a file that others can read."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(_MOST_SECRET_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {error}") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{key}={path} is open to every user: chmod 600 {path}")
    return secret
