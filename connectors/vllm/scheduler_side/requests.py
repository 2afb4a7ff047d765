"""What besides its tokens decides a request's KV: LoRA adapter, cache salt, multimodal input. And
why a request ended.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from kvtier.connectors.vllm.identity import files_digest
from kvtier.core.lookup import STOPS, Stop

logger = logging.getLogger("kvtier.connectors.vllm")

CACHE = "kvtier.cache"
"""In a request's ``kv_transfer_params``: false keeps kvtier out of the request. Nothing is loaded
for it and nothing of it is kept."""


class Adapters:
    """Names LoRA adapters by content, so that a renamed adapter is shared and a replaced one is
    not.

    vLLM keeps an adapter in memory after its files change, and reloads it whenever it likes. So
    once the files of a known adapter change, it is unknown which weights a request uses. From
    then on the adapter is not cached, until a request asks to load it anew (``load_inplace``).
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], tuple[Any, list[str] | None]] = {}

    def identity(self, lora: Any) -> list[str] | None:
        """The adapter's identity, which can be written as JSON. None when requests with this
        adapter must not be cached."""
        files = sorted(Path(lora.lora_path).glob("adapter_*"))
        try:
            stamp = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
            place = (lora.lora_name, lora.lora_int_id, lora.lora_path)
            known = self._known.get(place)
            if known is None or lora.load_inplace:
                content = (
                    ["content", files_digest(files)]
                    if files
                    else ["name", lora.lora_name, lora.lora_path]
                )
                known = self._known[place] = (stamp, content)
        except OSError:
            return None
        if known[0] != stamp and known[1] is not None:
            logger.warning(
                "files of LoRA adapter %s changed under a running engine: not cached any more",
                place[0],
            )
            known = self._known[place] = (stamp, None)
        return known[1]


def request_extra(request: Any, adapters: Adapters) -> bytes | None:
    """Canonical bytes of what decides a whole request's KV besides its tokens.

    None means that kvtier does not touch the request. Either its KV cannot be named (prompt
    embeddings, or an adapter that changed), or it asks not to be kept (:data:`CACHE`, whatever is
    not plainly true counts as false).
    """
    if (request.kv_transfer_params or {}).get(CACHE, True) is not True:
        return None
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    lora, salt = request.lora_request, request.cache_salt
    if lora is None and not salt:
        return b""
    adapter = None if lora is None else adapters.identity(lora)
    if lora is not None and adapter is None:
        return None
    return json.dumps({"lora": adapter, "salt": salt}, sort_keys=True).encode()


def first_extras(request: Any, adapters: Adapters, media: dict[int, bytes]) -> tuple[bytes, ...]:
    """What the key of a request's first chunk depends on besides its tokens, in the order of
    :data:`kvtier.store.reports.miss_reasons.EXTRAS`."""
    adapter = None if request.lora_request is None else adapters.identity(request.lora_request)
    return (
        (request.cache_salt or "").encode(),
        json.dumps(adapter).encode() if adapter else b"",
        media.get(0, b""),
    )


def media_extra(request: Any, chunk_tokens: int) -> dict[int, bytes]:
    """For each chunk that overlaps multimodal input: its content hashes and offsets, as canonical
    bytes."""
    found: dict[int, list[tuple[str, int]]] = {}
    for feature in request.mm_features or ():
        position = feature.mm_position
        last = position.offset + max(1, position.length) - 1
        for index in range(position.offset // chunk_tokens, last // chunk_tokens + 1):
            found.setdefault(index, []).append((feature.identifier, position.offset))
    return {index: json.dumps(sorted(media)).encode() for index, media in found.items()}


def stop_of(request: Any) -> Stop:
    """Why the request ended."""
    reason = str(request.get_finished_reason())
    return next((stop for stop in STOPS if stop == reason), "other")
