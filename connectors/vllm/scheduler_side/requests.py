"""Requests: parts of a request besides its tokens that decide its KV: LoRA adapter, cache salt,
multimodal input. And why a request ended."""

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
from typing import Any, NamedTuple, Protocol

from kvtier.connectors.vllm.identity import DIGESTS
from kvtier.connectors.vllm.naming.digests import DigestError, FileDigests, content_files, stamp
from kvtier.connectors.vllm.naming.media import MediaNames, media_parts
from kvtier.core.lookup import STOPS, Stop
from kvtier.core.processes import environment

logger = logging.getLogger("kvtier.connectors.vllm")

_STOPS = {str(stop): stop for stop in STOPS}
CACHE = "kvtier.cache"
"""Key of a request's ``kv_transfer_params``: false keeps kvtier out of the request."""
_ADAPTER_WAIT_S = 5.0
"""Longest wait of a request for the digest of an adapter's files."""
_PLACE_OF_ADAPTER = frozenset(
    ("lora_name", "lora_int_id", "lora_path", "load_inplace", "base_model_name")
)
"""Fields of vLLM's LoRARequest that say where the adapter lies and what it is called."""


class NamesAdapters(Protocol):
    def identity(self, lora: Any) -> list[str] | None: ...


@dataclass
class _LoraFiles:
    """Files of an adapter when a request first asked for it."""

    stamp: list[tuple[int | str, ...]]
    digest: Future[str] | None
    """Digest of the adapter's files; None where it is not known which files vLLM reads."""
    until: float
    """Time until which a request waits for the digest, in seconds of the clock."""
    start: str
    """Word of this start, which names the adapter where its content does not."""
    clock: Callable[[], float]
    changed: bool = False

    @property
    def is_coming(self) -> bool:
        waits = self.digest is not None and not self.digest.done() and not self.changed
        return waits and self.clock() < self.until

    def identity(self, lora: Any) -> list[str] | None:
        if self.changed:
            return None
        others = sorted(
            f"{name}={value!r}"
            for name, value in _fields(lora)
            if name not in _PLACE_OF_ADAPTER and value
        )
        return ["content", self._content(), *others]

    def _content(self) -> str:
        if self.digest is not None:
            try:
                return self.digest.result(max(0.0, self.until - self.clock()))
            except (LateError, DigestError) as error:
                logger.warning(
                    "a LoRA adapter cannot be named by its content (%s): what kvtier keeps of it "
                    "is of use to this start of the engine only",
                    str(error) or "its files were not read in time",
                )
                self.digest = None
        return self.start


class Adapters:
    """Names of LoRA adapters by content, so that a renamed adapter is shared and a replaced one is
    not.

    vLLM keeps an adapter in memory after its files change, and reloads it whenever it likes. Once
    the files of a known adapter change, it is unknown which weights a request uses: the adapter is
    not cached until a request asks to load it anew (``load_inplace``)."""

    def __init__(
        self, digests: FileDigests = DIGESTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._digests, self._clock = digests, clock
        self._known: dict[tuple[str, int, str], _LoraFiles] = {}

    def identity(self, lora: Any) -> list[str] | None:
        """See :class:`NamesAdapters`. Waits until the adapter's files are read, five seconds at
        most."""
        known = self.found(lora)
        return None if known is None else known.identity(lora)

    def found(self, lora: Any) -> _LoraFiles | None:
        """Return the adapter's files, None if they cannot be read."""
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
                start = secrets.token_hex(16)
                known = _LoraFiles(now, digest, until, start, self._clock)
                self._known[place] = known
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
    """Return the local folder from which vLLM reads an adapter, found as
    ``vllm.lora.utils.get_adapter_absolute_path`` does. None where only the load itself decides: a
    hub's name in an engine that may ask the hub, which can have a newer adapter each time."""
    if os.path.isabs(path):
        return Path(path)
    if path.startswith("~"):
        return Path(path).expanduser()
    if os.path.exists(path):
        return Path(path).absolute()
    if environment().get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
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
    """Parts of the names of a request's chunks beside tokens."""

    whole: bytes | None
    """Part of all chunks' names. None if the request is not cached."""
    media: dict[int, bytes]
    """Part of the name of each chunk that overlaps media, by the chunk's number."""
    first: tuple[bytes, ...]
    """Parts of the first chunk's name, in the order of
    :data:`kvtier.store.reports.miss_reasons.EXTRAS`."""
    lasts: bool
    """Whether another start of the engine gives the same names."""


_ONLY_TOKENS = Named(b"", {}, (b"", b"", b""), lasts=True)


class RequestNames:
    """Names of the requests of one engine. One thread uses it."""

    def __init__(self, adapters: Adapters | None = None, media: MediaNames | None = None) -> None:
        self._adapters = adapters or Adapters()
        self._media = media or MediaNames()

    def of(self, request: Any, chunk_tokens: int) -> Named | None:
        """Return the request's names, or None (ask again) while its adapter's files are read."""
        lora = request.lora_request
        special = lora or request.cache_salt or request.mm_features or request.kv_transfer_params
        if not special and getattr(request, "prompt_embeds", None) is None:
            return _ONLY_TOKENS
        adapter = None if lora is None else self._adapters.found(lora)
        if adapter is not None and adapter.is_coming:
            return None
        media = media_extra(request, chunk_tokens, self._media)
        is_known = media is not None and (lora is None or adapter is not None)
        whole = request_extra(request, adapter or self._adapters) if is_known else None
        if whole is None or media is None:
            return Named(None, {}, (), lasts=_asks_not_to(request))
        told = json.dumps(adapter.identity(lora)).encode() if adapter is not None else b""
        first = ((request.cache_salt or "").encode(), told, media.get(0, b""))
        lasts = self._media.last(request.mm_features or ())
        lasts &= adapter is None or adapter.digest is not None
        return Named(whole, media, first, lasts=lasts)


def _asks_not_to(request: Any) -> bool:
    return (request.kv_transfer_params or {}).get(CACHE, True) is not True


def request_extra(request: Any, adapters: NamesAdapters) -> bytes | None:
    """Return canonical bytes of what decides a whole request's KV besides its tokens. None if its
    KV cannot be named (prompt embeddings, or an adapter that changed), or it asks not to be kept
    (:data:`CACHE`, whatever is not plainly true counts as false)."""
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
    """Return digests and offsets of media, as canonical bytes, of each chunk that overlaps some.
    None if the request must not be cached."""
    parts = media_parts(names, request.mm_features or (), chunk_tokens)
    if parts is None:
        return None
    return {index: json.dumps(sorted(media)).encode() for index, media in parts.items()}


def stop_of(request: Any) -> Stop:
    return _STOPS.get(str(request.get_finished_reason()), "other")
