"""Engines' lives, each forked from a process that has imported vLLM, two at a time.

A life costs two seconds of a core then, of which an engine's start is the most.
"""

import json
import os
import queue
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.integration.engine_modes import TOLD, V1, Mode
from tests.integration.fork_server import ForkServer
from tests.integration.transfer import transfer

CHUNK = 64
LIMIT_S = 300.0
_HOST = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # the thread count decides the last bits of a sum
    "KVTIER_ADMIN": "off",
}


@dataclass(frozen=True)
class Spec:
    """All that decides an engine's life. It runs in the folder where ``model`` lies, which it is
    told by its last name (``by_path``: by its whole path), so that what differs in content does not
    differ in name. ``engine``: arguments of ``vllm.LLM``. ``tiers``: kvtier's keys; None: an engine
    without kvtier. ``vllm``: the folder of another vLLM than Python's own.
    ``hold``: see ``life.live``."""

    model: Path
    prompts: tuple[Mapping[str, Any], ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    tiers: Mapping[str, Any] | None = None
    mode: Mode = V1
    vllm: Path | None = None
    hold: Path | None = None
    by_path: bool = False

    def engine_with(self, **more):
        return replace(self, engine={**self.engine, **more})

    def environment_with(self, **more):
        return replace(self, environment={**self.environment, **more})

    def with_tiers(self, **more):
        return replace(self, tiers={**(self.tiers or {}), **more})

    def given(self):
        """What the life's program reads."""
        engine = dict(self.engine)
        if self.tiers is not None:
            engine["kv_transfer_config"] = transfer() | {
                "kv_connector_extra_config": {"load_every_hit": True}
            }
        here = self.model.is_absolute() and not self.by_path
        return {
            "folder": str(self.model.parent) if here else None,
            "model": self.model.name if here else str(self.model),
            "prompts": list(self.prompts),
            "engine": engine,
            "hold": self.hold and str(self.hold),
        }

    def variables(self):
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVTIER_", "LMCACHE_", "VLLM_", "AWS_"))
        }
        kvtier = {} if self.tiers is None else {"chunk_tokens": CHUNK, **self.tiers}
        if kvtier and "server" not in kvtier:
            kvtier["ram_bytes"] = "16MiB"
        return (
            kept
            | _HOST
            | {f"KVTIER_{name.upper()}": str(value) for name, value in kvtier.items()}
            | dict(self.environment)
        )


class EngineFailedError(Exception):
    """The engine did not live: its log."""

    @property
    def last(self):
        """The last line that names an error."""
        named = re.findall(r"^.*\w(?:Error|Exception)\b.*$", str(self), re.MULTILINE)
        return str((named or [str(self)])[-1])[-240:]


class Lives:
    """Use as a context manager. ``at_once``: fork servers of the common mode; of another mode there
    is one."""

    def __init__(self, folder, at_once=2):
        self._folder, self._at_once = folder, at_once
        self._idle: dict[tuple[Mode, Path | None], queue.LifoQueue[ForkServer | None]] = {}
        self._lock, self._stack, self._count = threading.Lock(), ExitStack(), 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def told(self, spec, out_is=id):
        """What the engine told. ``out_is`` hears in which file. Raises EngineFailedError."""
        with self._lock:
            self._count += 1
            folder = self._folder / f"life{self._count}"
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(spec.given()))
        out, log = folder / "out.json", folder / "log"
        out_is(out)
        variables = spec.variables() | {TOLD: str(folder / "told"), "TEST_FOLDER": str(folder)}
        with self._server(spec) as server:
            status = server.run(
                "tests.trust.identity.life",
                [str(out), str(folder / "spec.json")],
                variables,
                log,
                LIMIT_S,
            )
        if status or not out.exists():
            raise EngineFailedError(f"status {status}\n{log.read_text(errors='replace')}")
        return dict(json.loads(out.read_text()))

    @contextmanager
    def _server(self, spec):
        key = (spec.mode, spec.vllm)
        with self._lock:
            if key not in self._idle:
                self._idle[key] = queue.LifoQueue()
                common = spec.mode is V1 and spec.vllm is None
                for _ in range(self._at_once + 1 if common else 1):  # one more: an A that is held
                    self._idle[key].put(None)
        idle = self._idle[key]
        server = idle.get()
        try:
            if server is None:
                made = ForkServer(sys.executable, spec.mode, spec.vllm)
                with self._lock:
                    server = self._stack.enter_context(made)
            yield server
        finally:
            idle.put(server)


def copied(folder, into):
    """A copy of a model's folder, or of a tier's."""
    return Path(shutil.copytree(folder, into, dirs_exist_ok=True))


def older():
    return next(iter(sorted((ROOT / ".venv-old").glob("vllm-*"))), None)


def newer():
    return next(iter(sorted((ROOT / ".venv-next").glob("vllm-*"))), None)
