"""What besides its tokens decides a request's KV: LoRA adapter, cache salt, multimodal input. And
why a request ended.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.connectors.vllm.identity import DIGESTS
from kvtier.connectors.vllm.naming.digests import DigestError, FileDigests, content_files, stamp
from kvtier.connectors.vllm.naming.media import MediaNames, media_parts
from kvtier.core.lookup import STOPS, Stop

logger = logging.getLogger("kvtier.connectors.vllm")

CACHE = "kvtier.cache"
"""In a request's ``kv_transfer_params``: false keeps kvtier out of the request. Nothing is loaded
for it and nothing of it is kept."""
_ADAPTER_WAIT_S = 5.0
"""A request waits so long for the digest of an adapter's files."""
_PLACE_OF_ADAPTER = frozenset(
    ("lora_name", "lora_int_id", "lora_path", "load_inplace", "base_model_name")
)
"""Fields of vLLM's LoRARequest that say where the adapter lies and what it is called."""


@dataclass
class _Adapter:
    """An adapter as it was when a request first asked for it."""

    stamp: list[tuple[int | str, ...]]
    digest: Future[str] | None
    """None: it is not known which files vLLM reads."""
    until: float
    start: str
    """A word of this start, which names it where its content does not."""
    changed: bool = False

    def content(self, wait_s: float) -> str:
        """Its name by content, or by this start. "start" where the digest was late or failed."""
        if self.digest is not None:
            try:
                return self.digest.result(wait_s)
            except (LateError, DigestError) as error:
                logger.warning(
                    "a LoRA adapter cannot be named by its content (%s): what kvtier keeps of it "
                    "is of use to this start of the engine only",
                    str(error) or "its files were not read in time",
                )
                self.digest = None
        return self.start


class Adapters:
    """Names LoRA adapters by content, so that a renamed adapter is shared and a replaced one is
    not.

    vLLM keeps an adapter in memory after its files change, and reloads it whenever it likes. So
    once the files of a known adapter change, it is unknown which weights a request uses. From
    then on the adapter is not cached, until a request asks to load it anew (``load_inplace``).
    """

    def __init__(
        self, digests: FileDigests = DIGESTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._digests, self._clock = digests, clock
        self._known: dict[tuple[str, int, str], _Adapter] = {}

    def is_coming(self, lora: Any) -> bool:
        """Whether the digest of the adapter's files is being made. It does not wait."""
        known = self._found(lora)
        waits = known is not None and known.digest is not None and not known.digest.done()
        return waits and known is not None and self._clock() < known.until

    def identity(self, lora: Any) -> list[str] | None:
        """The adapter's identity, which can be written as JSON. None when requests with this
        adapter must not be cached. It waits until the adapter's files are read, five seconds at
        most."""
        known = self._found(lora)
        if known is None or known.changed:
            return None
        content = known.content(max(0.0, known.until - self._clock()))
        others = sorted(
            f"{name}={value!r}"
            for name, value in _fields(lora)
            if name not in _PLACE_OF_ADAPTER and value
        )
        return ["content", content, *others]

    def _found(self, lora: Any) -> _Adapter | None:
        """None: its files cannot be read."""
        place = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        known = self._known.get(place)
        try:
            folder = adapter_folder(lora.lora_path)
            files = content_files(folder, configured=False) if folder is not None else []
            now = stamp(files)
            if known is None or (lora.load_inplace and known.stamp != now):
                digest = self._digests.begin(files, folder) if folder and files else None
                if digest is None:
                    logger.warning(
                        "the files of LoRA adapter %s are not known here (an adapter by a hub's "
                        "name is, with HF_HUB_OFFLINE=1): what kvtier keeps of it is of use to "
                        "this start of the engine only",
                        lora.lora_name,
                    )
                until = self._clock() + _ADAPTER_WAIT_S
                known = self._known[place] = _Adapter(now, digest, until, secrets.token_hex(16))
        except (OSError, DigestError):
            return None
        if known.stamp != now and not known.changed:
            logger.warning(
                "files of LoRA adapter %s changed under a running engine: not cached any more",
                lora.lora_name,
            )
            known.changed = True
        return known


def adapter_folder(path: str) -> Path | None:
    """The local folder from which vLLM reads an adapter, found as vLLM finds it
    (``vllm.lora.utils.get_adapter_absolute_path``). None where only the load itself decides: a
    hub's name in an engine that may ask the hub, which can have a newer adapter each time."""
    if os.path.isabs(path):
        return Path(path)
    if path.startswith("~"):
        return Path(path).expanduser()
    if os.path.exists(path):
        return Path(path).absolute()
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None
    from huggingface_hub import constants, snapshot_download

    if not constants.HF_HUB_OFFLINE:
        return None
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):
        return None


