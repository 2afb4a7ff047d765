"""Facts -> Plan: the values of kvtier's config keys, each with its source and reason. Pure: it
probes nothing.

Rules:

- No size exceeds what is free for it: RAM within the cgroup, the disk, Redis, and locked memory
  where the driver charges it.
- A tier that cannot hold one long context, or whose hits are never faster than computing, is left
  out *with the reason*.
- What is unknown is assumed on the safe side, and the assumption is shown.
- Of a trace, each tier gets the smallest size within a point of the knee of the curve of hits.
  Without one a tier gets half of what is free at most: a cache leaves a machine usable for others.
- Sizes are for one store: all tensor and pipeline ranks that one engine replica has on this host
  together. Replicas and engines on the same host get equal shares.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtier.autoconfig import breakeven
from kvtier.autoconfig.draft import Load, Plan, Row, TierDraft, break_even_row, pays
from kvtier.autoconfig.facts import GIB, MIB, UNLIMITED, Facts, Memory, SizingTrace
from kvtier.config.keys import Config
from kvtier.core.fact import Fact, known, least, or_assumed, unknown
from kvtier.core.pool import HUGE_BYTES
from kvtier.core.terminal import rate_text, size_text
from kvtier.load_policy.prefill import PrefillTime
from kvtier.tiers.nvme.disks import LOCAL_DISKS, NETWORK_FILESYSTEMS, RAM_FILESYSTEMS, Disk
from kvtier.tiers.registry import TIERS

LONG_CONTEXT_TOKENS = 32_768
CHUNK_TOKENS = Config().engine.chunk_tokens
_TYPICAL_KV_BYTES = 128 << 10
"""KV bytes of a token in models of about 8 billion parameters."""
_ASSUMED_READ = {"nvme": 2.0e9, "ssd": 0.4e9, "virtual": 0.2e9, "ebs": 0.125e9, "rotational": 0.1e9}
_KV_BYTES = "2 x KV heads x head dim x layers, or the MLA latent; windowed layers counted in full"
_WARM_FACTOR = 3
"""Factor by which another disk must be faster than one that has chunks from before."""
_SLOWER_FACTOR = 4
"""Factor by which a disk may be slower than the best one beside which it is used."""
_HALF = "; half of what is free: --trace says what more would bring"


def make_plan(facts: Facts) -> Plan:
    """Plan. Never raises for missing facts, and never sets a size of 0."""
    draft = Plan()
    load = _load(facts, draft)
    ram_bytes = _plan_ram(facts, load, draft)
    if ram_bytes:
        _show_chunk(facts, load, draft)
        _plan_disk(facts, load, ram_bytes, draft)
        for tier in TIERS.values():
            tier.plan(facts.tiers.get(tier.name), TierDraft(draft, load, tier.name))
        _show_worth(facts, load, ram_bytes, draft)
        _show_hicache(load, ram_bytes, draft)
    else:
        reason = "without a RAM tier nothing can be loaded: every chunk passes through a RAM slot"
        for tier in TIERS.values():
            if any(about.planned for _, about in tier.section.keys().values()):
                draft.leave_out(tier.name, reason)
    _show_shared(facts, ram_bytes, load, draft)
    return draft


def _load(facts: Facts, draft: Plan) -> Load:
    engine, model = facts.engine, facts.model
    alone = "the engine was not asked, so one was assumed"
    tensor = max(1, draft.take("tensor_parallel", engine.tensor_parallel, 1, alone))
    ranks = tensor * max(1, draft.take("pipeline_parallel", engine.pipeline_parallel, 1, alone))
    stores = (engine.data_parallel.value or 1) * (engine.engines.value or 1)
    if model.name.value:
        draft.show("model", model.name.value, model.name.source, "what is planned for")
    single = model.kv_bytes_per_token.value or _TYPICAL_KV_BYTES
    heads = model.kv_heads.value or tensor
    hosts = engine.hosts.value or 1
    copies = 1 if heads == 1 else max(tensor, heads) / heads  # what all ranks have is stored once
    stored = single if heads == 1 else -(-single * max(tensor, heads) // (heads * hosts))
    source, reason = model.kv_bytes_per_token.source, _KV_BYTES
    if model.kv_bytes_per_token.value is None:
        reason = f"unknown ({source}); 128 KiB is usual for 8-billion-parameter models"
        source = "assumed"
    if copies > 1:
        reason += f"; {heads} KV heads on {tensor} tensor ranks are stored {copies:g} times"
    if hosts > 1:
        reason += f"; each of {hosts} hosts keeps what its {ranks // hosts} rank(s) have of it"
    draft.show("kv_bytes_per_token", stored, source, reason)
    whole = model.kv_bytes_global.value
    if whole is not None and whole != model.kv_bytes_per_token.value:
        text = "layers that see the whole context alone; the rest is sliding windows"
        draft.show("kv_bytes_per_token_global", whole, model.kv_bytes_global.source, text)
    if stores > 1:
        reason = "replicas x engines; RAM, disk and Redis are divided equally"
        draft.show("stores_on_host", stores, "engine", reason)
    longest = engine.max_model_len.value or model.max_tokens.value or LONG_CONTEXT_TOKENS
    draft.prefill = _prefill(facts, ranks, draft)
    return Load(
        kv_bytes=stored,
        long_tokens=min(longest, LONG_CONTEXT_TOKENS),
        longest=longest,
        link=_link(facts, ranks // hosts, draft),
        ranks=ranks // hosts,
        stores=stores,
    )


def _prefill(facts: Facts, ranks: int, draft: Plan) -> PrefillTime:
    model, gpus = facts.model, facts.gpus
    weights, reason = model.weight_bytes.value, "2 bytes each, or 8 billion"
    guess = weights // 2 if weights else 8_000_000_000
    size = max(1, draft.take("active_parameters", model.active_parameters, guess, reason))
    if gpus.count.value == 0:
        cores = (facts.memory.cpus.value or 1) * (facts.engine.hosts.value or 1)
        peak, source = breakeven.CPU_CORE_FLOPS * cores, f"estimated for {cores} CPU cores"
    else:
        kind = breakeven.gpu_kind(gpus.kind.value or "")
        peak = (kind or breakeven.GPU_KINDS["H100"]).flops * ranks
        source = f"estimated for {ranks} x {gpus.kind.value}"
        if kind is None:
            source += ", taken as an H100: with a faster GPU a tier pays only for longer hits"
    prefill = breakeven.estimated_prefill(size, model.attention_flops.value or 0, peak)
    reason = "before attention; not measured yet"
    draft.show("prefill_tokens_per_second", round(1 / prefill.per_token), source, reason)
    return prefill


def _link(facts: Facts, ranks: int, draft: Plan) -> float:
    """Return the bytes a second between RAM and the engine's KV memory, for all ranks together."""
    if facts.gpus.count.value == 0:
        reason = "5 GB/s is slow for one thread's copy"
        return max(1.0, draft.take("copy_bytes_per_second", facts.copy_speed, 5e9, reason))
    kind = breakeven.gpu_kind(facts.gpus.kind.value or "")
    return (kind.link if kind else 10e9) * ranks


