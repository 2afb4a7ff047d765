"""Which engines are simulated: one cell for each combination of what differs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

VOCABULARY = 997
BLOCK, CHUNK, LONGEST = 16, 32, 512
FEW_BLOCKS = 30
"""With fewer blocks requests are preempted often."""


def words(count, first=0):
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
    sessions: bool = False
    """One request after the other is a streaming session, which goes on after an answer. It keeps
    its blocks while it waits. Beside drafts vLLM's own ones read what it has not computed."""
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
    def ranks(self):
        return self.pipeline * self.prefill * self.tensor

    @property
    def depth(self):
        """Most steps in flight. V1 does not do async scheduling and pipeline parallelism at
        once."""
        overlaps = self.async_scheduling and (self.v2 or self.pipeline == 1)
        return self.pipeline + overlaps

    @property
    def has_state(self):
        return any(group.split()[0] == "state" for group in self.groups)

    @property
    def shows(self):
        """What is counted at least once where everything that the cell is about is in force."""
        loses_server = self.hosts == 1 and bool(self.trouble)
        marks = {
            f"{self.depth} in flight": True,
            "accepted drafts": bool(self.drafts),
            "refused drafts": bool(self.drafts),
            "sessions that went on": self.sessions,
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


_SETTINGS: dict[str, dict[str, Any]] = {
    "no prefix caching": {"prefix_caching": False},
    "few blocks": {"blocks": 26},
    "by priority": {"policy": "priority"},
    "drafts": {"drafts": 3},
    "sessions": {"sessions": True},
    "tensor parallel": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "pipeline and tensor parallel": {"pipeline": 2, "tensor": 2},
    "failing loads": {"fails": 0.2},
    "nvme": {"lower": "nvme"},
    "server": {"lower": "server"},
    "async": {"async_scheduling": True},
    "late saves": {"late_saves": True},
    "slow copies": {"slow_copies": True},
    "lost chunks": {"loses": 0.2},
    "windows": {"groups": ("full", "window 40")},
    "window beside full": {"groups": ("full", "window 40")},
    "windows alone": {"groups": ("window 70",)},
    "long windows": {"groups": ("full", "window 100", "window 100")},
    "long window beside full": {"groups": ("full", "window 100", "window 100")},
    "states": {"groups": ("full", "state")},
    "chunked local": {"groups": ("full", "local 64", "local 64")},
    "tails": {"groups": ("full", "latent 9/4")},
    "rings": {"groups": ("full", "ring 8/8")},
    "replayed windows": {"groups": ("full", "replayed 40")},
    "first of several connectors": {"beside": "first"},
    "last of several connectors": {"beside": "last"},
    "several connectors": {"beside": "last"},
    "divided blocks": {"tensor": 2, "divide": 2},
    "parted prompts": {"prefill": 2},
    "two hosts": {"tensor": 2, "hosts": 2},
    "killed": {"trouble": "killed"},
    "killed server": {"trouble": "killed", "lower": "server"},
    "stopped": {"trouble": "stopped"},
    "parted": {"trouble": "parted"},
    "aged": {"trouble": "aged"},
    "within blocks": {"match_unit": 4, "config": {"chunk_tokens": BLOCK},
                      "groups": ("full", "state")},
    "in parts": {"lower": "nvme", "config": {"ram_bytes": 32 << 10}, "in_parts": True,
                 "blocks": 500},
    "early": {"lower": "nvme", "config": {"ram_bytes": 128 << 10}, "early": True, "blocks": 500},
}  # fmt: skip
"""The words of a cell's name -> its fields. RAM of those in parts holds less than most prompts, of
those that are early any prompt and not all of them. Hits within blocks end at multiples of
``prefix_match_unit``; beside drafts kvtier's end with blocks."""


def _cell(name, **more):
    """``more``: what is otherwise than the name's words say."""
    settings: dict[str, Any] = {}
    for part in name.split(", "):
        settings |= _SETTINGS.get(part, {})
    return Cell(name, **settings | more)


_EITHER = (
    _cell("one batch"),
    _cell("no prefix caching"),
    _cell("few blocks"),
    _cell("few blocks, by priority"),
    _cell("drafts"),
    _cell("tensor parallel"),
    _cell("failing loads", fails=0.3),
    _cell("failing loads, few blocks", fails=0.3),
    _cell("failing loads, tensor parallel"),
    _cell("failing loads, drafts", fails=0.3),
    _cell("nvme"),
    _cell("nvme, failing loads"),
    _cell("server"),
    _cell("server, failing loads, few blocks"),
    _cell("async"),
    _cell("async, few blocks"),
    _cell("async, drafts"),
    _cell("async, tensor parallel"),
    _cell("pipeline"),
    _cell("pipeline, few blocks"),
    _cell("pipeline and tensor parallel"),
    _cell("async, failing loads", fails=0.3),
    _cell("async, failing loads, few blocks", fails=0.3),
    _cell("async, failing loads, drafts", fails=0.3),
    _cell("pipeline, failing loads", fails=0.3),
    _cell("late saves"),
    _cell("late saves, few blocks"),
    _cell("late saves, async, drafts, tensor parallel"),
    _cell("late saves, async, few blocks"),
    _cell("late saves, pipeline, nvme, few blocks", blocks=40),
    _cell("late saves, failing loads", blocks=40),
    _cell("slow copies"),
    _cell("slow copies, few blocks"),
    _cell("slow copies, failing loads, tensor parallel"),
    _cell("slow copies, async, few blocks"),
    _cell("slow copies, pipeline, failing loads"),
    _cell("slow copies, nvme, by priority", blocks=40),
    _cell("window beside full"),
    _cell("long window beside full, few blocks", blocks=60),
    _cell("windows alone"),
    _cell("windows alone, few blocks, failing loads"),
    _cell("chunked local"),
    _cell("two full groups", blocks=150, groups=("full", "full")),
    _cell("tails", blocks=150, groups=("full", "latent 9/4", "latent 16/8", "latent 16/16")),
    _cell("tails, few blocks, failing loads", blocks=60),
    _cell("tails, nvme, drafts", groups=("full", "latent 13/4")),
    _cell("rings"),
    _cell("states", blocks=120, groups=("full", "state", "state")),
    _cell("states, few blocks, failing loads", blocks=48),
    _cell("states, tensor parallel"),
    _cell("states and windows, nvme", blocks=120, groups=("full", "window 40", "state")),
    _cell("states, drafts", blocks=150),
    _cell("states, async, drafts", drafts=2, blocks=150),
    _cell("states, few blocks, failing loads, drafts", blocks=60),
    _cell("states, server"),
    _cell("states, pipeline"),
    _cell("within blocks", blocks=120),
    _cell(
        "within blocks, three groups", match_unit=1, blocks=150, groups=("full", "state", "state")
    ),
    _cell("within blocks, nvme, tensor parallel"),
    _cell("within blocks, async, failing loads", blocks=60),
    _cell("within blocks, pipeline, slow copies", match_unit=8),
    _cell("within blocks, drafts", blocks=150),
    _cell("windows, async"),
    _cell("windows, async, drafts, failing loads"),
    _cell("windows, pipeline and tensor parallel"),
    _cell("windows, nvme, by priority", blocks=60),
    _cell("windows, server, failing loads"),
    _cell("windows, no prefix caching"),
    _cell("windows, slow copies"),
    _cell("first of several connectors"),
    _cell("last of several connectors, failing loads"),
    _cell("last of several connectors, async, tensor parallel"),
    _cell("first of several connectors, pipeline, slow copies"),
    _cell("async, long windows, few blocks", blocks=90),
    _cell("async, windows alone, few blocks, failing loads"),
    _cell("async, states", blocks=120, groups=("full", "state", "state")),
    _cell("async, states, few blocks, failing loads", blocks=48),
    _cell("async, chunked local"),
    _cell("async, nvme, failing loads"),
    _cell("async, server, failing loads, few blocks"),
    _cell("sessions"),
    _cell("sessions, async, few blocks, failing loads", blocks=52),
    _cell("sessions, pipeline, windows"),
)
_DEEP = (
    _cell("three in flight"),
    _cell("three in flight, few blocks"),
    _cell("three in flight, few blocks, by priority"),
    _cell("three in flight, tensor parallel"),
    _cell("three in flight, drafts"),
    _cell("three in flight, failing loads", fails=0.3),
    _cell("three in flight, failing loads, few blocks", fails=0.3),
    _cell("three in flight, slow copies, few blocks"),
    _cell("three in flight, sessions, few blocks", blocks=52),
    _cell("three in flight, windows"),
    _cell("three in flight, long windows, few blocks", blocks=90),
    _cell("three in flight, chunked local"),
    _cell("three in flight, states", blocks=120),
    _cell("three in flight, nvme, failing loads"),
    _cell("three in flight, server, failing loads, few blocks"),
    _cell("three in flight, no prefix caching"),
    _cell("three in flight, several connectors"),
    _cell("three in flight, tails", blocks=150, groups=("full", "latent 9/4", "latent 16/8")),
    _cell("three in flight, replayed windows"),
)
"""Of V2 alone: pipeline parallel and async scheduling at once."""
_LONG = {"chunk_tokens": 4 * BLOCK}
_DIVIDED = (
    _cell("divided blocks, hits that end in chunks", config=_LONG),
    _cell("divided by pairs, turns of eight, failing loads", tensor=4, divide=2, turn=8),
    _cell("divided blocks, pipeline, few blocks", blocks=18),
    _cell("divided blocks, nvme, slow copies"),
    _cell("divided blocks, async, drafts"),
    _cell(
        "divided blocks beside others", tensor=2, divide=2, groups=("full", "whole", "window 40")
    ),
    _cell("divided blocks, several connectors"),
)
"""Decode context parallelism."""
_PARTED = (
    _cell("parted prompts, pipeline and tensor parallel, failing loads"),
    _cell("parted prompts, several connectors", beside="first"),
    _cell("parted prompts, divided blocks, several connectors", tensor=1),
    _cell("parted prompts, blocks divided by all", tensor=2, divide=4, config=_LONG),
)
"""Prefill context parallelism, which V2 alone has."""
_REPLAYED = (
    _cell("replayed windows"),
    _cell("replayed windows and rings, nvme", groups=("full", "replayed 24/8", "ring 8/8")),
    _cell("replayed windows, few blocks, failing loads", blocks=48),
    _cell("replayed windows, async, drafts"),
)
"""Of V2 alone: vLLM does not tell V1 where a replay begins."""
PHASES = ("planned", "copied", "copied by the second host", "reported")
"""Of a step of an engine over two hosts. Trouble comes before them."""
_HOSTS = (
    _cell("two hosts"),
    _cell("two hosts, killed", async_scheduling=True),
    _cell("two hosts, stopped", async_scheduling=True, tensor=4),
    _cell(
        "two hosts, Redis below one, parted",
        async_scheduling=True,
        pipeline=2,
        tensor=1,
        with_redis=(1,),
    ),
    _cell("two hosts, windows, killed", pipeline=2),
    _cell("two hosts, aged", with_redis=(0, 1)),
)
"""Run by themselves: their servers are processes, which end and begin."""
_IN_PARTS = (
    _cell("in parts"),
    _cell("in parts, few blocks", blocks=60),
    _cell("in parts, lost chunks", loses=0.3),
    _cell("in parts, failing loads, tensor parallel", fails=0.1),
    _cell("in parts, slow copies, lost chunks"),
    _cell("in parts, async, lost chunks"),
    _cell("in parts, async, failing loads", fails=0.1),
    _cell("in parts, pipeline, failing loads, lost chunks", fails=0.1, loses=0.1),
    _cell("in parts, no prefix caching, lost chunks"),
    _cell("in parts, drafts, lost chunks"),
    _cell("in parts, server, failing loads", fails=0.1),
    _cell("in parts, killed server"),
)
_EARLY = (
    _cell("early, lost chunks", loses=0.5),
    _cell("early, failing loads, lost chunks, async, tensor parallel", fails=0.1, loses=0.3),
    _cell("early, slow copies, pipeline, lost chunks", loses=0.3),
    _cell("early, slow copies, failing loads, async, tensor parallel", fails=0.05),
    _cell("early, killed server, async"),
)
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
