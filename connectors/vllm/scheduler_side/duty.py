"""What kvtier does for one engine. Data only."""

from __future__ import annotations

from typing import NamedTuple


class Duty(NamedTuple):
    """What kvtier does for an engine."""

    loads: bool = True
    saves: bool = True
    save_decode: bool = True
    """The model's answers are saved too."""
    shares_blocks: bool = True
    """vLLM's own prefix cache is on, so what one request has loaded is there for others."""
    blocks: int | None = None
    """KV blocks of the engine. None: so many that it does not matter."""
    in_flight: int = 0
    """Most tokens that the steps in flight compute."""
    steps_alone: bool = False
    """No other engine has to wait for this one's steps, as ranks of data parallelism do."""
    hit_unit: int = 0
    """Hits may end at multiples of so many tokens within a block. 0: they end with blocks."""
    in_parts: bool = False
    """Of a load that was cut vLLM keeps what had arrived, so hits may come in parts."""
