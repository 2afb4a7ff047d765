"""A recorder's folder in which somebody else has left something."""

from __future__ import annotations

import os
from pathlib import Path

VICTIM = b"somebody's own file"


def linked_salt(folder: Path, victim: Path) -> None:
    """The salt is a link to a file of ours, which a recorder would write into."""
    folder.mkdir(mode=0o700)
    victim.write_bytes(VICTIM)
    (folder / "salt").symlink_to(victim)


def dangling_salt(folder: Path, victim: Path) -> None:
    """The salt is a link to a file that a recorder would make."""
    folder.mkdir(mode=0o700)
    (folder / "salt").symlink_to(victim)


def second_name(folder: Path, victim: Path) -> None:
    """The salt is another name of a file of ours."""
    folder.mkdir(mode=0o700)
    victim.write_bytes(VICTIM)
    victim.chmod(0o600)
    (folder / "salt").hardlink_to(victim)


def open_salt(folder: Path, victim: Path) -> None:
    """Everybody may read the salt, and so tell whether a key that he knows was used."""
    folder.mkdir(mode=0o700)
    (folder / "salt").touch()
    (folder / "salt").chmod(0o644)


def open_folder(folder: Path, victim: Path) -> None:
    """Everybody may write into the folder."""
    folder.mkdir()
    folder.chmod(0o777)


def strangers_folder(folder: Path, victim: Path) -> None:
    """The folder is another user's. Only root can make that."""
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


def strangers_salt(folder: Path, victim: Path) -> None:
    """The salt is another user's, who knows it. Only root can make that."""
    folder.mkdir(mode=0o700)
    (folder / "salt").touch(mode=0o600)
    os.chown(folder / "salt", 65534, 65534)


FOLDERS = (linked_salt, dangling_salt, second_name, open_salt, open_folder)
STRANGERS = (strangers_folder, strangers_salt)


def odd_names(folder: Path) -> list[Path]:
    """Names that look like a recorder's own, and are none."""
    odd = [
        folder / "requests-zzz.jsonl",
        folder / "requests-.jsonl",
        folder / "requests-000000000000001.jsonl",
    ]
    for path in odd[:2]:
        path.touch()
    odd[2].symlink_to(folder / "nowhere")
    return odd
