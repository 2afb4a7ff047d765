"""Two network namespaces that stand for two hosts, with a cable between them."""

import shutil
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

_ADDRESSES = ("10.87.0.1", "10.87.0.2")
"""Nothing routes there: the namespaces have no other cable."""


@dataclass(frozen=True, slots=True)
class Network:
    """Where two hosts are. Without ``pids`` both are this machine, on loopback."""

    addresses: Sequence[str]
    interface: str
    pids: Sequence[int] = ()
    """Of processes that live in their namespaces."""

    @property
    def is_loopback(self):
        return not self.pids

    def on(self, host):
        """The words before a command that runs on this host."""
        return ["nsenter", f"--net=/proc/{self.pids[host]}/ns/net"] if self.pids else []


LOOPBACK = Network(("127.0.0.1", "127.0.0.1"), "lo")
ON_LOOPBACK = "both hosts are on loopback"
"""How that warning begins."""


@contextmanager
def two_hosts():
    """Their network until the end of the block. Where this process may not make one it is loopback,
    and a warning says so. The test is skipped where there is no ``ip``."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip (Debian, Ubuntu: apt-get install iproute2)")
    with ExitStack() as stack:
        try:
            made = _made(stack)
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            warnings.warn(f"{ON_LOOPBACK}: no network can be made: {said}", stacklevel=3)
            made = LOOPBACK
        yield made


def _made(stack):
    """Raises SubprocessError where the kernel does not allow it."""
    pids = [_namespace(stack) for _ in _ADDRESSES]
    network = Network(_ADDRESSES, "cable", pids)
    ends = [["name", network.interface, "netns", str(pid)] for pid in pids]
    _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
    for host, address in enumerate(_ADDRESSES):
        at = [*network.on(host), "ip"]
        _run([*at, "address", "add", f"{address}/24", "dev", network.interface])
        for name in ("lo", network.interface):
            _run([*at, "link", "set", name, "up"])
    return network


def _namespace(stack):
    """A new one's process, which ends with its standard input."""
    words = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    stack.callback(process.communicate)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != "made\n":
        raise subprocess.SubprocessError(process.stderr.read())
    return process.pid


def _run(words):
    subprocess.run(words, check=True, capture_output=True, text=True)
