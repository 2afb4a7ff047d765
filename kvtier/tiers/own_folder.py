"""OwnFolder: a folder that is opened once, and its files only when they are this user's alone.

A file whose owner is somebody else can be read and forged by him, whatever its mode says later,
because he may have it open. So nothing in a folder is believed, changed or written before the
descriptor (never the path) shows whose it is. A folder that others may write could get such a file
at any time. Its parents may be open to everybody, as /tmp is: who writes there can take the folder
away, but cannot put his own in its place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from kvtier.core.secret_files import open_folder

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class OwnFolder:
    """Folder ``path``, open until the ``with`` block ends.

    Args:
        path: the folder.
        place: what it is for, in errors.
        error: raised, in words, for a folder that is another user's or that others may write, and
            for such a file.
        make: it and its parents are made, mode 0700, where missing.

    Raises OSError too.
    """

    def __init__(
        self, path: Path, place: str, error: type[Exception], *, make: bool = False
    ) -> None:
        self._place, self._error = place, error
        self.path = path
        self._made_folders = [each for each in (path, *path.parents) if make and not each.exists()]
        self.made_files: list[str] = []
        self._fd = open_folder(path, make=make)
        state = os.fstat(self._fd)
        wrong, do = _not_ours(state), "run as that user"
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong.append(
                f"mode {stat.S_IMODE(state.st_mode):04o}, expected no write access for others"
            )
            do = f"look who wrote there, then chmod 700 {path}"
        if wrong:
            os.close(self._fd)
            raise error(
                f"{place}: the folder has {' and '.join(wrong)}; {do}, or give a folder "
                "that does not exist yet: kvtier makes it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @contextmanager
    def opened(self, name: str, flags: int, *, make: bool = False) -> Iterator[int]:
        """:meth:`open` a file, and close it at the end of the block."""
        fd = self.open(name, flags, make=make)
        try:
            yield fd
        finally:
            os.close(fd)

    def open(self, name: str, flags: int, *, make: bool = False) -> int:
        """Return a descriptor of a regular file that is this user's alone and has no other name.

        ``make``: create it, with mode 0600, if missing. Raises ``error`` and OSError."""
        if make:
            with suppress(FileExistsError):
                made = os.open(
                    name, flags | _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd
                )
                os.fchmod(
                    made, 0o600
                )  # a umask may have left fewer rights than the next start needs
                os.close(made)
                self.made_files.append(name)
        try:
            fd = os.open(name, flags | _FLAGS, dir_fd=self._fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise self._refusal(name, "is a link or a pipe, expected a regular file") from None
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error
        wrong = _wrong_with_file(os.fstat(fd))
        if wrong:
            os.close(fd)
            raise self._refusal(name, f"has {' and '.join(wrong)}")
        return fd

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def undo(self) -> None:
        """Remove the files and folders that this object has made, as far as possible."""
        for name in self.made_files:
            with suppress(OSError):
                self.remove(name)
        for folder in self._made_folders:
            with suppress(OSError):
                folder.rmdir()

    def _refusal(self, name: str, what: str) -> Exception:
        return self._error(
            f"{self._place}: {name} {what}. Another user could read or forge what is in it: find "
            f"out who made it, then remove {self.path / name}; without it the start goes on"
        )


def _not_ours(state: os.stat_result) -> list[str]:
    return (
        []
        if state.st_uid == os.geteuid()
        else [f"owner {state.st_uid}, expected {os.geteuid()} (this process)"]
    )


def _wrong_with_file(state: os.stat_result) -> list[str]:
    wrong = _not_ours(state)
    if not stat.S_ISREG(state.st_mode):
        wrong.append("another kind than a regular file")
    if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        wrong.append(f"mode {stat.S_IMODE(state.st_mode):04o}, expected 0600")
    if state.st_nlink > 1:
        wrong.append(f"{state.st_nlink} names, expected one")
    return wrong
