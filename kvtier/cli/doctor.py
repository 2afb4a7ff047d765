"""``kvtier doctor``: one line a finding about this host. Exits with 1 when something fails."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from kvtier.autoconfig.model import usual
from kvtier.autoconfig.probe.model import probe_model
from kvtier.cli.checks.configuration import check_model, check_secrets, planned
from kvtier.cli.checks.engine import check_command, check_engine
from kvtier.cli.checks.host import check_host
from kvtier.cli.checks.tiers import check_left_behind, check_ram, check_server, check_tier
from kvtier.cli.key_flags import add_key_flags, given_keys
from kvtier.config.keys import Config
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.started import Started
from kvtier.tiers.seam import Finding

_CHECK_COLUMNS = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvtier doctor [--config YAML] [--model DIR] [--no-engine] [--json] [--KEY VALUE ...]"
    )
    add = parser.add_argument
    add("--config", metavar="YAML", help="configuration file; beats KVTIER_CONFIG_FILE")
    add(
        "--model", metavar="DIR", help="model folder or its config.json: does the RAM tier suit it?"
    )
    add(
        "--ranks",
        type=int,
        default=1,
        help="worker ranks, for LMCache's sizes (they are per worker)",
    )
    add(
        "--no-engine",
        action="store_true",
        help="do not look for vLLM (on a host with a server only)",
    )
    add("--json", action="store_true", help="print the findings as JSON")
    add_key_flags(parser)
    add("command", nargs=argparse.REMAINDER, help="-- vllm serve ...: can it run with kvtier?")


def run(arguments: argparse.Namespace) -> int:
    """Print each finding as soon as it is made. Returns 0, or 1 when one is a fail."""
    rows = []
    for finding in examine(arguments):
        rows.append(finding._asdict())
        if not arguments.json:
            print(line(finding), flush=True)
    counts = Counter(row["state"] for row in rows)
    status = 1 if counts["fail"] else 0
    if arguments.json:
        print(json.dumps({"status": status, "findings": rows}, indent=2))
    else:
        print(f"\n{counts['ok']} ok, {counts['warn']} to consider, {counts['fail']} to repair")
    return status


def line(finding: Finding) -> str:
    """``ok    nvme    what was seen``, and under it what to do."""
    head = f"{finding.state:5} {finding.check:{_CHECK_COLUMNS}} {finding.seen}"
    return f"{head}\n{'':{_CHECK_COLUMNS + 6}} -> {finding.do}" if finding.do else head


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """The configuration's findings, then the others', by the defaults where it cannot be read."""
    try:
        config = load(arguments.config, flags=given_keys(arguments), ranks=arguments.ranks)
        given = ", ".join(f"{key} ({source})" for key, source in config.sources.items())
        yield Finding("config", "ok", f"set: {given}" if given else "nothing set: defaults")
        yield from (
            Finding(
                "config", "warn", remark.text, "remove what has no effect, or give kvtier's own key"
            )
            for remark in config.remarks
            if remark.level >= logging.WARNING
        )
    except ConfigError as error:
        config = Config()
        yield Finding(
            "config", "fail", str(error), "correct it; the rest is checked with the defaults"
        )
    model = usual("no --model was given")
    if arguments.model:
        try:
            model = probe_model(arguments.model)
        except ConfigError as error:
            yield Finding("model", "fail", str(error), "give a model folder or its config.json")
    if config.engine.auto:
        config, finding = planned(config, model, server=arguments.no_engine)
        yield finding
    started = Started(config)
    yield from guarded("host", partial(check_host, started))
    alone = arguments.no_engine
    yield from guarded("left behind", lambda: [check_left_behind(config, server=alone)])
    if not arguments.no_engine:
        yield from guarded("vllm", check_engine)
        yield from guarded("command", partial(check_command, arguments.command))
    if model.kv_bytes_per_token.value:
        yield check_model(started, model)
    yield from tiers(started)


def tiers(started: Started) -> Iterator[Finding]:
    yield from guarded("token", partial(check_secrets, started))
    yield from guarded("self-test ram", lambda: [check_ram()])
    for tier, own in started.tiers:
        yield from guarded(tier.name, partial(check_tier, started, tier, own))
    yield from guarded("server", partial(check_server, started))


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """One check's findings, or the error that it did not foresee, so that the others still run."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - doctor reports faults and must not fail of them
        yield Finding(
            check,
            "fail",
            f"{type(error).__name__}: {error}",
            "kvtier did not foresee this: please report it",
        )
