"""Record until the context ends. ``trouble``: what is wrong with the server, by subject."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, MutableMapping

from aiofiles.os import wrap

from kvtier.store.observers.record.folder import RecordFolder, RecordWriter
from kvtier.store.observers.record.recorder import Recorder

_PAUSE_S = 0.25
"""So that many notes are written at once."""


@contextlib.asynccontextmanager
async def recording(
    recorder: Recorder, folder: RecordFolder, trouble: MutableMapping[str, str]
) -> AsyncIterator[None]:
    """Record until the context ends. ``trouble``: what is wrong with the server, by subject."""
    over, writer = asyncio.Event(), RecordWriter(recorder, folder)
    writing = asyncio.create_task(_write_until(over, writer, trouble))
    try:
        yield
    finally:
        over.set()
        await writing
        await wrap(writer.close)()


async def _write_until(
    over: asyncio.Event, writer: RecordWriter, trouble: MutableMapping[str, str]
) -> None:
    write_all = wrap(writer.write_all)
    while not over.is_set():
        await write_all()
        if writer.trouble:
            trouble["record"] = writer.trouble
        else:
            trouble.pop("record", None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _PAUSE_S)
