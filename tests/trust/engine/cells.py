"""Which engines are simulated: one cell for each combination of what differs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

VOCABULARY = 997
BLOCK, CHUNK, LONGEST = 16, 32, 512
FEW_BLOCKS = 30
"""With fewer blocks requests are preempted often."""


def words(count: int, first: int = 0) -> list[int]:
    """A prompt. Prompts with another ``first`` have nothing in common."""
    return [(first * 211 + place * 13 + 5) % VOCABULARY for place in range(count)]


@dataclass(frozen=True)
class Cell:
    """One kind of engine and of trouble."""

    name: str
    v2: bool = False
    """vLLM's scheduler plans for Model Runner V2, else for V1."""
    async_scheduling: bool = False
    pipeline: int = 1
    tensor: int = 1
    divide: int = 1
    """So many ranks divide the tokens of each block among them (DCP), ``turn`` tokens at a time."""
    turn: int = 1
    prefill: int = 1
    """So many ranks compute parts of one prompt (PCP). All have all KV, unless they divide it."""
    match_unit: int | None = None
    """vLLM's ``prefix_match_unit``: hits may end at its multiples within a block."""
    drafts: int = 0
    """Draft tokens a step, accepted at random."""
    blocks: int = 96
    """Few blocks preempt."""
    policy: str = "fcfs"
    fails: float = 0.0
    """How many loads of a rank fail and leave garbage in their blocks."""
    prefix_caching: bool = True
    groups: tuple[str, ...] = ("full",)
    """Cache groups of the model, see :class:`tests.trust.engine.memory.Need`."""
    config: dict[str, Any] = field(default_factory=dict)
    """More keys for kvtier."""
    lower: str = ""
    """``nvme``: a small NVMe tier below RAM. ``server``: the store is in a kvtier server."""
    in_parts: bool = False
    """Hits that do not fit into RAM come in parts."""
    early: bool = False
    """Hits that RAM holds are promised while the rest of them is on its way."""
    loses: float = 0.0
    """How often in a step a load in parts loses a chunk."""
    slow_copies: bool = False
    """A step copies a chunk or none, so that loads take several steps."""
    late_saves: bool = False
    """Blocks are read for saves as late as the scheduler's half allows."""
    beside: str = ""
    """``first`` or ``last``: kvtier's place in a MultiConnector, beside a connector as NIXL's."""
    role: str = "kv_both"
    """What kvtier does in the engine, in vLLM's words."""
    hosts: int = 1
    """Two: half of the ranks are on another host, see :mod:`tests.trust.engine.several_hosts`."""
    trouble: str = ""
    """What happens to a host's server: it is ``killed``, ``stopped`` or ``parted`` from the
    scheduler, or comes back with its disk of an earlier day (``aged``). The server of an engine on
    one host is killed while a load comes in parts."""
    with_redis: tuple[int, ...] = ()
    """Hosts whose server has Redis below, which is one for all of them."""

    @property
    def ranks(self) -> int:
        return self.pipeline * self.prefill * self.tensor

    @property
    def depth(self) -> int:
        """Most steps in flight. V1 does not do async scheduling and pipeline parallelism at
        once."""
        overlaps = self.async_scheduling and (self.v2 or self.pipeline == 1)
        return self.pipeline + overlaps

    @property
    def has_state(self) -> bool:
        return any(group.split()[0] == "state" for group in self.groups)

    @property
    def shows(self) -> set[str]:
        """What is counted at least once where everything that the cell is about is in force."""
        loses_server = self.hosts == 1 and bool(self.trouble)
        marks = {
            f"{self.depth} in flight": True,
            "accepted drafts": bool(self.drafts),
            "refused drafts": bool(self.drafts),
            "faults": bool(self.fails),
            "preempted": self.blocks < FEW_BLOCKS,
            "resumed as new": self.v2 and self.blocks < FEW_BLOCKS,
            "tokens from nvme": self.lower == "nvme",
            "steps of loads that go on": self.slow_copies,
            "saves read late": self.late_saves,
            "loads in parts": self.in_parts,
            "loads whose last part told of the end": self.in_parts,
            "chunks on their way into blocks": self.early,
            "servers lost under a load in parts": loses_server,
            "loads in parts that were cut": bool(self.loses) or loses_server,
            "brought by the other": bool(self.beside),
            "disks of an earlier day": self.trouble == "aged",
            "tokens from redis": len(self.with_redis) == self.hosts,
            "states of drafts": bool(self.drafts) and self.has_state,
            "positions of other ranks": self.divide > 1,
            "hits within a block": bool(self.match_unit) and not self.drafts,
            "replays": any(group.startswith("replayed") for group in self.groups),
        }
        return {"loads", "finished"} | {mark for mark, is_shown in marks.items() if is_shown}


