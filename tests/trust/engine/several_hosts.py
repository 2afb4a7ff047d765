"""Engines over two hosts: half of the ranks have a server of their own, which is steered over TCP.
That server, or the first one, is killed, stopped, or cut off from the scheduler while the engine
saves and loads, or it starts again with the disk of an earlier day.

Every slot holds bytes of chunks that lay there before, or none. So a part that was not written, or
not on that host, is seen when it is loaded.
"""

import contextlib
import copy
import select
import socket
import threading
from pathlib import Path
from typing import Any

from kvtier.bench.processes.servers import free_port
from kvtier.client.hosts import Hosts
from tests.child_process import wait_for
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess, short_folder
from tests.trust.engine.cells import PHASES
from tests.trust.engine.simulated import Engine, ours

_RAM_BYTES = 192 * 1024
_TROUBLE = 0.06
"""How likely it is at each of a step's phases while something is saved or loaded."""


class Gate:
    """A network between the scheduler and a server: everything passes, or nothing does."""

    def __init__(self, port):
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._passes = threading.Event()
        self._passes.set()
        self._ends = False
        threading.Thread(target=self._run, daemon=True).start()

    def shut(self):
        """Nothing passes from now on, and no end is told."""
        self._passes.clear()

    def open(self, *, cut):
        """Everything passes. ``cut``: the connections from before are broken."""
        if cut:
            self._break()
        self._passes.set()

    def close(self):
        self._ends = True
        self._passes.set()
        self._break()
        self._listener.close()

    def _break(self):
        with self._lock:
            for one in self._pairs:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _run(self):
        while not self._ends:
            self._passes.wait()
            with contextlib.suppress(OSError, ValueError):
                ready, _, _ = select.select([self._listener, *self._pairs], [], [], 0.05)
                for one in ready if self._passes.is_set() else ():
                    self._pass_on(one)

    def _pass_on(self, one):
        if one is self._listener:
            near, _ = one.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                return
            with self._lock:
                self._pairs |= {near: far, far: near}
            return
        other = self._pairs.get(one)
        if other is None:
            return
        with contextlib.suppress(OSError):
            if data := one.recv(1 << 20):
                other.sendall(data)
                return
        with self._lock:
            for end in (one, other):
                self._pairs.pop(end, None)
                end.close()


class HostServers:
    """A server on each of two hosts, with the network to the second.

    ``with_redis``: the hosts whose servers have the same Redis below.
    """

    def __init__(self, stack, with_redis=()):
        port = free_port()
        redis = stack.enter_context(RedisServer()) if with_redis else None
        self.gate = Gate(port)
        stack.callback(self.gate.close)
        self.servers: list[ServerProcess] = []
        self._disks: list[Path] = []
        for host, words in enumerate(((), (f"tcp://127.0.0.1:{port}",))):
            folder = stack.enter_context(short_folder())
            flags = ("--insecure",) if words else ()
            below: dict[str, Any] = (
                {"redis_url": redis.url, "redis_bytes": 4 << 20}
                if redis and host in with_redis
                else {}
            )
            self._disks.append(folder / "nvme")
            server = ServerProcess(
                folder,
                *words,
                flags=flags,
                ram_bytes=_RAM_BYTES,
                nvme_path=folder / "nvme",
                nvme_bytes=4 << 20,
                **below,
            )
            self.servers.append(stack.enter_context(server))
        self._ends: list[tuple[int, Any]] = []
        self.aged = 0
        """How often a server has begun with its disk of an earlier day."""

    def addresses(self, host):
        """What the configuration of a process on this host says."""
        return f"unix://{self.servers[host].socket},tcp://127.0.0.1:{self.gate.port}"

    def strike(self, kind, draw):
        """One host is in trouble until :meth:`mend`."""
        server = draw.choice(self.servers)
        if kind == "aged":
            server.kill()
            disk = self._disks[self.servers.index(server)]
            self._ends.append((draw.randrange(1, 30), lambda: self._age(server, disk)))
        elif kind == "killed":
            server.kill()
            self._ends.append((draw.randrange(1, 30), server.start))
        elif kind == "stopped":
            server.pause()
            self._ends.append((draw.randrange(1, 12), server.resume))
        else:
            self.gate.shut()
            cut = draw.random() < 0.5
            self._ends.append((draw.randrange(1, 12), lambda: self.gate.open(cut=cut)))

    def _age(self, server, disk):
        """Start it with the disk as it was when this was last done."""
        earlier, now = disk.with_name("earlier"), disk.with_name("now")
        disk.rename(now)
        if earlier.exists():
            earlier.rename(disk)
            self.aged += 1
        now.rename(earlier)
        server.start()

    @property
    def whole(self):
        return not self._ends

    def mend(self, *, now=False):
        """A step has ended, and perhaps a trouble with it. Whether one has."""
        before = len(self._ends)
        left = [(steps - 1, end) for steps, end in self._ends]
        for _, end in (one for one in left if now or one[0] <= 0):
            end()
        self._ends = [] if now else [one for one in left if one[0] > 0]
        return len(self._ends) < before


