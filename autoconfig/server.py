"""What a server's start asks when auto-config is on (the key ``engine.auto``). No engine has come
yet, and so no model is known."""

from __future__ import annotations

import logging

from kvtier.autoconfig.explain import PLANNED, value_text
from kvtier.autoconfig.facts import Serving
from kvtier.autoconfig.measure import measure
from kvtier.autoconfig.model import usual
from kvtier.autoconfig.plan import make_plan
from kvtier.autoconfig.start import probe_host, settled
from kvtier.config.keys import Config
from kvtier.core.fact import known

logger = logging.getLogger("kvtier")


def sized(config: Config) -> Config:
    """``config``, where auto-config has filled in what is not set: the room of one server, which
    all ranks and engines that attach share. The log has the reason of each size: when the server
    has its room, no plan would say the same. Takes at most 5 s. Raises ConfigError as an engine
    does."""
    if not config.engine.auto:
        return config
    one = known(1, "one server")
    serving = Serving(one, one, one, engines=known(config.engine.host_engines, "host_engines"))
    facts = probe_host(config, usual("a server is told no model"), serving, server=True)
    plan = make_plan(measure(facts))
    full = settled(config, plan)
    for row in plan.settings:
        if full.source(row.key) == PLANNED:
            size = value_text(row.key, row.value)
            logger.info("auto-config: %s %s: %s (%s)", row.key, size, row.reason, row.source)
    return full
