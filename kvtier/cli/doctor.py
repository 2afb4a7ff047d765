"""``kvtier doctor``: is everything here as an engine with kvtier needs it? A line a finding; 1 when
something fails."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from kvtier.autoconfig.facts import Model
from kvtier.autoconfig.probe.probe import probe_model
from kvtier.cli import checks
from kvtier.cli.checks import Finding
from kvtier.config.keys import Config
from kvtier.config.load import load
from kvtier.core.errors import ConfigError

_WIDTH = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="YAML", help="configuration file; beats KVTIER_CONFIG_FILE"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="model folder or its config.json: does the RAM tier suit it?"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="worker ranks, for LMCache's sizes (they are per worker)",
    )
    parser.add_argument(
        "--no-engine",
        action="store_true",
        help="do not look for vLLM (on a host with a server only)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="-- vllm serve ...: can it run with kvtier?"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print findings as they are made. 0; or 1 when one is a fail."""
    counts: Counter[str] = Counter()
    rows = []
    for finding in examine(arguments):
        counts[finding.state] += 1
        rows.append(finding._asdict())
        if not arguments.json:
            print(line(finding), flush=True)
    status = 1 if counts["fail"] else 0
    if arguments.json:
        print(json.dumps({"status": status, "findings": rows}, indent=2))
    else:
        print(f"\n{counts['ok']} ok, {counts['warn']} to mind, {counts['fail']} to mend")
    return status


def line(finding: Finding) -> str:
    """``ok    nvme    what was seen``, and below it what to do."""
    head = f"{finding.state:5} {finding.check:{_WIDTH}} {finding.seen}"
    return f"{head}\n{'':{_WIDTH + 6}} -> {finding.do}" if finding.do else head


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """All findings, the configuration's first: without one that can be read, the rest is judged by
    the defaults."""
    try:
        config = load(arguments.config, ranks=arguments.ranks)
        yield Finding("config", "ok", _sources(config))
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
            "config", "fail", str(error), "correct it; what follows is judged by the defaults"
        )
    model = Model()
    if arguments.model:
        try:
            model = probe_model(arguments.model)
        except ConfigError as error:
            yield Finding("model", "fail", str(error), "give a model folder or its config.json")
    if config.auto:
        config, finding = checks.planned(config, model)
        yield finding
    yield from guarded("host", partial(checks.check_host, config))
    if not arguments.no_engine:
        yield from guarded("vllm", checks.check_engine)
        yield from guarded("command", partial(checks.check_command, arguments.command))
    if model.kv_bytes_per_token.value:
        yield checks.check_model(config, model)
    yield from tiers(config)


def tiers(config: Config) -> Iterator[Finding]:
    """Every configured place for chunks, with the trial between two processes."""
    yield from guarded("token", partial(checks.check_secrets, config))
    yield from guarded("self-test ram", lambda: [checks.check_ram()])
    yield from guarded("nvme", partial(checks.check_nvme, config))
    yield from guarded("redis", partial(checks.check_redis, config))
    yield from guarded("object", partial(checks.check_objects, config))
    yield from guarded("server", partial(checks.check_server, config))


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """One check's findings. Whatever it did not foresee is a finding too: the others are made all
    the same."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - a doctor does not die of what ails the patient
        yield Finding(
            check,
            "fail",
            f"{type(error).__name__}: {error}",
            "kvtier did not foresee this: please report it",
        )


def _sources(config: Config) -> str:
    given = [f"{key} ({source})" for key, source in config.sources.items()]
    return f"set: {', '.join(given)}" if given else "nothing set: defaults"
