"""kv-cache-tester's traces: one conversation of a coding agent a document of JSON, with each prompt
as ids of blocks of 64 tokens (https://github.com/callanjfox/kv-cache-tester). A request may hold
the requests of a sub-agent.

Times count from the beginning of a conversation. So all conversations of a folder begin at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvtier.bench.traces.mooncake import Chains, Request, numbers, seconds, tokens
from kvtier.core.errors import ConfigError


def read(documents: Iterable[tuple[str, Any]], partial: bool = False) -> tuple[list[Request], int]:
    """The requests of these conversations by their times, and the tokens of a block. Raises
    ConfigError, which names the document.

    Args:
        documents: the name of each document, for errors, and its JSON.
        partial: keep a prompt's last block although it is not full.
    """
    chains, requests, sizes = Chains(), list[Request](), dict[int, str]()
    shared = chains.root()
    for name, given in documents:
        try:
            block = tokens(given["block_size"])
            sizes[block or 1] = name
            root = shared if given.get("hash_id_scope") == "global" else chains.root()
            for at, ids, length, session in _leaves(given["requests"], str(given.get("id", name))):
                kept = ids if partial else ids[: length // (block or 1)]
                requests.append(Request(at, chains.run(kept, root), session))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{name}: no conversation of kv-cache-tester: {error!r}"[:300]
            ) from error
    if len(sizes) > 1:
        raise ConfigError(
            f"blocks of {' and '.join(f'{size} tokens ({name})' for size, name in sizes.items())} "
            "in one trace: give the conversations of one block size"
        )
    requests.sort(key=lambda request: request.at)
    return requests, next(iter(sizes), 0)


def _leaves(entries: Iterable[Any], session: str) -> Iterator[tuple[float, list[int], int, str]]:
    """Each request's time, ids and length, and its session. A sub-agent has a session of its
    own."""
    for entry in entries:
        if entry.get("type") == "subagent":
            yield from _leaves(entry["requests"], f"{session}/{entry.get('agent_id', '')}")
        else:
            yield seconds(entry["t"]), numbers(entry["hash_ids"]), tokens(entry["in"]), session
