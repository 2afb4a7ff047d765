"""Random users of a cell's engines."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.child_process import wait_for
from tests.server_process import ServerProcess, short_folder
from tests.trust.engine.cells import BLOCK, VOCABULARY
from tests.trust.engine.several_hosts import HostsEngine, HostServers
from tests.trust.engine.simulated import Engine, ours

_ENGINE_STEPS = 400
"""After so many steps the next engine begins, with the next seed."""
_LOST, _MOST_LOST = 0.3, 3
"""How likely a server is killed in a step in which a load in parts has yet to arrive, and how often
under one engine: its start takes longer than a hundred steps."""
_FIRST = 160
"""Most tokens of what a session reads first."""
_SHOWS_STEPS = 500
"""In so many steps nearly everything that a cell is about happens."""


class Lost:
    """The server of an engine's own host. It is killed while a load comes in parts, and comes back
    some steps later."""

    def __init__(self, server, engine):
        self._server, self._engine = server, engine
        self._back_in = self._losses = 0

    def step(self):
        """Before each step of the engine."""
        engine = self._engine
        if self._back_in:
            self._back_in -= 1
            if not self._back_in:
                self.mend()
        elif (
            self._losses < _MOST_LOST
            and any(load.parts.reading is not None for load in engine.in_parts)
            and engine.draw.random() < _LOST
        ):
            self._losses += 1
            engine.counts["servers lost under a load in parts"] += 1
            self._server.kill()
            self._back_in = engine.draw.randrange(1, 12)

    def mend(self):
        """It is there again."""
        if not self._server.runs:
            self._server.start()
        store = ours(self._engine.scheduler.connector)._scheduler.store
        wait_for(lambda: store.pool is not None, "the server is there again")


def drive(engine, steps, lost=None):
    """Random users for so many steps, then none."""
    draw, wide = engine.draw, engine.block_tokens // BLOCK
    longest = min(engine.longest, (engine.cell.blocks - 2) * engine.block_tokens)
    stems = [
        [draw.randrange(VOCABULARY) for _ in range(draw.randrange(40 * wide, 300 * wide))]
        for _ in range(5)
    ]
    for _ in range(steps):
        if engine.violations:
            return
        if draw.random() < 0.25 and len(engine.live) < 14:
            talks = (one for one in engine.conversations if len(one) < longest - 120 * wide)
            stem = draw.choice([*stems, *talks])
            tokens = stem[: draw.choice([len(stem), draw.randrange(20, len(stem) + 1)])]
            more = draw.choice([0, 1, 5, 40 * wide, 90 * wide])
            tokens += [draw.randrange(VOCABULARY) for _ in range(more)]
            del tokens[longest - 2 :]
            answer = min(draw.choice([1, 2, 5, 20, 60]), longest - len(tokens) - 1)
            twins = draw.choice([1, 1, 1, 1, 3])
            for _ in range(twins):
                talks_on = engine.cell.sessions and not engine.in_session
                engine.ask(
                    tokens[: _FIRST if talks_on else None],
                    answer,
                    salt=draw.choice(["", "", "", "acme"]),
                    priority=draw.randrange(3),
                    elsewhere=bool(engine.cell.beside) and draw.random() < 0.3,
                    session="" if talks_on else None,
                )
        engine.go_on()
        if engine.live and draw.random() < 0.01:
            engine.abort(draw.choice(engine.live))
        if draw.random() < 0.003:
            engine.reset(connector=draw.random() < 0.3, running=draw.random() < 0.3)
        if draw.random() < (0.3 if engine.cell.early else 0.1):
            engine.crowd_out()
        if engine.cell.loses:
            engine.lose()
        if lost is not None:
            lost.step()
        engine.step()
    if lost is not None:
        lost.mend()
    engine.go_on(end=True)
    engine.drain()


@dataclass
class Told:
    """What a cell did and what was wrong."""

    cell: str
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0


def server_config(cell, folder):
    """Of the server that a cell's engine has. Below a small RAM it has a disk."""
    if not (cell.in_parts or cell.early):
        return {"ram_bytes": 256 * 1024}
    return cell.config | {"nvme_path": folder / "nvme", "nvme_bytes": 4 << 20}


def run(cell, model, steps, seed):
    """One cell, in engines with consecutive seeds. A long run goes on until everything that the
    cell is about has happened, or it has had four times its steps."""
    told, begun = Told(cell.name), time.monotonic()
    missing = set(cell.shows) if steps >= _SHOWS_STEPS else set()
    while not told.violations and (
        told.counts["steps"] < steps or (missing and told.counts["steps"] < 4 * steps)
    ):
        with ExitStack() as stack:
            folder = stack.enter_context(short_folder())
            lost, config = None, server_config(cell, folder)
            server = ServerProcess(folder, slow_disk=cell.early, **config)
            if cell.lower == "server":
                stack.enter_context(server)
            draw = random.Random(f"{cell.name} {seed}")
            if cell.hosts > 1:
                engine: Engine = HostsEngine(
                    cell, model, folder, draw, HostServers(stack, cell.with_redis)
                )
            else:
                engine = Engine(cell, model, folder, draw)
                lost = Lost(server, engine) if cell.trouble else None
            try:
                drive(engine, min(_ENGINE_STEPS, steps), lost)
            except Exception as error:  # noqa: BLE001 whatever ends an engine is a violation
                engine.violations.append(f"the engine died: {type(error).__name__}: {error}")
            finally:
                engine.close()
        told.violations += [f"{cell.name}, seed {seed}: {text}" for text in engine.violations]
        told.counts.update(engine.counts)
        told.counts["seeds"] += 1
        missing = {mark for mark in missing if not told.counts[mark]}
        seed += 1
    if missing and not told.violations:
        told.violations.append(f"{cell.name}: not in force: {', '.join(sorted(missing))}")
    told.seconds = round(time.monotonic() - begun, 1)
    return told


def quiet():
    """vLLM and kvtier say nothing, and what they have imported is no longer looked through for
    garbage. Called in every process."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton says at the end what has leaked
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.ERROR)
