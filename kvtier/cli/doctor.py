"""``kvtier doctor``: one line a finding about this host. Exits with 1 when something fails."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import kvtier
from kvtier.autoconfig.facts import UNLIMITED, Gpus
from kvtier.autoconfig.gpus import probe_gpus, shared_memory
from kvtier.autoconfig.memory import probe_memory
from kvtier.autoconfig.model import probe_model, usual
from kvtier.cli import checks, sglang_command, vllm_command
from kvtier.cli.key_flags import add_key_flags, given_keys
from kvtier.config.keys import Config
from kvtier.config.load import load, replaces_lmcache
from kvtier.core.errors import ConfigError
from kvtier.core.pool import HUGE_BYTES
from kvtier.core.processes import environment
from kvtier.core.terminal import size_text
from kvtier.started import Started, in_reserved_pages, ram_room
from kvtier.tiers.seam import Finding

_SMALL_SHM_BYTES = 256 << 20
_POPULATE_LINUX = (5, 14)


def check_host(started: Started) -> Iterator[Finding]:
    yield Finding("kvtier", "ok", f"{kvtier.__version__}, Python {platform.python_version()}")
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    old = release < _POPULATE_LINUX
    slow = (
        "the first save into each slot is slow before Linux 5.14; newer kernels prepare slots "
        "in the background"
    )
    yield Finding("linux", "warn" if old else "ok", platform.release(), slow if old else "")
    gpus = probe_gpus()
    if gpus.shared.value is not None:
        seen = f"CPU and GPU share one: {gpus.shared.value} ({gpus.shared.source})"
        yield Finding("memory", "ok", f"{seen}; a RAM tier takes what the engine could have")
    yield _memory(started)
    yield _huge_pages(started)
    yield _memlock(started, gpus)
    yield _shm()


def _memory(started: Started) -> Finding:
    limit, free, _ = room = ram_room()
    if limit is None or free is None:
        source = probe_memory().available.source
        return Finding("ram", "warn", f"free memory is unknown ({source})", "set ram_bytes by hand")
    size, source = started.ram_bytes, started.config.ram.source("bytes_")
    given = f"ram_bytes {size_text(size)} ({source}) of"
    if started.config.server.address is None and in_reserved_pages(size):
        return Finding("ram", "ok", f"{given} reserved huge pages")
    if not room.ever(size):
        do = "lower ram_bytes, or raise the limit: no start takes more than there can ever be"
        return Finding(
            "ram", "fail", f"{given} {size_text(limit.value or 0)} in all ({limit.source})", do
        )
    seen = f"{given} {size_text(free.value or 0)} free ({free.source})"
    if not room.now(size):
        more = size_text(size - (free.value or 0))
        do = (
            f"lower ram_bytes, or make room for {more} more: the kernel may kill the process when "
            "the RAM tier fills"
        )
        return Finding("ram", "warn", seen, do)
    return Finding("ram", "ok", seen)


def _huge_pages(started: Started) -> Finding:
    """Check for huge pages. Without them there is a second copy between a slot and the disk."""
    memory, size = probe_memory(), started.ram_bytes
    free = memory.reserved.value or 0
    aside = f"; {size_text(free)} of reserved ones are free" if free else ""
    if started.config.server.address is None and in_reserved_pages(size):
        return Finding("huge pages", "ok", f"reserved: an engine's own pool takes them{aside}")
    if memory.makes_huge.value:
        return Finding("huge pages", "ok", f"the kernel makes them of ordinary memory{aside}")
    do = (
        f"a newer kernel (Linux 6.1), or sysctl vm.nr_hugepages={-(-size // HUGE_BYTES)} before "
        "the engine starts"
    )
    return Finding("huge pages", "warn", f"none; a disk needs a second copy{aside}", do)


def _memlock(started: Started, gpus: Gpus) -> Finding:
    limit = probe_memory().memlock
    seen = (
        size_text(limit.value)
        if limit.value is not None and limit.value < UNLIMITED
        else "no limit"
    )
    if gpus.count.value == 0:
        return Finding("memlock", "ok", f"{seen}; not needed without a GPU")
    if gpus.pin_charged.value is False:
        return Finding("memlock", "ok", f"{seen}; not charged: {gpus.pin_charged.source}")
    if limit.value is None or limit.value >= started.ram_bytes:
        return Finding("memlock", "ok", seen)
    do = "docker run --ulimit memlock=-1, systemd LimitMEMLOCK=infinity"
    return Finding(
        "memlock", "warn", f"{seen}, less than ram_bytes, to which pinning may be charged", do
    )


def _shm() -> Finding:
    shm = probe_memory().shm
    seen = f"{size_text(shm.value)} in /dev/shm" if shm.value is not None else shm.source
    if (shm.value or 0) >= _SMALL_SHM_BYTES:
        return Finding("shm", "ok", f"{seen}; kvtier needs none of it")
    do = "kvtier needs none, but vLLM with several ranks does: docker run --shm-size=2g"
    return Finding("shm", "warn", seen, do)


def check_command(words: Sequence[str]) -> Iterator[Finding]:
    """Check that LMI's options and the command keep kvtier's connector, or storage for SGLang."""
    env, vllm = environment(), list(words[1:] if words[:1] == ["--"] else words)
    try:
        vllm_command.refuse_own_offloading(env)
        if not vllm:
            return
        if sglang_command.is_sglang(vllm):
            sglang_command.refuse(vllm)
            yield Finding("command", "ok", sglang_command.verdict(vllm, env))
            return
        arguments = vllm_command.understood(vllm, env.get("PATH")).arguments
        said = vllm_command.transfer(arguments, replaces_lmcache(env))
        vllm_command.refuse_expandable_segments(arguments, env)
    except ConfigError as error:
        do = "start the engine with kvtier launch, which looks at it first"
        yield Finding("command", "fail", str(error), do)
        return
    if vllm_command.recomputing(vllm) == vllm:
        yield Finding("command", "ok", "; ".join(said))
    else:
        do = "start it with kvtier launch, or say so beside kv_connector"
        yield Finding("command", "warn", "; ".join(said), do)
    if lacks := vllm_command.allocator(arguments, env, shared_memory()):
        why = "beside a connector it takes the second only with the first"
        do = f"start vLLM with {vllm_command.SETTINGS}: {why}"
        yield Finding("allocator", "warn", lacks, do)


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
    help_text = "worker ranks, for LMCache's sizes (they are per worker)"
    add("--ranks", type=int, default=1, help=help_text)
    help_text = "do not look for vLLM (on a host with a server only)"
    add("--no-engine", action="store_true", help=help_text)
    add("--json", action="store_true", help="print the findings as JSON")
    add_key_flags(parser)
    add("command", nargs=argparse.REMAINDER, help="-- vllm serve ...: can it run with kvtier?")


def run(arguments: argparse.Namespace) -> int:
    """Print each finding as soon as it is made. Returns 0, or 1 if one is a fail."""
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
    """Write a finding as ``ok nvme what was seen``, and under it what to do."""
    head = f"{finding.state:5} {finding.check:{_CHECK_COLUMNS}} {finding.seen}"
    return f"{head}\n{'':{_CHECK_COLUMNS + 6}} -> {finding.do}" if finding.do else head


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield the configuration's findings, then the others', by defaults if it is unreadable."""
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
        config, finding = checks.planned(config, model, server=arguments.no_engine)
        yield finding
    started = Started(config)
    yield from guarded("host", partial(check_host, started))
    alone = arguments.no_engine
    yield from guarded("left behind", lambda: [checks.check_left_behind(config, server=alone)])
    if not arguments.no_engine:
        if not sglang_command.is_sglang([word for word in arguments.command if word != "--"]):
            yield from guarded("vllm", checks.check_engine)
        yield from guarded("command", partial(check_command, arguments.command))
    if model.kv_bytes_per_token.value:
        yield checks.check_model(started, model)
    yield from tiers(started)


def tiers(started: Started) -> Iterator[Finding]:
    yield from guarded("token", partial(checks.check_secrets, started))
    yield from guarded("self-test ram", lambda: [checks.check_ram()])
    for tier, own in started.tiers:
        yield from guarded(tier.name, partial(checks.check_tier, started, tier, own))
    yield from guarded("server", partial(checks.check_server, started))


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield one check's findings, or the error that it did not foresee, and let the others run."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - doctor reports faults and must not fail of them
        do = "kvtier did not foresee this: please report it"
        yield Finding(check, "fail", f"{type(error).__name__}: {error}", do)
