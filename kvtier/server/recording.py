"""Recording: what a server's Stores note is written on its loop, by aiofiles."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import aiofiles
import aiofiles.os

from kvtier.store.record.folder import RecordFolder, Trouble
from kvtier.store.record.recorder import Batch, Recorder

_PAUSE_S = 0.25
"""Notes wait for so long, so that many of them are written at once."""


class LoopWriter:
    """Writes what ``recorder`` notes. ``trouble``: what is wrong with the server, by subject."""

    def __init__(
        self, recorder: Recorder, folder: RecordFolder, trouble: MutableMapping[str, str]
    ) -> None:
        self._recorder, self._folder, self._shown = recorder, folder, trouble
        self._trouble = Trouble(folder.path)
        self._file: Any = None
        self._path = folder.path
        self._size = 0

    async def run(self, over: asyncio.Event) -> None:
        """Write until it is over, and then what waits."""
        while not over.is_set():
            await self._write_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _PAUSE_S)
        self._recorder.release()
        await self._write_all()
        await self._end()

    async def _write_all(self) -> None:
        while (batch := await asyncio.to_thread(self._recorder.take)).lines:
            try:
                await self._write(batch)
            except OSError as error:
                await self._undo()
                self._trouble.failed(error)
                self._shown["record"] = self._trouble.said
                self._recorder.ended(batch, written=False)
            else:
                self._trouble.ended()
                self._shown.pop("record", None)
                self._recorder.ended(batch, written=True)

    async def _write(self, batch: Batch) -> None:
        rotation, path = self._folder.rotation, self._folder.path
        place = rotation.place(time.time(), len(batch.data))
        for name in place.leaving:
            with contextlib.suppress(FileNotFoundError):
                await aiofiles.os.remove(path / name)
        if place.is_new:
            await self._end()
            self._path, self._size = path / place.name, 0
            self._file = await aiofiles.open(self._path, "xb", buffering=0, opener=_own)
        else:
            await aiofiles.os.stat(self._path)  # a removed file would lose its lines
        done = 0
        while done < len(batch.data):
            done += await self._file.write(batch.data[done:])
        self._size += done
        rotation.wrote(done)

    async def _undo(self) -> None:
        """A part of a line may have been written. The next lines go into another file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                await self._file.truncate(self._size)
                if not self._size:
                    await aiofiles.os.remove(self._path)
        await self._end()
        self._folder.rotation.end()

    async def _end(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                await file.close()


def _own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.asynccontextmanager
async def recording(
    recorder: Recorder, folder: RecordFolder, trouble: MutableMapping[str, str]
) -> AsyncIterator[None]:
    """Record until the context ends."""
    over = asyncio.Event()
    writing = asyncio.create_task(LoopWriter(recorder, folder, trouble).run(over))
    try:
        yield
    finally:
        over.set()
        await writing
        folder.close()