class HostsEngine(Engine):
    """See the module's text."""

    def __init__(self, cell, model, folder, draw, servers):
        self.servers, self._is_calm = servers, False
        super().__init__(cell, model, folder, draw)
        assert isinstance(ours(self.scheduler.connector)._scheduler.store, Hosts)

    def _configured(self, model, folder):
        config = super()._configured(model, folder)
        config.parallel_config.nnodes = 2
        assert config.parallel_config.nnodes_within_dp == 2
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra |= {"server": self.servers.addresses(0), "server_timeout_ms": 150}
        return config

    def _config_of(self, rank):
        """The second host's own socket is another one."""
        config = super()._config_of(rank)
        if 2 * rank >= self.cell.ranks:
            transfer = copy.copy(config.kv_transfer_config)
            own = {"server": self.servers.addresses(1)}
            transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | own
            config.kv_transfer_config = transfer
        return config

    # ---- trouble ---------------------------------------------------------------------------------

    def _maybe(self, phase):
        assert phase in PHASES
        pending = ours(self.scheduler.connector)._scheduler._pending.values()
        saves = any(one.save is not None for one in pending)
        loads = any(one.load is not None for one in pending)
        if self._is_calm or not (self.cell.trouble and self.servers.whole and (saves or loads)):
            return
        if self.draw.random() >= (3 * _TROUBLE if loads else _TROUBLE):
            return
        for what, is_on in (("save", saves), ("load", loads)):
            self.counts[f"{what}: before it is {phase}"] += is_on
        self.counts["faults"] += 1
        self.servers.strike(self.cell.trouble, self.draw)

    def step(self):
        self._maybe("planned")
        super().step()
        if self.servers.mend():
            self._wait_for_all()
        self.counts["disks of an earlier day"] = self.servers.aged

    def _wait_for_all(self):
        """Hundreds of steps would be misses before the next try to connect."""
        store = ours(self.scheduler.connector)._scheduler.store
        wait_for(lambda: store.pool is not None, "both servers are there")

    def _planned(self, output):
        self._maybe("copied")
        return super()._planned(output)

    def _compute(self, step, rank):
        super()._compute(step, rank)
        if rank is self.ranks[0]:
            self._maybe("copied by the second host")

    def _take_in(self, step):
        self._maybe("reported")
        super()._take_in(step)

    def drain(self, most=4_000):
        """All servers are there again. What is left of lost connections ends soon."""
        self._is_calm = True
        self.servers.mend(now=True)
        self._wait_for_all()
        super().drain(most)

        def idle():
            with contextlib.suppress(Exception):
                ours(self.scheduler.connector)._scheduler.store.check(idle=True)
                return True
            return False

        if not self.violations:
            self._wait_for_all()
            self.scheduler.reset_prefix_cache()
            self._let_go()
            wait_for(idle, "no slot is held at any host")

    def _let_go(self):
        """A step in which workers hear of the present pools, so that they unmap older ones."""
        self.ask([1] * 40, 1)
        super().drain()
