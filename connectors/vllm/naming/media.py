"""Media names: pictures, sound and video by what the model gets of them.

vLLM's own name of an item may be a client's word, or a counter of its process where vLLM keeps
neither prefixes nor processed media. So the item's processed tensors are named, once for each
object that vLLM hands on. BLAKE3 has a picture of 10 MB in 3 ms, and vLLM brings it."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import ref

_MOST_NAMES = 1 << 16
"""Most names that are remembered: more than vLLM's cache of encoded media holds."""
_MOST_LEVELS = 4


class MediaNames:
    """Digests of the media of one engine's requests. One thread uses it.

    vLLM's cache of encoded media goes by vLLM's own name of an item. So when one name comes with
    two contents, it is unknown which of them the model gets, and neither is named any more."""

    def __init__(self) -> None:
        self._start = secrets.token_hex(16)
        self._known = OrderedDict[str, _Item]()
        """Item by vLLM's name, the one asked for last at the end."""

    def name(self, feature: Any) -> str | None:
        """Return the digest of an item's content. Where it cannot be read here (it is on a GPU, or
        in memory that only workers map), return vLLM's name with a word of this start. None if the
        request must not be cached, because vLLM's name has two contents."""
        known = self._known.get(feature.identifier)
        if known is None or feature.data is None or known.seen() is not feature.data:
            digest = digest_of(feature.data)
            has_two = known is not None and (known.has_two or known.digest != digest)
            known = _Item(ref(feature.data) if digest else _nothing, digest, has_two)
            self._known[feature.identifier] = known
            if len(self._known) > _MOST_NAMES:
                self._known.popitem(last=False)
        self._known.move_to_end(feature.identifier)
        if known.has_two:
            return None
        return known.digest or f"{self._start} {feature.identifier}"

    def last(self, features: Iterable[Any]) -> bool:
        return all(
            known.digest and not known.has_two
            for feature in features
            if (known := self._known.get(feature.identifier)) is not None
        )


class _Item(NamedTuple):
    seen: Callable[[], Any]
    """Weak reference to the object that was read."""
    digest: str
    """Digest of the object, "" where it cannot be read."""
    has_two: bool


def digest_of(data: Any) -> str:
    """Return a hex digest of processed media: names, shapes, types and bytes of tensors. "" for
    what this process cannot read, such as the number of a place in memory that workers share."""
    digest = _new()
    try:
        _add(digest, data, 0)
    except _UnreadableError:
        return ""
    return str(digest.hexdigest())


class _UnreadableError(Exception):
    pass


def _add(digest: Any, value: Any, depth: int) -> None:
    if depth > _MOST_LEVELS or value is None:
        raise _UnreadableError
    if isinstance(value, Mapping):
        digest.update(f"{len(value)} names;".encode())
        for name, inner in sorted(value.items()):
            digest.update(f"{name};".encode())
            _add(digest, inner, depth + 1)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} items;".encode())
        for inner in value:
            _add(digest, inner, depth + 1)
    elif hasattr(value, "field") and hasattr(value, "data"):  # vLLM's MultiModalFieldElem
        _add(digest, value.data, depth)
    elif hasattr(value, "data_ptr"):
        _add_tensor(digest, value)
    else:
        raise _UnreadableError


def _add_tensor(digest: Any, tensor: Any) -> None:
    import torch

    if tensor.device.type != "cpu":
        raise _UnreadableError
    digest.update(f"{list(tensor.shape)} {tensor.dtype};".encode())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    digest.update(memoryview(flat.numpy()))


def _new() -> Any:
    try:
        from blake3 import blake3
    except ImportError:
        return hashlib.sha256()
    return blake3()


def _nothing() -> None:
    """Stand for a weak reference to an item that came without its content."""


def media_parts(
    names: MediaNames, features: Iterable[Any], chunk_tokens: int
) -> dict[int, list[tuple[str, int]]] | None:
    """Return name and offset of each item by chunk that overlaps it. None if one has no name."""
    found: dict[int, list[tuple[str, int]]] = {}
    for feature in features:
        name, position = names.name(feature), feature.mm_position
        if name is None:
            return None
        last = position.offset + max(1, position.length) - 1
        for index in range(position.offset // chunk_tokens, last // chunk_tokens + 1):
            found.setdefault(index, []).append((name, position.offset))
    return found
