"""Where an attack of the suite happens: a server in a process of its own, the honest client beside
it, and what both felt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.admin_server import AdminServer
from tests.attack.honest import CHUNKS, Honest, Phase
from tests.server_process import SLOT

MIB = 1 << 20
RAM_BYTES = 1024 * SLOT
_SETTLE_S = 0.5
"""Of quiet before an attack, and of its echo behind it."""
_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Bound:
    """What an attack may cost others at most. Infinite: no promise is made of it."""

    p99_ms: float = 100.0
    lost: float = 0
    grown_mib: float = 32.0


@dataclass
class Felt:
    """``before_mib``, ``most_mib``: the server's own memory and its processes', without the
    pool."""

    quiet: Phase = field(default_factory=Phase)
    under: Phase = field(default_factory=Phase)
    before_mib: float = 0.0
    most_mib: float = 0.0
    broken: list[str] = field(default_factory=list)
    """Promises that are not about time, hits or memory."""

    def beyond(self, bound):
        figures = (
            (self.under.p99_ms, bound.p99_ms, "ms, the 99th percentile of what honest ones wait"),
            (self.under.lost, bound.lost, "hits lost"),
            (self.most_mib - self.before_mib, bound.grown_mib, "MiB more"),
            (self.under.wrong, 0, "chunks with wrong bytes"),
        )
        said = [
            f"{got:.4g} of at most {most:g} {what}" for got, most, what in figures if got > most
        ]
        return said + self.broken


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the table. ``run`` sets the stage, attacks in ``with stage.attack(...)``, and ends
    by itself."""

    name: str
    attacker: str
    what: str
    run: Callable[[Stage], None]
    bound: Bound = Bound()

    def felt(self, folder):
        with ExitStack() as stack:
            stage = Stage(stack, folder)
            try:
                self.run(stage)
            except Exception as error:  # noqa: BLE001 - a row of the table, and the next attack
                stage.felt.broken.append(f"it ended with {error!r}")
            if not stage.felt.under.asked and not stage.felt.broken:
                stage.felt.broken.append("nobody was asked what he felt")
        return stage.felt


class Stage:
    def __init__(self, stack, folder):
        self.stack, self.folder = stack, folder
        self.felt = Felt()
        self._away = False

    def serve(self, *listen, **settings):
        given = {"ram_bytes": RAM_BYTES} | settings
        return self.stack.enter_context(AdminServer(self.folder, *listen, own_python=True, **given))

    def visit(self, server, namespace=""):
        """The honest client saves its prompt and leaves. It must find it when it comes back."""
        with Honest(str(server.socket), namespace) as honest:
            self.must(honest.missed == CHUNKS, "a prompt was there before it was saved")
        self._away = True

    @contextmanager
    def attack(self, server, namespace=""):
        """The attack happens in this context, beside the honest client."""
        over = threading.Event()

        def watched():
            while not over.wait(_SAMPLE_S):
                self.felt.most_mib = max(self.felt.most_mib, memory_mib(server.pid))

        with Honest(str(server.socket), namespace) as honest:
            time.sleep(_SETTLE_S)
            self.felt.quiet = honest.phase()
            self.felt.before_mib = self.felt.most_mib = memory_mib(server.pid)
            watching = threading.Thread(target=watched)
            watching.start()
            try:
                yield
                time.sleep(_SETTLE_S)
            finally:
                over.set()
                watching.join()
            self.felt.under = honest.phase()
            if self._away:
                self.felt.under.lost += honest.missed

    def must(self, held, what):
        if not held:
            self.felt.broken.append(what)


def memory_mib(pid):
    """Resident memory that is not shared with anybody, of a process and of those that it started. 0
    when it has ended."""
    try:
        tasks = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return 0.0
    return own_mib(pid) + sum(memory_mib(int(child)) for task in tasks for child in task.split())


def own_mib(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
