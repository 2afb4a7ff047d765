"""Mooncake's traces: one request a line of JSON, with its prompt as ids of blocks of 512 tokens
(Qin et al., *Mooncake*, FAST 2025). An id stands for a block with everything before it, as a
chunk's key does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.lookup import STOPS
from kvtier.eviction import hints
from kvtier.store.record.folder import FILES

BLOCK_TOKENS = 512
_MOST_BLOCKS = 1 << 20


class Request(NamedTuple):
    """One prompt."""

    at: float
    """Seconds since the trace began."""
    run: tuple[ChunkKey, ...]
    session: str = ""
    """The conversation's name, where the trace has one."""
    over: bool = False
    """The trace says that the session ended with this request."""
    about: tuple[ChunkKey, ...] | None = None
    """Given for a line that is a hint and no prompt: the prompt, with its answer, that it is about.
    Empty: the last prompt of the session."""
    tokens: int = 0
    """Of a prompt whose blocks are all full: how many it had."""
    keep_s: float = 0.0
    """The trace says that it is kept for so many seconds after its last use."""
    output: int | None = None
    """Tokens of the answer. None: the trace does not say."""
    stop: str = ""
    """Why the answer ended, where the trace says it."""


def lines_of(path: str) -> Iterator[str]:
    """The lines of a trace. A folder is what the recorder has written. Raises OSError."""
    files = sorted(Path(path).glob(FILES)) if Path(path).is_dir() else [Path(path)]
    for file in files:
        with open(file, encoding="utf-8", errors="replace") as opened:
            yield from opened


def read(lines: Iterable[str], partial: bool = False) -> Iterator[Request]:
    """The requests of a trace. Raises ConfigError, which names the line.

    Args:
        lines: JSON, one request each. Empty lines are skipped, and unknown fields are ignored.
        partial: keep a prompt's last block although it is not full. A cache keeps only full ones.
            Lines of the recorder have ``whole``: all of their blocks are full.
    """
    keys: dict[int, ChunkKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _request(json.loads(line), keys, partial)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"line {number}: no request of a Mooncake trace: {error!r}"[:300]
            ) from error


def in_order(requests: Iterable[Request]) -> list[Request]:
    """By time. A recorder writes a prompt when its request has ended."""
    return sorted(requests, key=lambda request: request.at)


def _request(given: dict[str, object], keys: dict[int, ChunkKey], partial: bool) -> Request:
    ids, tokens = _ids(given, "hash_ids"), given.get("input_length")
    whole = tokens if isinstance(tokens, int) and given.get("whole") is True else 0
    if not partial and isinstance(tokens, int) and not whole:
        ids = ids[: max(0, tokens) // BLOCK_TOKENS]
    at = given.get("timestamp", 0)
    if isinstance(at, bool) or not isinstance(at, int | float):
        raise TypeError("timestamp is not a number")
    run = _run(ids, keys)
    about = _run(_ids(given, "about"), keys) if "about" in given else None
    return Request(
        at / 1000,
        run,
        str(given.get("session", "")),
        given.get("over") is True,
        about,
        whole,
        *_told(given),
    )


def _told(given: dict[str, object]) -> tuple[float, int | None, str]:
    """What a request asks to be kept for, and how it ended. What is no such thing is ignored."""
    keep_s, output, stop = (given.get(name) for name in ("keep_s", "output_length", "stop"))
    hint, _ = hints.read({"keep_s": keep_s})
    tokens = output if type(output) is int and output >= 0 else None
    return hint.keep_s, tokens, stop if stop in STOPS else ""


def _ids(given: dict[str, object], field: str) -> list[int]:
    ids = given[field]
    if (
        not isinstance(ids, list)
        or len(ids) > _MOST_BLOCKS
        or not all(type(each) is int for each in ids)
    ):
        raise ValueError(f"{field} is not a list of numbers")
    return ids


def _run(ids: list[int], keys: dict[int, ChunkKey]) -> tuple[ChunkKey, ...]:
    for each in ids:
        if each not in keys:
            keys[each] = ChunkKey(hashlib.blake2b(str(each).encode(), digest_size=40).digest())
    return tuple(keys[each] for each in ids)