_SHORT: dict[str, Any] = {"config": {"chunk_tokens": BLOCK}, "groups": ("full", "state")}
_WITHIN = tuple(
    Cell(f"within blocks{name}", match_unit=unit, **_SHORT | more)
    for name, unit, more in (
        ("", 4, {"blocks": 120}),
        (", three groups", 1, {"groups": ("full", "state", "state"), "blocks": 150}),
        (", nvme, tensor parallel", 4, {"lower": "nvme", "tensor": 2}),
        (", async, failing loads", 4, {"blocks": 60, "fails": 0.2, "async_scheduling": True}),
        (", pipeline, slow copies", 8, {"pipeline": 2, "slow_copies": True}),
        (", drafts", 4, {"drafts": 3, "blocks": 150}),
    )
)
"""Hits of a model with states end at multiples of ``prefix_match_unit``. Beside drafts kvtier's end
with blocks."""

_EITHER = (
    Cell("one batch"),
    Cell("no prefix caching", prefix_caching=False),
    Cell("few blocks", blocks=26),
    Cell("few blocks, by priority", blocks=26, policy="priority"),
    Cell("drafts", drafts=3),
    Cell("tensor parallel", tensor=2),
    Cell("failing loads", fails=0.3),
    Cell("failing loads, few blocks", fails=0.3, blocks=26),
    Cell("failing loads, tensor parallel", fails=0.2, tensor=2),
    Cell("failing loads, drafts", fails=0.3, drafts=3),
    Cell("nvme", lower="nvme"),
    Cell("nvme, failing loads", lower="nvme", fails=0.2),
    Cell("server", lower="server"),
    Cell("server, failing loads, few blocks", lower="server", fails=0.2, blocks=26),
    Cell("async", async_scheduling=True),
    Cell("async, few blocks", async_scheduling=True, blocks=26),
    Cell("async, drafts", async_scheduling=True, drafts=3),
    Cell("async, tensor parallel", async_scheduling=True, tensor=2),
    Cell("pipeline", pipeline=2),
    Cell("pipeline, few blocks", pipeline=2, blocks=26),
    Cell("pipeline and tensor parallel", pipeline=2, tensor=2),
    Cell("async, failing loads", async_scheduling=True, fails=0.3),
    Cell("async, failing loads, few blocks", async_scheduling=True, fails=0.3, blocks=26),
    Cell("async, failing loads, drafts", async_scheduling=True, fails=0.3, drafts=3),
    Cell("pipeline, failing loads", pipeline=2, fails=0.3),
    Cell("late saves", late_saves=True),
    Cell("late saves, few blocks", late_saves=True, blocks=26),
    Cell(
        "late saves, async, drafts, tensor parallel",
        late_saves=True,
        async_scheduling=True,
        drafts=3,
        tensor=2,
    ),
    Cell("late saves, async, few blocks", late_saves=True, async_scheduling=True, blocks=26),
    Cell(
        "late saves, pipeline, nvme, few blocks",
        late_saves=True,
        pipeline=2,
        lower="nvme",
        blocks=40,
    ),
    Cell("late saves, failing loads", late_saves=True, fails=0.2, blocks=40),
    Cell("slow copies", slow_copies=True),
    Cell("slow copies, few blocks", slow_copies=True, blocks=26),
    Cell("slow copies, failing loads, tensor parallel", slow_copies=True, fails=0.2, tensor=2),
    Cell("slow copies, async, few blocks", slow_copies=True, async_scheduling=True, blocks=26),
    Cell("slow copies, pipeline, failing loads", slow_copies=True, pipeline=2, fails=0.2),
    Cell(
        "slow copies, nvme, by priority",
        slow_copies=True,
        lower="nvme",
        policy="priority",
        blocks=40,
    ),
    Cell("window beside full", groups=("full", "window 40")),
    Cell(
        "long window beside full, few blocks",
        groups=("full", "window 100", "window 100"),
        blocks=60,
    ),
    Cell("windows alone", groups=("window 70",)),
    Cell("windows alone, few blocks, failing loads", groups=("window 70",), blocks=26, fails=0.2),
    Cell("chunked local", groups=("full", "local 64", "local 64")),
    Cell("two full groups", groups=("full", "full"), blocks=150),
    Cell("tails", groups=("full", "latent 9/4", "latent 16/8", "latent 16/16"), blocks=150),
    Cell("tails, few blocks, failing loads", groups=("full", "latent 9/4"), blocks=60, fails=0.2),
    Cell("tails, nvme, drafts", groups=("full", "latent 13/4"), lower="nvme", drafts=3),
    Cell("rings", groups=("full", "ring 8/8")),
    Cell("states", groups=("full", "state", "state"), blocks=120),
    Cell("states, few blocks, failing loads", groups=("full", "state"), blocks=48, fails=0.2),
    Cell("states, tensor parallel", groups=("full", "state"), tensor=2),
    Cell(
        "states and windows, nvme", groups=("full", "window 40", "state"), blocks=120, lower="nvme"
    ),
    Cell("states, drafts", groups=("full", "state"), drafts=3, blocks=150),
    Cell(
        "states, async, drafts",
        groups=("full", "state"),
        drafts=2,
        blocks=150,
        async_scheduling=True,
    ),
    Cell(
        "states, few blocks, failing loads, drafts",
        groups=("full", "state"),
        drafts=3,
        blocks=60,
        fails=0.2,
    ),
    Cell("states, server", groups=("full", "state"), lower="server"),
    Cell("states, pipeline", groups=("full", "state"), pipeline=2),
    *_WITHIN,
    Cell("windows, async", groups=("full", "window 40"), async_scheduling=True),
    Cell(
        "windows, async, drafts, failing loads",
        groups=("full", "window 40"),
        async_scheduling=True,
        drafts=3,
        fails=0.2,
    ),
    Cell(
        "windows, pipeline and tensor parallel", groups=("full", "window 40"), pipeline=2, tensor=2
    ),
    Cell(
        "windows, nvme, by priority",
        groups=("full", "window 40"),
        lower="nvme",
        policy="priority",
        blocks=60,
    ),
    Cell("windows, server, failing loads", groups=("full", "window 40"), lower="server", fails=0.2),
    Cell("windows, no prefix caching", groups=("full", "window 40"), prefix_caching=False),
    Cell("windows, slow copies", groups=("full", "window 40"), slow_copies=True),
    Cell("first of several connectors", beside="first"),
    Cell("last of several connectors, failing loads", beside="last", fails=0.2),
    Cell(
        "last of several connectors, async, tensor parallel",
        beside="last",
        async_scheduling=True,
        tensor=2,
    ),
    Cell(
        "first of several connectors, pipeline, slow copies",
        beside="first",
        pipeline=2,
        slow_copies=True,
    ),
    Cell(
        "async, long windows, few blocks",
        async_scheduling=True,
        groups=("full", "window 100", "window 100"),
        blocks=90,
    ),
    Cell(
        "async, windows alone, few blocks, failing loads",
        async_scheduling=True,
        groups=("window 70",),
        blocks=26,
        fails=0.2,
    ),
    Cell("async, states", async_scheduling=True, groups=("full", "state", "state"), blocks=120),
    Cell(
        "async, states, few blocks, failing loads",
        async_scheduling=True,
        groups=("full", "state"),
        blocks=48,
        fails=0.2,
    ),
    Cell("async, chunked local", async_scheduling=True, groups=("full", "local 64", "local 64")),
    Cell("async, nvme, failing loads", async_scheduling=True, lower="nvme", fails=0.2),
    Cell(
        "async, server, failing loads, few blocks",
        async_scheduling=True,
        lower="server",
        fails=0.2,
        blocks=26,
    ),
)
_DEEP = (
    Cell("three in flight"),
    Cell("three in flight, few blocks", blocks=26),
    Cell("three in flight, few blocks, by priority", blocks=26, policy="priority"),
    Cell("three in flight, tensor parallel", tensor=2),
    Cell("three in flight, drafts", drafts=3),
    Cell("three in flight, failing loads", fails=0.3),
    Cell("three in flight, failing loads, few blocks", fails=0.3, blocks=26),
    Cell("three in flight, slow copies, few blocks", slow_copies=True, blocks=26),
    Cell("three in flight, windows", groups=("full", "window 40")),
    Cell(
        "three in flight, long windows, few blocks",
        groups=("full", "window 100", "window 100"),
        blocks=90,
    ),
    Cell("three in flight, chunked local", groups=("full", "local 64", "local 64")),
    Cell("three in flight, states", groups=("full", "state"), blocks=120),
    Cell("three in flight, nvme, failing loads", lower="nvme", fails=0.2),
    Cell(
        "three in flight, server, failing loads, few blocks", lower="server", fails=0.2, blocks=26
    ),
    Cell("three in flight, no prefix caching", prefix_caching=False),
    Cell("three in flight, several connectors", beside="last"),
    Cell("three in flight, tails", groups=("full", "latent 9/4", "latent 16/8"), blocks=150),
    Cell("three in flight, replayed windows", groups=("full", "replayed 40")),
)
"""Of V2 alone: pipeline parallel and async scheduling at once."""
_LONG = {"chunk_tokens": 4 * BLOCK}
_DIVIDED = (
    Cell("divided blocks, hits that end in chunks", tensor=2, divide=2, config=_LONG),
    Cell("divided by pairs, turns of eight, failing loads", tensor=4, divide=2, turn=8, fails=0.2),
    Cell("divided blocks, pipeline, few blocks", tensor=2, divide=2, pipeline=2, blocks=18),
    Cell("divided blocks, nvme, slow copies", tensor=2, divide=2, lower="nvme", slow_copies=True),
    Cell("divided blocks, async, drafts", tensor=2, divide=2, drafts=3, async_scheduling=True),
    Cell("divided blocks beside others", tensor=2, divide=2, groups=("full", "whole", "window 40")),
    Cell("divided blocks, several connectors", tensor=2, divide=2, beside="last"),
)
"""Decode context parallelism."""
_PARTED = (
    Cell(
        "parted prompts, pipeline and tensor parallel, failing loads",
        prefill=2,
        tensor=2,
        pipeline=2,
        fails=0.2,
    ),
    Cell("parted prompts, several connectors", prefill=2, beside="first"),
    Cell("parted prompts, divided blocks, several connectors", prefill=2, divide=2, beside="last"),
    Cell("parted prompts, blocks divided by all", prefill=2, tensor=2, divide=4, config=_LONG),
)
"""Prefill context parallelism, which V2 alone has."""
_REPLAYED = (
    Cell("replayed windows", groups=("full", "replayed 40")),
    Cell(
        "replayed windows and rings, nvme",
        groups=("full", "replayed 24/8", "ring 8/8"),
        lower="nvme",
    ),
    Cell(
        "replayed windows, few blocks, failing loads",
        groups=("full", "replayed 40"),
        blocks=48,
        fails=0.2,
    ),
    Cell(
        "replayed windows, async, drafts",
        groups=("full", "replayed 40"),
        async_scheduling=True,
        drafts=3,
    ),
)
"""Of V2 alone: vLLM does not tell V1 where a replay begins."""
PHASES = ("planned", "copied", "copied by the second host", "reported")
"""Of a step of an engine over two hosts. Trouble comes before them."""
_HOSTS = (
    Cell("two hosts", tensor=2, hosts=2),
    Cell("two hosts, killed", tensor=2, hosts=2, trouble="killed", async_scheduling=True),
    Cell("two hosts, stopped", tensor=4, hosts=2, trouble="stopped", async_scheduling=True),
    Cell(
        "two hosts, Redis below one, parted",
        pipeline=2,
        hosts=2,
        trouble="parted",
        async_scheduling=True,
        with_redis=(1,),
    ),
    Cell(
        "two hosts, windows, killed",
        pipeline=2,
        tensor=2,
        hosts=2,
        trouble="killed",
        groups=("full", "window 40"),
    ),
    Cell("two hosts, aged", tensor=2, hosts=2, trouble="aged", with_redis=(0, 1)),
)
"""Run by themselves: their servers are processes, which end and begin."""
_SMALL: dict[str, Any] = {
    "lower": "nvme",
    "config": {"ram_bytes": 32 * 1024},
    "in_parts": True,
    "blocks": 500,
}
_IN_PARTS = (
    Cell("in parts", **_SMALL),
    Cell("in parts, few blocks", **_SMALL | {"blocks": 60}),
    Cell("in parts, lost chunks", loses=0.3, **_SMALL),
    Cell("in parts, failing loads, tensor parallel", fails=0.1, tensor=2, **_SMALL),
    Cell("in parts, slow copies, lost chunks", slow_copies=True, loses=0.2, **_SMALL),
    Cell("in parts, async, lost chunks", async_scheduling=True, loses=0.2, **_SMALL),
    Cell("in parts, async, failing loads", async_scheduling=True, fails=0.1, **_SMALL),
    Cell(
        "in parts, pipeline, failing loads, lost chunks", pipeline=2, fails=0.1, loses=0.1, **_SMALL
    ),
    Cell("in parts, no prefix caching, lost chunks", prefix_caching=False, loses=0.2, **_SMALL),
    Cell("in parts, drafts, lost chunks", drafts=3, loses=0.2, **_SMALL),
    Cell("in parts, server, failing loads", fails=0.1, **_SMALL | {"lower": "server"}),
    Cell("in parts, killed server", trouble="killed", **_SMALL | {"lower": "server"}),
)
"""RAM holds less than most prompts."""
_FITS: dict[str, Any] = {
    "lower": "nvme",
    "config": {"ram_bytes": 128 * 1024},
    "early": True,
    "blocks": 500,
}
_EARLY = (
    Cell("early, lost chunks", loses=0.5, **_FITS),
    Cell(
        "early, failing loads, lost chunks, async, tensor parallel",
        fails=0.1,
        loses=0.3,
        async_scheduling=True,
        tensor=2,
        **_FITS,
    ),
    Cell(
        "early, slow copies, pipeline, lost chunks",
        slow_copies=True,
        pipeline=2,
        loses=0.3,
        **_FITS,
    ),
    Cell(
        "early, slow copies, failing loads, async, tensor parallel",
        slow_copies=True,
        fails=0.05,
        async_scheduling=True,
        tensor=2,
        **_FITS,
    ),
    Cell(
        "early, killed server, async",
        trouble="killed",
        async_scheduling=True,
        **_FITS | {"lower": "server"},
    ),
)
"""RAM holds any prompt, and not all of them."""
CELLS = (
    *(
        cell
        for kind in (*_EITHER, *_DIVIDED, *_IN_PARTS)
        for cell in (kind, replace(kind, name=f"{kind.name}, v2", v2=True))
    ),
    *(replace(cell, v2=True, pipeline=2, async_scheduling=True) for cell in _DEEP),
    *(replace(cell, v2=True) for cell in (*_REPLAYED, *_PARTED, *_EARLY)),
)
"""Every kind of engine is followed by its twin on V2, so that one in seven has both runners."""
OVER_HOSTS = tuple(replace(cell, v2=True) for cell in _HOSTS)