def _available(facts: Facts, draft: Plan) -> Fact[int]:
    """Return the RAM that machine and cgroup leave, less the growth to come of stores here."""
    memory = facts.memory
    free = least(memory.available, memory.cgroup_headroom)
    if free is None:
        total = memory.total
        if total.value is None:
            return unknown(f"{memory.available.source}; {total.source}")
        return known(total.value // 2, f"assumed: half of {total.source}, as use is unknown")
    if memory.cgroup_headroom.value is None:
        draft.warnings.append(
            f"cgroup limit unknown ({memory.cgroup_headroom.source}); assumed none"
        )
    for name, found in facts.tiers.items():
        if (growth := found.host_bytes) is not None:
            free = known(
                (free.value or 0) - growth,
                f"{free.source}, less {size_text(growth)} that the {TIERS[name].section.title} "
                "here may take",
            )
    return free


def _reserve(facts: Facts, available: int, load: Load, draft: Plan) -> int:
    """Return the RAM to leave to others: LMI's rule, for each engine, on what cgroups leave."""
    weights, cpu = facts.model.weight_bytes, facts.gpus.count.value == 0
    fifth = available // 5
    if weights.value is None:
        reserve, reason = available // 2, f"half of it: weight bytes are unknown ({weights.source})"
    else:
        copies = _copies_to_come(facts)
        reserve = max(copies * weights.value * load.stores, fifth)
        times = f" x {load.stores} engines" if load.stores > 1 else ""
        reason = (
            f"the greater of {copies} x weights of {size_text(weights.value)}{times} (loading) "
            "and a fifth"
        )
    if cpu and facts.engine.kv_cache_tokens.value:
        own = facts.engine.kv_cache_tokens.value * load.kv_bytes
        reserve += own * load.stores
        reason += f", and the engine's own KV cache of {size_text(own)} in RAM"
    draft.show("ram_reserve_bytes", reserve, weights.source, reason)
    return reserve


def _plan_ram(facts: Facts, load: Load, draft: Plan) -> int:
    free = _available(facts, draft)
    if free.value is None:
        draft.leave_out(
            "ram", f"available RAM is unknown ({free.source}): give --ram, or ram_bytes by hand"
        )
        return 0
    draft.show(
        "ram_available_bytes", free.value, free.source, "machine and cgroups, whichever is tighter"
    )
    pools = (facts.memory.pools.value or 0) if load.stores > 1 else 0
    if pools:
        reason = "engines here have it already: it is shared too"
        draft.show("ram_held_bytes", pools, facts.memory.pools.source, reason)
    reserve = _reserve(facts, max(0, free.value + pools), load, draft)
    share = max(
        0, min((free.value + pools - reserve) // load.stores, free.value - reserve // load.stores)
    )
    half = max(0, free.value + pools) // 2 // load.stores
    gentle = _HALF if facts.trace is None and share > half else ""
    share = min(share, half) if gentle else share
    if facts.gpus.shared.value is not None and share > _slots_for_loads(facts, load):
        share, gentle = _slots_for_loads(facts, load), "; the slots that loads need"
    share, note = _locked(facts, share, draft)
    share -= share % MIB
    share, reason = _recorded_ram(facts.trace, share, load, draft)
    note += reason
    if short := load.too_small(share):
        reason = f"{short} ({size_text(free.value)} available, {size_text(reserve)} reserved{note})"
        draft.leave_out("ram", reason)
        return 0
    copies = facts.gpus.count.value == 0
    way = "copy to the engine" if copies else "host link, assumed by GPU kind"
    speed = known(load.link, way)
    if not pays("ram", speed, load, draft):
        return 0
    held = (
        f"holds {share // load.kv_bytes:,} tokens; {size_text(share // load.ranks)} for each of "
        f"{load.ranks} rank(s)"
    )
    draft.set("ram_bytes", share, free.source, held + gentle + note)
    _show_huge_pages(facts.memory, share, load.stores, draft)
    return share


def _recorded_ram(trace: SizingTrace | None, most: int, load: Load, draft: Plan) -> tuple[int, str]:
    if trace is None:
        return most, ""
    curve, kv, knee = trace.curve, load.kv_bytes, trace.knee(load.kv_bytes)
    reason = (
        f"an LRU of this size hits {trace.percent(kv, knee)}, and one of any size "
        f"{trace.percent(kv, trace.largest(kv))}: {curve.requests:,} requests ask for "
        f"{curve.asked:,} blocks of {trace.block_tokens} tokens, {curve.unique:,} of them "
        "different" + ("; taken as what one engine serves" if load.stores > 1 else "")
    )
    draft.show("trace_knee_bytes", knee, trace.name, reason)
    size = _at_least(trace.enough(kv, most), load)
    return _sized(trace, min(size, most), most, knee, load)


def _sized(trace: SizingTrace, size: int, most: int, knee: int, load: Load) -> tuple[int, str]:
    if size >= most:
        what = "all there is"
    elif knee > most:
        what = f"within a point of what all {size_text(most)} would hit"
    else:
        what = "within a point of the knee"
    return size, f"; {what}: {trace.why(load.kv_bytes, size)}"


def _at_least(size: int, load: Load) -> int:
    size = max(size, load.long_tokens * load.kv_bytes, MIB)
    return -(-size // MIB) * MIB


def _show_huge_pages(memory: Memory, share: int, stores: int, draft: Plan) -> None:
    free, source = memory.reserved.value or 0, memory.makes_huge.source
    if free >= share * stores:
        pages, source = "reserved", memory.reserved.source
        note = f"{size_text(free)} free: an engine's own pool lies in them"
    elif memory.makes_huge.value:
        pages, note = "made", "the kernel makes them of ordinary memory"
    else:
        pages = "none"
        note = (
            "a disk needs a second copy; Linux 6.1 avoids it, or sysctl "
            f"vm.nr_hugepages={-(-share // HUGE_BYTES) * stores} before a start"
        )
    draft.show("huge_pages", pages, source, note)


def _locked(facts: Facts, share: int, draft: Plan) -> tuple[int, str]:
    """Cut ``share`` to RLIMIT_MEMLOCK if pinning for a GPU is, or may be, charged to it."""
    gpus, limit = facts.gpus, facts.memory.memlock
    if gpus.count.value == 0 or limit.value is None or limit.value >= UNLIMITED:
        return share, ""
    if gpus.pin_charged.value is False:
        draft.show(
            "memlock_bytes", limit.value, limit.source, f"no limit here: {gpus.pin_charged.source}"
        )
        return share, ""
    note = (
        f"; cut to RLIMIT_MEMLOCK {size_text(limit.value)}, to which pinning for the GPU may be "
        "charged: raise it (docker run --ulimit memlock=-1, systemd LimitMEMLOCK=infinity)"
    )
    return (share, "") if limit.value >= share else (limit.value, note)


def _show_chunk(facts: Facts, load: Load, draft: Plan) -> None:
    """Show the chunk's size. Engines that share must agree on it, so no plan sets it."""
    block = facts.engine.block_tokens.value or 16
    tokens = -(-CHUNK_TOKENS // block) * block
    draft.show(
        "chunk_bytes",
        tokens * load.kv_bytes,
        f"{tokens} tokens, block of {block} ({facts.engine.block_tokens.source})",
        "the same with and without a plan, so that engines of one model share",
    )


class _Usable(NamedTuple):
    """Folder that can be used. ``speed`` in bytes a second, from ``source``."""

    speed: float
    size: int
    disk: Disk
    source: str
    row: Row


def _plan_disk(facts: Facts, load: Load, ram_bytes: int, draft: Plan) -> None:
    usable: list[_Usable] = []
    for disk in facts.disks:
        reason, size, speed = _disk_verdict(disk, load, gentle=facts.trace is None)
        if reason:
            draft.leave_out(f"nvme {disk.path}", reason)
        elif (row := break_even_row(f"nvme {disk.path}", speed, load, draft)) is not None:
            usable.append(_Usable(speed.value or 0.0, size, disk, speed.source, row))
    if not facts.disks:
        draft.leave_out("nvme", "no candidate path was given or found; give one with --path")
    if not usable:
        return None
    chosen = _beside(usable, draft)
    disks, path = [one.disk for one in chosen], ",".join(one.disk.path for one in chosen)
    size, reason = _recorded_disk(facts.trace, sum(one.size for one in chosen), ram_bytes, load)
    if not size:
        return draft.leave_out(f"nvme {path}", reason)
    _show_path(chosen, path, load, draft)
    reserve = size_text(sum(map(_disk_reserve, disks)))
    held = (
        f"holds {size // load.kv_bytes:,} tokens; {reserve} kept free; "
        f"{size_text(size // load.ranks)} a rank"
    )
    if facts.trace is None and not all(disk.own.value for disk in disks):
        held += _HALF
    draft.set("nvme_bytes", size, disks[0].free.source, held + reason)
    if (facts.engine.engines.value or 1) > 1:
        draft.warnings.append(
            f"{facts.engine.engines.value} engines share {path}: give each a folder below it"
        )
    return None


def _beside(usable: list[_Usable], draft: Plan) -> list[_Usable]:
    """Choose the best folder, and those on other local disks that make one tier faster with it."""
    best, *others = sorted(usable, key=_worth, reverse=True)
    chosen = [best]
    for other in others:
        disk, path, local = other.disk, best.disk.path, best.disk.device.value in LOCAL_DISKS
        if not local or disk.device.value not in LOCAL_DISKS:
            better = (
                "has chunks from before" if best.disk.own.value else "is faster or larger than this"
            )
            reason = f"one path is used: {path} {better}"
        elif disk.system:
            reason = f"the system's own files lie there, and {path} does without it"
        elif disk.block and disk.block in {one.disk.block for one in chosen}:
            reason = f"it lies on a disk that is used already ({disk.block})"
        elif _worth(other)[0] * _SLOWER_FACTOR < best.speed:
            reason = f"{rate_text(other.speed)} beside {rate_text(best.speed)} of {path}: too slow"
        else:
            chosen.append(other)
            continue
        draft.leave_out(f"nvme {disk.path}", f"{reason} ({size_text(other.size)})")
    return sorted(chosen, key=lambda one: one.disk.path)


def _show_path(chosen: list[_Usable], path: str, load: Load, draft: Plan) -> None:
    each = [
        f"{one.disk.device.value or 'unknown device'}, {rate_text(one.speed)} ({one.source})"
        for one in chosen
    ]
    for one, words in zip(chosen, each, strict=True):
        if one.disk.filesystem.value == "overlay":
            draft.warnings.append(
                f"{one.disk.path} is a container's overlay: its disk is not visible; mount a "
                "volume instead"
            )
        draft.warnings += [f"{words}, if it is needed no more" for words in one.disk.left]
        if len(chosen) > 1:
            source = one.disk.device.source
            draft.show("nvme_disk", one.disk.path, source, f"{size_text(one.size)}; {words}")
    if len(chosen) == 1:
        draft.derived.append(chosen[0].row)
        reason = each[0]
    else:
        whole = known(sum(one.speed for one in chosen), f"{len(chosen)} disks together")
        pays("nvme", whole, load, draft)
        reason = f"{len(chosen)} disks, {rate_text(whole.value or 0.0)} together"
    draft.set("nvme_path", path, chosen[0].disk.device.source, reason)


def _worth(usable: _Usable) -> tuple[float, int]:
    """Rank a folder. Speeds are measured anew at each start, and a start in another folder would be
    cold: one with chunks stays until another is clearly faster."""
    warm = _WARM_FACTOR if usable.disk.own.value else 1
    return usable.speed * warm, usable.size


def _recorded_disk(
    trace: SizingTrace | None, most: int, ram_bytes: int, load: Load
) -> tuple[int, str]:
    """Return the bytes that the trace needs below a RAM tier, and why. What is in RAM is in NVMe
    too, so that the larger of them decides what both hit."""
    if trace is None:
        return most, ""
    kv = load.kv_bytes
    size = trace.enough(kv, most, ram_bytes)
    if not size:
        return 0, (
            f"within a point of the knee above RAM it adds less than a point to the "
            f"{trace.percent(kv, ram_bytes)} that RAM hits: {trace.why(kv, ram_bytes)}"
        )
    knee = trace.knee(kv, ram_bytes)
    return _sized(trace, min(_at_least(size, load), most), most, knee, load)


def _disk_reserve(disk: Disk) -> int:
    """Return the room to keep free: full disks are slow, and others write logs there."""
    return max((disk.total.value or disk.free.value or 0) // 10, 2 * GIB)


def _disk_verdict(disk: Disk, load: Load, *, gentle: bool) -> tuple[str, int, Fact[float]]:
    """Return why the disk is not used, or "", bytes for one store, and read speed. ``gentle``: at
    most half of the free room is taken, or what an earlier run has taken."""
    kind, name = disk.device.value, disk.filesystem.value or "unknown"
    speed = or_assumed(
        disk.read_speed, _ASSUMED_READ.get(kind or "", 0.2e9), kind or "an unknown device"
    )
    own = disk.own.value or 0
    room = (disk.free.value or 0) + own
    size = max(0, room - _disk_reserve(disk)) // load.stores
    kept = own // load.stores
    if gentle:
        size = min(size, max(kept, room // 2 // load.stores))
    size = kept if kept <= size < kept * 5 // 4 else size - size % MIB  # a resize costs a warm tier
    network = name in NETWORK_FILESYSTEMS or name.startswith("fuse")
    reason = ""
    if disk.writable.value is False:
        reason = f"not writable ({disk.writable.source})"
    elif name in RAM_FILESYSTEMS:
        reason = f"{name} is RAM: its bytes would be counted twice"
    elif network and disk.read_speed.value is None:
        reason = f"{name} is a network file system: used only when its speed is measured"
    elif disk.o_direct.value is False:
        reason = (
            f"no O_DIRECT ({disk.o_direct.source}): the page cache would take RAM a second time"
        )
    elif disk.free.value is None:
        reason = f"free space is unknown ({disk.free.source})"
    elif short := load.too_small(size):
        reason = (
            f"{short} ({size_text(disk.free.value)} free, {size_text(_disk_reserve(disk))} of "
            f"it kept free{''.join(f'; {each}' for each in disk.left)})"
        )
    return reason, size, speed


def _show_worth(facts: Facts, load: Load, ram_bytes: int, draft: Plan) -> None:
    own = facts.engine.kv_cache_tokens
    weights, gpus = facts.model.weight_bytes.value, facts.gpus
    memory = (facts.memory.total if gpus.shared.value is not None else gpus.bytes_each).value
    if own.value is None and weights and memory and gpus.count.value:
        tokens = breakeven.gpu_kv_bytes(load.ranks, memory, weights) // load.kv_bytes
        own = known(tokens, f"{load.ranks} x {size_text(memory)} less weights")
    if own.value is None:
        return
    reason = "smaller working sets fit in the engine's own KV cache"
    draft.show("ram_useful_from_tokens", own.value, own.source, reason)
    least = ram_bytes // load.kv_bytes
    draft.show(
        "nvme_useful_from_tokens", least, "ram_bytes", "smaller working sets fit in the RAM tier"
    )
    if least < own.value:
        draft.warnings.append(
            "the RAM tier is smaller than the engine's own KV cache: expect few hits from it alone"
        )


def below_hicache(ranks: int, *, has_disk: bool) -> tuple[int | None, str]:
    """Return the RAM of a server that is SGLang's HiCache's storage, or None for all, and why."""
    both, only = (
        "SGLang's own RAM (L2) holds the same pages",
        "--hicache-host-memory-mode buffer_only",
    )
    if not has_disk:
        return None, f"{both}, and no NVMe is below it: give {only}, or nvme_path"
    size = GIB * max(2, ranks)
    return size, f"{size_text(size)} as a bounce for NVMe, because {both}; with {only}: ram_bytes"


def _show_hicache(load: Load, ram_bytes: int, draft: Plan) -> None:
    source = "nvme_path" if "nvme_path" in draft.values() else "ram_bytes"
    size, why = below_hicache(load.ranks, has_disk=source == "nvme_path")
    draft.show("sglang_ram_bytes", min(ram_bytes, size or ram_bytes), source, why)


# ---- one memory for CPU and GPU ------------------------------------------------------------------
# A RAM tier takes from the engine's KV cache: it gets only the slots that loads need, and what is
# kept for long is the disk's.

_LESS = "--gpu-memory-utilization"
_SHARED_PARTS = 8
"""Parts of the memory, of which the tier takes one at most, unless one long context needs more."""


def _slots_for_loads(facts: Facts, load: Load) -> int:
    """Return the bytes of RAM that loads need: a hit is promised when all of it is in RAM, and
    requests that wait claim half of RAM at most."""
    one = load.long_tokens * load.kv_bytes
    wanted = max(2 * one, load.longest * load.kv_bytes)
    total = facts.memory.total.value
    return max(one, min(wanted, total // _SHARED_PARTS // load.stores)) if total else 2 * one


def _copies_to_come(facts: Facts) -> int:
    started = bool(facts.engine.started.value)
    if facts.gpus.shared.value is not None:
        return 0 if started else 1
    return 1 if started and facts.gpus.count.value == 0 else 2


def _show_shared(facts: Facts, ram_bytes: int, load: Load, draft: Plan) -> None:
    """Explain shared memory, vLLM's share of it beside the tier, and where chunks stay."""
    name, total = facts.gpus.shared, facts.memory.total.value
    if name.value is None:
        return
    reason = (
        "CPU and GPU share one memory: RAM keeps the slots that loads need, the disk the chunks"
    )
    draft.show("unified_memory", name.value, name.source, reason)
    if total and ram_bytes and not facts.engine.started.value:
        share = breakeven.GPU_MEMORY_PART - ram_bytes * load.stores / total
        what = f"vLLM's {_LESS}: its usual {breakeven.GPU_MEMORY_PART} less the RAM tier"
        draft.show(
            "gpu_memory_utilization", int(share * 100) / 100, facts.memory.total.source, what
        )
    if ram_bytes and not any(row.key == "nvme_path" for row in draft.settings):
        draft.warnings.append(
            "CPU and GPU share one memory and there is no disk tier: what leaves the RAM tier's "
            "slots is lost. Give a disk with --path"
        )
    if not ram_bytes:
        draft.warnings.append(
            f"CPU and GPU share one memory, and the engine has it: a lower {_LESS} leaves room for "
            "the slots that loads need"
        )
