"""``kvtier plan``: what would be set on this machine, or on an assumed one, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from kvtier.autoconfig.breakeven import GPU_KINDS, gpu_kind
from kvtier.autoconfig.explain import as_json, as_yaml, next_step, table
from kvtier.autoconfig.facts import Facts, Gpus, Memory, Serving, SizingTrace
from kvtier.autoconfig.gpus import probe_gpus
from kvtier.autoconfig.memory import probe_memory
from kvtier.autoconfig.model import probe_model, usual
from kvtier.autoconfig.plan import make_plan
from kvtier.autoconfig.start import measure
from kvtier.core.errors import ConfigError
from kvtier.core.fact import Fact, known, unknown
from kvtier.core.terminal import UnitError, parse_size, width
from kvtier.tiers.nvme.disks import Disk, probe_disks
from kvtier.tiers.registry import TIERS, RegisteredTier
from kvtier.tiers.seam import About, TierSection

_WHAT_IF = "what if"


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        why = f"{error}" if isinstance(error, UnitError) else "expected for example 210GiB or 2TB"
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; {why}") from None


def speed(text: str) -> int:
    """Parse ``--disk-speed`` as bytes a second."""
    try:
        return parse_size(text.removesuffix("/s"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a speed; expected for example 2GB/s or 900MB/s"
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_text = (
        "model folder, its config.json, or a hub name that is in this host's hub cache (no "
        "network is used)"
    )
    add("--model", metavar="DIR_OR_NAME", help=help_text)
    add("--kv-dtype", default="auto", help="KV cache dtype, as given to the engine (default: auto)")
    help_text = "candidate directory for the disk tier; may be repeated"
    add("--path", action="append", default=[], help=help_text)
    for flag, key in _tier_flags():
        if key.unit == "bytes":
            add(flag, type=size, help=key.flag)
        else:
            add(flag, metavar=key.unit.upper(), help=key.flag)
    for short, text in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        where = " on this host" if short == "dp" else ""
        add(f"--{short}", type=int, default=1, help=f"{text} parallel size{where} (default: 1)")
    help_text = "hosts that the engine's ranks are on, as --nnodes of vLLM (default: 1)"
    add("--hosts", type=int, default=1, help=help_text)
    add("--engines", type=int, default=1, help="engines like this one on this host (default: 1)")
    add("--max-model-len", type=int, help="longest context the engine serves")
    add("--block-tokens", type=int, help="the engine's block size in tokens")
    _add_what_if(parser)
    help_text = "do not time memory, disks, Redis and bucket (up to 5 s)"
    add("--no-measure", action="store_true", help=help_text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--yaml", action="store_true", help="print the configuration file")
    form.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_what_if(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ram", type=size, help="what if this much RAM were available")
    help_text = "what if the disk had this much free space (an NVMe when no --path is given)"
    add("--disk", type=size, help=help_text)
    help_text = "what if the disk were read at so much, for example 2GB/s"
    add("--disk-speed", type=speed, metavar="SPEED", help=help_text)
    kinds = f"'none' for CPU only, or {', '.join(GPU_KINDS)}"
    help_text = f"what if there were N such GPUs, for example H100:8; {kinds}"
    add("--gpu", metavar="KIND[:N]", help=help_text)
    help_text = (
        "size RAM and NVMe for these recorded requests, in any form that 'kvtier simulate' "
        "reads: the smallest sizes within a point of the knee of the curve of hits"
    )
    add("--trace", metavar="FILE", help=help_text)
    forms = tuple(_sizing().FORMS)
    add("--format", choices=forms, help="the form of --trace; default: told from the file")


def run(args: argparse.Namespace) -> int:
    """Plan. Returns 0, or 1 if kvtier would stay off. Raises ConfigError for wrong input."""
    facts = look(args)
    plan = make_plan(facts if args.no_measure else measure(facts))
    if args.yaml:
        print(as_yaml(plan))
    elif args.json:
        print(as_json(plan))
    else:
        print(f"{table(plan, columns=width())}\n\nNext: {next_step(plan)}")
    return 0 if "ram_bytes" in plan.values() else 1


def look(args: argparse.Namespace) -> Facts:
    for name in ("tp", "pp", "dp", "hosts", "engines", "max_model_len", "block_tokens"):
        if (given := getattr(args, name)) is not None and given < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {given}: expected 1 or more")
    if args.tp * args.pp % args.hosts:
        raise ConfigError(
            f"--hosts {args.hosts}: --tp {args.tp} and --pp {args.pp} are of the whole engine, "
            f"expected {args.tp * args.pp} ranks to be as many on each host"
        )
    engine = Serving(
        tensor_parallel=known(args.tp, "--tp"),
        pipeline_parallel=known(args.pp, "--pp"),
        data_parallel=known(args.dp, "--dp"),
        hosts=known(args.hosts, "--hosts"),
        engines=known(args.engines, "--engines"),
        block_tokens=_given(args.block_tokens, "--block-tokens"),
        max_model_len=_given(args.max_model_len, "--max-model-len"),
    )
    return Facts(
        memory=_memory(args.ram),
        gpus=_gpus(args.gpu),
        disks=_disks(args.path, args.disk, args.disk_speed),
        model=(
            probe_model(args.model, args.kv_dtype) if args.model else usual("no --model was given")
        ),
        engine=engine,
        trace=_recorded(args.trace, args.format),
        tiers={tier.name: tier.probe(own) for tier, own in _tiers(args)},
    )


def _flag(tier: RegisteredTier, flat: str) -> str:
    """Return the flag of a tier's key: a tier is given by its name alone, as ``--redis URL``."""
    return f"--{tier.name}" if flat == tier.place else f"--{flat.replace('_', '-')}"


