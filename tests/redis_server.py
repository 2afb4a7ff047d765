"""A real redis-server for tests, on a free port and a Unix socket."""

import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from kvtier.bench.processes.servers import free_port
from kvtier.tiers.redis.layout import Form
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier
from tests.child_process import DEADLINE_S, ChildProcess
from tests.clock import Clock
from tests.tier_chunks import CHUNK_BYTES, NAMESPACE

PART_BYTES = 4_096
PARTS = 3
FORM = Form("kvtier", NAMESPACE, PART_BYTES)


class RedisServer(ChildProcess):
    """One redis-server without persistence: every start is an empty one. ``tls``: its TCP port has
    TLS, with ``certificate``. ``settings``: more of its configuration, as ``maxmemory="10mb"``."""

    def __init__(self, *, tls=False, **settings):
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-redis-")
        self.folder = Path(self._folder.name)
        super().__init__(self.folder / "log")
        self.port = free_port()
        self.path = self.folder / "redis.sock"
        self.settings: dict[str, str | int] = {
            "port": self.port,
            "unixsocket": str(self.path),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
            "bind": "127.0.0.1",
            "enable-debug-command": "yes",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        if "cluster_enabled" in settings:
            # Its bus listens too. The default, port + 10,000, may be some connection's own.
            self.settings["cluster-port"] = free_port()
        if tls:
            self.certificate, key = make_certificate(self.folder, "server")
            files = {
                "tls-cert-file": self.certificate,
                "tls-ca-cert-file": self.certificate,
                "tls-key-file": key,
            }
            self.settings |= {"port": 0, "tls-port": self.port, "tls-auth-clients": "no"}
            self.settings |= {name: str(file) for name, file in files.items()}
        self._tiers: list[RedisTier] = []

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def command(self):
        given = [(f"--{name}", str(value)) for name, value in self.settings.items()]
        return ["redis-server", *(word for pair in given for word in pair)]

    def answers(self):
        return "eady to accept connections" in self.said()

    def start(self):
        """Start it, empty, and wait until it serves."""
        self.log.unlink(missing_ok=True)
        super().start()

    def __enter__(self):
        try:
            return super().__enter__()
        except BaseException:
            self._folder.cleanup()
            raise

    def __exit__(self, *_):
        for tier in self._tiers:
            tier.close()
        super().__exit__()
        self._folder.cleanup()

    @contextmanager
    def admin(self):
        """A plain redis.Redis over the Unix socket, which shows what the tier has stored."""
        with redis.Redis(unix_socket_path=str(self.path)) as client:
            yield client

    def tier(self, url="", *, capacity=64, form=FORM, size=CHUNK_BYTES, ttl_s=None, clock=None):
        """A tier of small chunks, three parts each. ``capacity``: None takes what Redis gives.
        ``clock`` is for fault tests."""
        servers = RedisServers(url or self.url, connections=4, timeout_s=DEADLINE_S)
        bytes_ = None if capacity is None else capacity * form.room(size)
        self._tiers.append(
            RedisTier(servers, form, bytes_, size, ttl_s=ttl_s, clock=clock or Clock())
        )
        return self._tiers[-1]


@contextmanager
def impatient(servers, timeout_s):
    """Calls have this time for as long as the context lasts, in which a server hangs. Before and
    after it they have more than a busy host needs."""
    factory = servers._factory
    patience, factory.timeout_s = factory.timeout_s, timeout_s
    try:
        yield
    finally:
        factory.timeout_s = patience


@contextmanager
def hanging(server, tier, timeout_s=0.2):
    """The server is paused, and the tier's calls end soon."""
    with impatient(tier._servers, timeout_s), server.paused():
        yield


def make_certificate(folder, name):
    """A self-signed certificate for 127.0.0.1, which is its own authority, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files, *names], check=True, capture_output=True)
    return certificate, key


@contextmanager
def redis_cluster(nodes=3, **settings):
    """A Redis Cluster of primaries that share the slots. ``settings``: more of every node's
    configuration."""
    with ExitStack() as stack:
        servers = []
        for _ in range(nodes):
            server = RedisServer(
                tls=False,
                cluster_enabled="yes",
                cluster_node_timeout=30_000,  # or nodes of a busy host think that others are gone
                **settings,
            )
            servers.append(stack.enter_context(server))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"],
            check=True,
            capture_output=True,
        )
        for server in servers:
            with server.admin() as admin:
                while admin.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    time.sleep(0.02)  # the nodes have agreed and are about to notice
        yield servers


def cluster_url(servers):
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


@contextmanager
def redis_sentinel(primary, service):
    """The port of a Sentinel that watches ``primary`` and its replicas, and alone decides on a
    failover."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvtier-sentinel-") as folder:
        file = Path(folder) / "sentinel.conf"
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {service} 500\nsentinel failover-timeout "
            f"{service} 2000\n"
        )
        with subprocess.Popen(
            ["redis-server", str(file), "--sentinel"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                next(line for line in process.stdout if "+monitor" in line)
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield port
            finally:
                process.kill()
