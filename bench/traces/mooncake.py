"""Mooncake's traces: one request a line of JSON, with its prompt as ids of blocks of 512 tokens
(Qin et al., *Mooncake*, FAST 2025). An id stands for a block with everything before it, as a
chunk's key does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError
from kvtier.core.lookup import STOPS
from kvtier.eviction import hints
from kvtier.eviction.hints import NO_HINT, Hint
from kvtier.store.observers.record import FILES

_LATEST_S = 1e12
_MOST_BLOCKS = 1 << 20


def key_of(name: object) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(str(name).encode(), digest_size=40).digest())


class Chains:
    """Remembers each beginning of a prompt that it has seen."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._keys: list[ChunkKey] = []
        """The key of each node, by its number."""

    def root(self) -> int:
        """A new namespace: ids below it have nothing in common with those below another."""
        self._keys.append(ChunkKey(b""))
        return len(self._keys) - 1

    def run(self, ids: Sequence[int], root: int) -> tuple[ChunkKey, ...]:
        """The keys of a prompt's blocks."""
        nodes, keys, node, run = self._nodes, self._keys, root, list[ChunkKey]()
        for each in ids:
            step = (node, each)
            node = nodes.setdefault(step, len(keys))
            if node == len(keys):
                keys.append(key_of(node))
            run.append(keys[node])
        return tuple(run)


def numbers(ids: object, field: str = "hash_ids") -> list[int]:
    """Blocks' ids as a trace gives them in ``field``. Raises ValueError."""
    if (
        not isinstance(ids, list)
        or len(ids) > _MOST_BLOCKS
        or not all(type(each) is int for each in ids)
    ):
        raise ValueError(f"{field} is not a list of numbers")
    return ids


def seconds(given: object) -> float:
    """A time as a trace gives it. Raises ValueError."""
    if isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < _LATEST_S:
        return float(given)
    raise ValueError("the time is not a number of seconds")


def tokens(given: object) -> int:
    """A prompt's length as a trace gives it. Raises ValueError."""
    if type(given) is not int or given < 0:
        raise ValueError("the prompt's length is not a number of tokens")
    return given


BLOCK_TOKENS = 512


class Request(NamedTuple):
    """One prompt."""

    at: float
    """Seconds since the trace began."""
    run: tuple[ChunkKey, ...]
    session: str = ""
    """The conversation's name, where the trace has one."""
    hint: Hint = NO_HINT
    """Given after this request."""
    about: tuple[ChunkKey, ...] | None = None
    """Given for a line that is a hint and no prompt: the prompt, with its answer, that it is about.
    Empty: the last prompt of the session."""
    tokens: int = 0
    """Of a prompt whose blocks are all full: how many it had."""
    output: int | None = None
    """Tokens of the answer. None: the trace does not say."""
    stop: str = ""
    """Why the answer ended, where the trace says it."""


def lines_of(path: str | Path) -> Iterator[str]:
    """The lines of a trace. A folder is what the recorder has written. Raises OSError."""
    files = sorted(Path(path).glob(FILES)) if Path(path).is_dir() else [path]
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
    key = cache(key_of)
    return each_line(lines, "Mooncake", lambda given: _request(given, key, partial))


def each_line(
    lines: Iterable[str], form: str, request: Callable[[Any], Request]
) -> Iterator[Request]:
    """``request`` of the JSON of each line that is not empty. Raises ConfigError, which names the
    line and the form of the trace."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield request(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"line {number}: no request of a {form} trace: {error!r}"[:300]
            ) from error


def _request(given: Any, key: Callable[[int], ChunkKey], partial: bool) -> Request:
    """A request, without a hint or an end of another form."""
    ids, tokens = numbers(given["hash_ids"]), given.get("input_length")
    whole = tokens if isinstance(tokens, int) and given.get("whole") is True else 0
    if not partial and isinstance(tokens, int) and not whole:
        ids = ids[: max(0, tokens) // BLOCK_TOKENS]
    at = given.get("timestamp", 0)
    if isinstance(at, bool) or not isinstance(at, int | float):
        raise TypeError("timestamp is not a number")
    kept, _ = hints.read({"keep_s": given.get("keep_s")})
    about = numbers(given["about"], "about") if "about" in given else None
    output, stop = given.get("output_length"), given.get("stop")
    return Request(
        at / 1000,
        tuple(map(key, ids)),
        str(given.get("session", "")),
        kept._replace(over=given.get("over") is True),
        None if about is None else tuple(map(key, about)),
        whole,
        output if type(output) is int and output >= 0 else None,
        stop if stop in STOPS else "",
    )