def _tier_flags() -> Iterator[tuple[str, About]]:
    for tier in TIERS.values():
        for flat, (_, about) in tier.section.keys().items():
            if about.flag:
                yield _flag(tier, flat), about


def _tiers(args: argparse.Namespace) -> Iterator[tuple[RegisteredTier, TierSection]]:
    for tier in TIERS.values():
        given = {
            name: getattr(args, _flag(tier, flat).removeprefix("--").replace("-", "_"))
            for flat, (name, about) in tier.section.keys().items()
            if about.flag
        }
        if any(given.values()) and (own := tier.section(**given)).configured:
            yield tier, own


def _recorded(path: str | None, form: str | None) -> SizingTrace | None:
    if path is None:
        if form is not None:
            raise ConfigError(f"--format {form} says how --trace is read: give --trace FILE too")
        return None
    trace: SizingTrace = _sizing().recorded(path, form)
    return trace


def _sizing() -> Any:
    return import_module("kvtier.bench.traces.curve")


def _given(value: int | None, option: str) -> Fact[int]:
    return unknown(f"no {option} was given") if value is None else known(value, option)


def _memory(ram: int | None) -> Memory:
    seen = probe_memory()
    if ram is None:
        return seen
    fact = known(ram, _WHAT_IF)
    return replace(seen, total=fact, available=fact, cgroup_headroom=fact)


def _disks(paths: list[str], free: int | None, read_speed: int | None) -> tuple[Disk, ...]:
    disks = probe_disks(paths) if free is None or paths else (_WHAT_IF_DISK,)
    if free is not None:
        space, none = known(free, _WHAT_IF), known(0, _WHAT_IF)
        disks = tuple(replace(disk, free=space, total=space, own=none) for disk in disks)
    if read_speed is not None:
        disks = tuple(
            replace(disk, read_speed=known(float(read_speed), "--disk-speed")) for disk in disks
        )
    return disks


_WHAT_IF_DISK = Disk(
    "/mnt/nvme/kvtier",
    writable=known(True, _WHAT_IF),
    o_direct=known(True, _WHAT_IF),
    device=known("nvme", _WHAT_IF),
    read_speed=unknown("--disk-speed gives another"),
)


def _gpus(given: str | None) -> Gpus:
    if given is None:
        return probe_gpus()
    name, _, count = given.partition(":")
    if name == "none":
        return Gpus(count=known(0, _WHAT_IF))
    family = [kind for kind in GPU_KINDS if kind.startswith(f"{name.upper()}-")]
    if sizes := [kind for kind in family if kind.endswith("GB")]:
        raise ConfigError(f"--gpu {given}: there are {' and '.join(sizes)}; say which")
    kind = gpu_kind(name)
    if kind is None or not (count or "1").isdigit() or int(count or 1) < 1:
        raise ConfigError(
            f"--gpu {given}: expected KIND:COUNT with 'none' or a kind of {', '.join(GPU_KINDS)}"
        )
    uncharged = known(False, "NVIDIA's driver does not charge RLIMIT_MEMLOCK")
    size = known(kind.memory, _WHAT_IF)
    shared = known(name, _WHAT_IF) if kind.shared else unknown(f"{name} has memory of its own")
    return Gpus(known(int(count or 1), _WHAT_IF), known(name, _WHAT_IF), size, uncharged, shared)
