"""Formats: a file or folder of recorded requests, in any of the forms that kvtier reads. The form
is told from what is in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench.traces import bailian, kv_cache_tester, libcachesim, mooncake
from kvtier.bench.traces.mooncake import Request, lines_of
from kvtier.core.errors import ConfigError
from kvtier.store.observers.record import FILES

_HEAD_BYTES = 1 << 16
_SOME_RECORDS = 100
_COMPRESSED = {b"\x28\xb5\x2f\xfd": "zstd -d", b"\x1f\x8b": "gunzip"}
"""How compressed files begin -> what decompresses them."""
_BY_NAME = {
    "requests": "kv-cache-tester",
    "block_size": "kv-cache-tester",
    "chat_id": "bailian",
    "hash_ids": "mooncake",
}
"""Names in the JSON of one form only -> the form. Mooncake's is last: all of them have it."""
_LFS = b"version https://git-lfs"


class Trace(NamedTuple):
    """Recorded requests."""

    form: str
    requests: list[Request]
    block_tokens: int
    """Tokens of each block. 0: its objects are not tokens."""


def read(path: str, form: str | None = None, partial: bool = False) -> Trace:
    """Raises ConfigError for what is not a trace.

    Args:
        path: a file. A folder is a recorder's, or has conversations of kv-cache-tester.
        form: one of :data:`FORMS`. None: told from the file.
        partial: keep a prompt's last block although it is not full.
    """
    form = form or _told(Path(path))
    try:
        return Trace(form, *FORMS[form](Path(path), partial))
    except (ConfigError, ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path}, read as {form}: {error}") from error


def _mooncake(path: Path, partial: bool) -> tuple[list[Request], int]:
    """A recorder writes a prompt when its request has ended. Its blocks are chunks of the engine:
    no longer than its prompts tell."""
    requests = sorted(mooncake.read(lines_of(path), partial), key=lambda request: request.at)
    told = [one.tokens // len(one.run) for one in requests if one.tokens and one.run]
    return requests, min(told, default=mooncake.BLOCK_TOKENS)


FORMS: dict[str, Callable[[Path, bool], tuple[list[Request], int]]] = {
    "mooncake": _mooncake,
    "bailian": lambda path, partial: (
        list(bailian.read(lines_of(path), partial)),
        bailian.BLOCK_TOKENS,
    ),
    "kv-cache-tester": lambda path, partial: kv_cache_tester.read(_documents(path), partial),
    "libcachesim-csv": lambda path, _: (list(libcachesim.read_csv(lines_of(path))), 0),
    "oracle-general": lambda path, _: (
        list(libcachesim.read_oracle_general(path.read_bytes())),
        0,
    ),
}
"""The forms' names -> what reads them."""


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """A document a file, or one a line."""
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            yield file.name, json.loads(text)
        except json.JSONDecodeError:
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    yield f"line {number}", json.loads(line)


def _told(path: Path) -> str:
    """The form of this file."""
    if path.is_dir():
        return "mooncake" if any(path.glob(FILES)) else "kv-cache-tester"
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for magic, command in _COMPRESSED.items():
        if head.startswith(magic):
            raise ConfigError(f"{path} is compressed: decompress it first ({command} {path})")
    if head.startswith(_LFS):
        raise ConfigError(f"{path} is Git LFS's pointer to the trace: fetch it (git lfs pull)")
    if b"\0" in head:
        if _are_records(head, path.stat().st_size):
            return "oracle-general"
        raise _unknown(path, "binary data")
    first = head.lstrip().partition(b"\n")[0].decode(errors="replace").strip()
    names = head.decode(errors="replace") if first == "{" else first
    if first.startswith("{"):
        for name, form in _BY_NAME.items():
            if f'"{name}"' in names:
                return form
    if not first:
        return "mooncake"
    if not first.startswith(("{", "[")) and _is_csv(first.split(",")):
        return "libcachesim-csv"
    raise _unknown(path, f"it begins with {first[:60]!r}")


def _are_records(head: bytes, size: int) -> bool:
    record = libcachesim.RECORD
    whole = head[: min(len(head) // record.size, _SOME_RECORDS) * record.size]
    times = [at for at, *_ in record.iter_unpack(whole)]
    return size % record.size == 0 and bool(times) and times == sorted(times)


def _is_csv(row: list[str]) -> bool:
    return len(row) > 1 and (
        libcachesim.header(row) is not None or row[0].strip().replace(".", "", 1).isdigit()
    )


def _unknown(path: Path, given: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a trace that kvtier knows: {given}. Expected Mooncake's or Bailian's "
        "lines of JSON with hash_ids, conversations of kv-cache-tester (a file or a folder), or "
        "libCacheSim's csv or oracleGeneral. Convert it to one of them, or say which it is with "
        f"--format ({', '.join(FORMS)})"
    )
