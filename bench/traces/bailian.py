"""Bailian's traces (qwen-bailian-usagetraces-anon): one request a line of JSON, with its prompt as
ids of blocks of 16 tokens (Wang et al., *KVCache Cache in the Wild*, USENIX ATC 2025). A request
names the one that it continues, so that sessions are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvtier.bench.traces.mooncake import Chains, Request, each_line, numbers, seconds, tokens

BLOCK_TOKENS = 16


def read(lines: Iterable[str], partial: bool = False) -> Iterator[Request]:
    """The requests of a trace. Raises ConfigError, which names the line.

    Args:
        lines: JSON, one request each. Empty lines are skipped.
        partial: keep a prompt's last block although it is not full.
    """
    chains = Chains()
    root, sessions = chains.root(), dict[object, str]()

    def request(given: Any) -> Request:
        ids = numbers(given["hash_ids"])
        if not partial:
            ids = ids[: tokens(given["input_length"]) // BLOCK_TOKENS]
        chat, parent = given["chat_id"], given.get("parent_chat_id")
        session = sessions[chat] = sessions.get(parent, str(chat))
        return Request(seconds(given["timestamp"]), chains.run(ids, root), session)

    return each_line(lines, "Bailian", request)