def _fields(lora: Any) -> list[tuple[str, Any]]:
    names = getattr(lora, "__struct_fields__", None) or vars(lora)
    return [(name, getattr(lora, name)) for name in names]


class Named(NamedTuple):
    """What the names of a request's chunks are made of beside tokens."""

    whole: bytes | None
    """Of the whole request. None: it is not cached."""
    media: dict[int, bytes]
    """Of each chunk that overlaps media."""
    first: tuple[bytes, ...]
    """Of the first chunk, in the order of :data:`kvtier.store.reports.miss_reasons.EXTRAS`."""
    lasts: bool
    """Whether another start of the engine gives the same names."""


class RequestNames:
    """Makes the names of one engine's requests. One thread uses it."""

    def __init__(self, adapters: Adapters | None = None, media: MediaNames | None = None) -> None:
        self._adapters = adapters or Adapters()
        self._media = media or MediaNames()

    def of(self, request: Any, chunk_tokens: int) -> Named | None:
        """The names of a request. None: the files of its adapter are still being read, so ask
        again."""
        lora = request.lora_request
        if lora is not None and self._adapters.is_coming(lora):
            return None
        whole = request_extra(request, self._adapters)
        media = media_extra(request, chunk_tokens, self._media)
        if media is None:
            return Named(None, {}, (), lasts=False)
        adapter = self._adapters.identity(lora) if lora is not None else None
        told = json.dumps(adapter).encode() if adapter else b""
        first = ((request.cache_salt or "").encode(), told, media.get(0, b""))
        unkept = whole is None and not _asks_not_to(request)
        lasts = not unkept and self._media.last(request.mm_features or ())
        return Named(whole, media, first, lasts=lasts)


def _asks_not_to(request: Any) -> bool:
    return (request.kv_transfer_params or {}).get(CACHE, True) is not True


def request_extra(request: Any, adapters: Adapters) -> bytes | None:
    """Canonical bytes of what decides a whole request's KV besides its tokens.

    None means that kvtier does not touch the request. Either its KV cannot be named (prompt
    embeddings, or an adapter that changed), or it asks not to be kept (:data:`CACHE`, whatever is
    not plainly true counts as false).
    """
    if _asks_not_to(request) or getattr(request, "prompt_embeds", None) is not None:
        return None
    lora, salt = request.lora_request, request.cache_salt
    if lora is None and not salt:
        return b""
    adapter = None if lora is None else adapters.identity(lora)
    if lora is not None and adapter is None:
        return None
    return json.dumps({"lora": adapter, "salt": salt}, sort_keys=True).encode()


def media_extra(request: Any, chunk_tokens: int, names: MediaNames) -> dict[int, bytes] | None:
    """For each chunk that overlaps multimodal input: its digests and offsets, as canonical bytes.
    None: the request must not be cached."""
    parts = media_parts(names, request.mm_features or (), chunk_tokens)
    if parts is None:
        return None
    return {index: json.dumps(sorted(media)).encode() for index, media in parts.items()}


def stop_of(request: Any) -> Stop:
    """Why the request ended."""
    reason = str(request.get_finished_reason())
    return next((stop for stop in STOPS if stop == reason), "other")
