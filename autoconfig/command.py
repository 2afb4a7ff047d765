"""``kvtier plan``: look at this machine, or ask what if it were another, and print what would be set and why."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from kvtier.autoconfig import probe
from kvtier.autoconfig.breakeven import gpu_kind
from kvtier.autoconfig.explain import as_json, as_yaml, table
from kvtier.autoconfig.facts import Disk, Fact, Facts, Gpus, Memory, Model, Serving, known, unknown
from kvtier.autoconfig.measure import measure
from kvtier.autoconfig.plan import make_plan
from kvtier.config import parse_size
from kvtier.errors import ConfigError

_WHAT_IF = "what if"


def size(text: str) -> int:
    """``--ram`` and ``--disk``, in the words of the configuration file."""
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected for example 210GiB, 2TB or 1048576") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``kvtier plan``. Unset options mean: look."""
    add = parser.add_argument
    add("--model", metavar="DIR_OR_CONFIG", help="model folder or its config.json")
    add("--kv-dtype", default="auto", help="KV cache dtype, as given to the engine (default: auto)")
    add("--path", action="append", default=[], help="candidate directory for the disk tier; may be repeated")
    add("--redis", metavar="URL", help="Redis for the shared tier")
    for short, text in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        add(f"--{short}", type=int, default=1, help=f"{text} parallel size on this host (default: 1)")
    add("--engines", type=int, default=1, help="engines like this one on this host (default: 1)")
    add("--max-model-len", type=int, help="longest context the engine serves")
    add("--block-tokens", type=int, help="the engine's block size in tokens")
    add("--ram", type=size, help="what if this much RAM were available")
    add("--disk", type=size, help="what if the disk had this much free space (an NVMe when no --path is given)")
    add("--gpu", metavar="KIND[:N]", help="what if there were N such GPUs, for example H100:8; 'none' for CPU only")
    add("--no-measure", action="store_true", help="do not time memory, disks and Redis (up to 5 s)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--yaml", action="store_true", help="print the configuration file")
    form.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan. 0; or 1 when kvtier would stay off. Raises ConfigError for a wrong model or option."""
    facts = look(args)
    plan = make_plan(facts if args.no_measure else measure(facts))
    print(as_yaml(plan) if args.yaml else as_json(plan) if args.json else table(plan))
    return 0 if "ram_bytes" in plan.values() else 1


def look(args: argparse.Namespace) -> Facts:
    """What is there, with the what-if options laid over it."""
    for name in ("tp", "pp", "dp", "engines"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected 1 or more")
    engine = Serving(
        tensor_parallel=known(args.tp, "--tp"),
        pipeline_parallel=known(args.pp, "--pp"),
        data_parallel=known(args.dp, "--dp"),
        engines=known(args.engines, "--engines"),
        block_tokens=_given(args.block_tokens, "--block-tokens"),
        max_model_len=_given(args.max_model_len, "--max-model-len"),
    )
    missing: Fact[Any] = unknown("no --model was given")
    model = Model(missing, missing, missing, missing, missing, missing, missing, missing)
    return Facts(
        memory=_memory(args.ram),
        gpus=_gpus(args.gpu),
        disks=_disks(args.path, args.disk),
        redis=probe.probe_redis(args.redis) if args.redis else None,
        model=probe.probe_model(args.model, args.kv_dtype) if args.model else model,
        engine=engine,
    )


def _given(value: int | None, option: str) -> Fact[int]:
    return unknown(f"no {option} was given") if value is None else known(value, option)


def _memory(ram: int | None) -> Memory:
    seen = probe.probe_memory()
    if ram is None:
        return seen
    fact = known(ram, _WHAT_IF)
    return replace(seen, total=fact, available=fact, cgroup_headroom=fact)


def _disks(paths: list[str], free: int | None) -> tuple[Disk, ...]:
    if free is None:
        return probe.probe_disks(paths)
    space: Fact[int] = known(free, _WHAT_IF)
    if paths:
        none = known(0, _WHAT_IF)
        return tuple(replace(disk, free=space, total=space, own=none) for disk in probe.probe_disks(paths))
    yes, kind = known(True, _WHAT_IF), known("nvme", _WHAT_IF)
    return (Disk("/mnt/nvme/kvtier", free=space, total=space, writable=yes, o_direct=yes, device=kind),)


def _gpus(given: str | None) -> Gpus:
    if given is None:
        return probe.probe_gpus()
    name, _, count = given.partition(":")
    if name == "none":
        return Gpus(count=known(0, _WHAT_IF))
    kind = gpu_kind(name)
    if kind is None or not (count or "1").isdigit():
        raise ConfigError(f"--gpu {given}: expected KIND:COUNT with a known kind such as A100, H100, L40S, or 'none'")
    memory = 80 << 30 if "80G" in name.upper() else kind.memory
    uncharged = known(False, "NVIDIA's driver does not charge RLIMIT_MEMLOCK")
    return Gpus(known(int(count or 1), _WHAT_IF), known(name, _WHAT_IF), known(memory, _WHAT_IF), uncharged)
