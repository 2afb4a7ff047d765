"""The server's start: what it tries before it is ready, how much RAM it may take, what it says of
itself."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_START = "tests/integration/test_serve_start.py"

ROOM = Room(
    {
        "unit": (
            *PYTEST,
            "tests/unit/autoconfig/test_memory.py",
            "tests/unit/autoconfig/test_unified.py",
            "tests/unit/cli/test_serve.py",
            "tests/unit/autoconfig/test_start.py",
            "tests/integration/test_probe.py",
            "-k",
            "not model and not redis",
        ),
        "refusals": (*PYTEST, _START, "-k", "fails_the_start or divided or beyond_the_cgroup"),
        "ready": (
            *PYTEST,
            _START,
            "-k",
            "touched or with_a_size or systemd or configuration or trouble",
        ),
    },
    mutants=(
        # ---- RAM ---
        Mutant(
            "autoconfig/memory.py",
            "size + self.own <= number(self.limit)",
            "size <= number(self.limit)",
            "the kernel kills a process whose RAM tier leaves no room for itself",
        ),
        Mutant(
            "autoconfig/memory.py",
            "size + self.own <= number(self.limit)",
            "size + self.own > number(self.limit)",
            "what fits is refused, what does not is not",
        ),
        Mutant(
            "autoconfig/memory.py",
            "    limit = least(memory.cgroup_limit, memory.total)",
            "    limit = least(memory.total)",
            "the kernel kills what is beyond the cgroup's limit",
        ),
        Mutant(
            "autoconfig/memory.py",
            "    limit = least(memory.cgroup_limit, memory.total)",
            "    limit = least(memory.cgroup_limit)",
            "10 TiB of RAM are promised on any machine",
        ),
        Mutant(
            "autoconfig/memory.py",
            "    needed = ram_bytes + (ram_bytes // slot_bytes * INDEX_BYTES if slot_bytes else 0)",
            "    needed = ram_bytes",
            "the index of small chunks is not counted",
        ),
        Mutant(
            "autoconfig/memory.py",
            "    free = least(memory.available, memory.cgroup_headroom)",
            "    free = least(memory.available)",
            "nobody is warned of a cgroup that is nearly full",
        ),
        Mutant(
            "autoconfig/plan.py",
            "    if facts.gpus.shared.value is not None and share >",
            "    if False and share >",
            "half of the memory that CPU and GPU share is a RAM tier, and the host hangs",
        ),
        Mutant(
            "autoconfig/probe/unified.py",
            "    if len(found) != 1 or None in found:",
            "    if not found - {None}:",
            "a card beside an integrated GPU is planned for as if it had no memory",
        ),
        Mutant(
            "autoconfig/probe/memory.py",
            '_meminfo(root)["MemAvailable"] - free)',
            '_meminfo(root)["MemAvailable"])',
            "RAM is planned in the memory of a Grace superchip's GPU",
        ),
        Mutant(
            "autoconfig/probe/cgroup.py",
            'name != "memory.high"',
            "True",
            "a limit that only slows down refuses the start",
        ),
        Mutant(
            "autoconfig/probe/cgroup.py",
            "least(*killing) or none",
            "max(killing, key=lambda fact: fact.value or 0, default=none)",
            "the looser of two limits is believed",
        ),
        Mutant(
            "autoconfig/probe/cgroup.py",
            "        if level == mount:",
            "        if level == group:",
            "the limits of outer cgroups are not seen",
        ),
        Mutant(
            "assemble.py",
            "    require_ram(ram_bytes(config), layout.slot_bytes,",
            "    print(ram_bytes(config), layout.slot_bytes,",
            "an engine is killed for its RAM tier",
        ),
        Mutant(
            "cli/launch.py",
            "    if not (config.auto or config.server):\n",
            "    if config.server:\n",
            "launch starts an engine that will be killed",
        ),
        # ---- tiers ---
        Mutant(
            "checks.py",
            "    secret_key(config)\n    require_ram(",
            "    require_ram(",
            "a server without its encryption key is ready",
        ),
        Mutant(
            "checks.py",
            "    require_ram(ram_bytes(config)",
            "    str(ram_bytes(config)) or require_ram(0",
            "a server that will be killed is ready",
        ),
        Mutant(
            "tiers/nvme/parts.py",
            '        if finding.state == "fail":',
            '        if finding.state == "ok":',
            "a server whose disk has no room is ready, and one whose disk is fine is not",
        ),
        Mutant(
            "tiers/redis/parts.py",
            "        except FAULTS as error:",
            "        except Exception as error:",
            "a server with a Redis that can never be used is ready",
        ),
        Mutant(
            "tiers/redis/parts.py",
            "            share_of(servers.label, own.bytes_, ())\n",
            "",
            "a server that can make no store is ready",
        ),
        Mutant(
            "tiers/redis/parts.py",
            "        share_of(servers.label, own.bytes_, facts)\n",
            "",
            "a server without a size for Redis is ready",
        ),
        Mutant(
            "checks.py",
            "    return {name: away for name, look in tried.items() if (away := look())}",
            "    return {}",
            "Redis is never looked at",
        ),
        Mutant(
            "checks.py",
            "    require_whole_pages(config)\n",
            "",
            "sizes that nobody gave are divided when the first engine comes",
        ),
        # ---- ready ---
        Mutant(
            "cli/serve.py",
            "    for name, why in away.items():",
            "    for name, why in ():",
            "nobody is told that Redis is away",
        ),
        Mutant(
            "cli/serve.py",
            "            del server.trouble[name]",
            "            return",
            "trouble that is over is told for ever",
        ),
        Mutant(
            "cli/serve.py",
            '        if "admin" in config.sources or config.admin_engines is not None:\n'
            "            raise\n",
            "",
            "the admin interface that was asked for is silently not there",
        ),
        Mutant(
            "admin/status.py",
            "    return [*server.trouble.values(), *away,",
            "    return [*away,",
            "what the start found is told to nobody",
        ),
        Mutant(
            "server/server.py",
            "    await server.prepare(*sizes)\n",
            "",
            "the server is ready before its tiers are there",
        ),
        Mutant(
            "server/server.py",
            "            await "
            "asyncio.shield(asyncio.wrap_future(opened[slot_bytes].result().store.touched))\n",
            "",
            "the server is ready before its memory is there",
        ),
        Mutant(
            "server/server.py",
            "            await asyncio.wait({starting, telling}, "
            "return_when=asyncio.FIRST_COMPLETED)",
            "            await asyncio.wait({starting})",
            "a start that takes long cannot be stopped",
        ),
        # ---- what is said ---
        Mutant(
            "server/listening/systemd.py",
            '"\\0" + path[1:] if path.startswith("@") else path',
            "path",
            "a service manager with an abstract socket is told nothing",
        ),
        Mutant(
            "server/listening/systemd.py",
            "        self.watchdog_s = int(patience) / 1e6 if",
            "        self.watchdog_s = int(patience) / 1e3 if",
            "systemd kills a server that is well",
        ),
        Mutant(
            "server/listening/systemd.py",
            '            self.tell("STOPPING=1", "STATUS=stopping")',
            "            pass",
            "systemd takes a stop for a crash",
        ),
        Mutant(
            "autoconfig/explain.py",
            '        if source not in ("default", PLANNED) and value is not None:',
            "        if row is None and value is not None:",
            "the table shows the plan where the operator's word holds",
        ),
        Mutant(
            "autoconfig/explain.py",
            "        return str(masked(value))",
            "        return str(value)",
            "the table shows the password of Redis",
        ),
        Mutant(
            "autoconfig/explain.py",
            "{_shown(row)}",
            "{getattr(config, row.key)}",
            "the log shows the password of Redis",
        ),
    ),
)
