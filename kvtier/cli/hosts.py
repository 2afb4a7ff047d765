"""The kvtier server of this host, for an engine over several hosts. ``kvtier launch`` starts it on
every node that has none yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.cli.ranks import answers, start_at
from kvtier.cli.vllm_command import given
from kvtier.client.connect import Address
from kvtier.config.keys import ServerSection
from kvtier.core.errors import ConfigError

_NODES = ("--nnodes", "-n")
_RANK = ("--node-rank", "-r")


def nodes(arguments: Sequence[str]) -> tuple[int, int]:
    """How many nodes vLLM's arguments name, and the number of this one."""
    count, rank = (_number(arguments, names) for names in (_NODES, _RANK))
    return max(1, count), rank


def _number(arguments: Sequence[str], names: Sequence[str]) -> int:
    found = str(given(arguments, names))
    return int(found) if found.isdecimal() else 0


def listens_at(arguments: Sequence[str], server: ServerSection) -> list[str]:
    """Where the server of this node listens: its socket, and what the first node asks it by. Empty:
    the engine's hosts have not a server each. Raises ConfigError where this node has none."""
    (count, rank), servers = nodes(arguments), server.addresses
    if count == 1 or len(servers) < 2:
        return []
    if rank >= len(servers):
        raise ConfigError(
            f"--node-rank {rank}: server_address names {len(servers)} servers ({server.address}), "
            "expected one for each node, in the order of --node-rank"
        )
    return [servers[0], *servers[rank:][:1]] if rank else [servers[0]]


def start(listen: Sequence[str], env: Mapping[str, str]) -> str:
    """Start this node's server, which ends with this process, unless one answers at its socket.
    Returns what was done, in words. Raises ConfigError when it does not start."""
    if answers(Address.parse(listen[0]).path):
        return f"this host's server at {listen[0]} runs already"
    start_at(listen, env)
    return f"this host's server is started at {' and '.join(listen)}"
