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
            "tests/unit/autoconfig/test_server.py",
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
            "RamBudget.ever",
            "size + self.own",
            "size",
            "the kernel kills a process whose RAM tier leaves no room for itself",
        ),
        Mutant(
            "RamBudget.ever",
            "size + self.own <= number(self.limit)",
            "size + self.own > number(self.limit)",
            "what fits is refused, what does not is not",
        ),
        Mutant(
            "memory.ram_room",
            "least(memory.cgroup_limit, memory.total)",
            "least(memory.total)",
            "the kernel kills what is beyond the cgroup's limit",
        ),
        Mutant(
            "memory.ram_room",
            "least(memory.cgroup_limit, memory.total)",
            "least(memory.cgroup_limit)",
            "10 TiB of RAM are promised on any machine",
        ),
        Mutant(
            "memory.require_ram",
            "ram_bytes + (ram_bytes // slot_bytes * INDEX_BYTES if slot_bytes else 0)",
            "ram_bytes",
            "the index of small chunks is not counted",
        ),
        Mutant(
            "memory.ram_room",
            "least(memory.available, memory.cgroup_headroom)",
            "least(memory.available)",
            "nobody is warned of a cgroup that is nearly full",
        ),
        Mutant(
            "plan._plan_ram",
            "facts.gpus.shared.value is not None",
            "False",
            "half of the memory that CPU and GPU share is a RAM tier, and the host hangs",
        ),
        Mutant(
            "unified._amd",
            "len(found) != 1 or None in found",
            "not found - {None}",
            "a card beside an integrated GPU is planned for as if it had no memory",
        ),
        Mutant(
            "memory.probe_memory",
            "_meminfo(root)['MemAvailable'] - free",
            "_meminfo(root)['MemAvailable']",
            "RAM is planned in the memory of a Grace superchip's GPU",
        ),
        Mutant(
            "cgroup._limits",
            "name != 'memory.high'",
            "True",
            "a limit that only slows down refuses the start",
        ),
        Mutant(
            "cgroup.memory_limits",
            "least(*killing) or none",
            "max(killing, key=lambda fact: fact.value or 0, default=none)",
            "the looser of two limits is believed",
        ),
        Mutant(
            "cgroup._limits",
            "level == mount",
            "level == group",
            "the limits of outer cgroups are not seen",
        ),
        Mutant(
            "assemble.assemble_store",
            "require_ram(ram_bytes(config), layout.slot_bytes, source, lent=shared is not None)",
            "print(ram_bytes(config), layout.slot_bytes, source, lent=shared is not None)",
            "an engine is killed for its RAM tier",
        ),
        Mutant(
            "launch.tried",
            "not (config.auto or config.server)",
            "config.server",
            "launch starts an engine that will be killed",
        ),
        # ---- a server that sizes itself ---
        Mutant(
            "autoconfig.server.sized",
            "settled(config, plan)",
            "config",
            "the switch does nothing for a server",
        ),
        Mutant(
            "disks.reusable",
            "disk.own.value - (servers.value or 0)",
            "disk.own.value",
            "an engine counts a server's chunks, and a start reserves room that is not there",
        ),
        Mutant(
            "plan._worth",
            "_WARM if usable.disk.own.value else 1",
            "1",
            "a start chooses another folder, and is cold",
        ),
        # ---- tiers ---
        Mutant(
            "checks.try_everything",
            "secret_key(config)",
            "",
            "a server without its encryption key is ready",
        ),
        Mutant(
            "checks.try_everything",
            "require_ram(ram_bytes(config), source=config.source('ram_bytes'), lent=True)",
            "str(ram_bytes(config)) or require_ram(0, source=config.source('ram_bytes'), "
            "lent=True)",
            "a server that will be killed is ready",
        ),
        Mutant(
            "nvme.parts.away",
            "finding.state == 'fail'",
            "finding.state == 'ok'",
            "a server whose disk has no room is ready, and one whose disk is fine is not",
        ),
        Mutant(
            "redis.parts.away",
            "try:\n    ...\nexcept FAULTS as error:\n    ...",
            "try:\n    ...\nexcept Exception as error:\n    ...",
            "a server with a Redis that can never be used is ready",
        ),
        Mutant(
            "redis.parts.away",
            "share_of(servers.label, own.bytes_, facts)",
            "",
            "a server without a size for Redis is ready",
        ),
        Mutant(
            "checks._away",
            "{name: away for name, look in tried.items() if (away := look())}",
            "{}",
            "Redis is never looked at",
        ),
        Mutant(
            "checks.try_everything",
            "require_whole_pages(config)",
            "",
            "sizes that nobody gave are divided when the first engine comes",
        ),
        # ---- ready ---
        Mutant(
            "serve._beside",
            "away.items()",
            "()",
            "nobody is told that Redis is away",
        ),
        Mutant(
            "serve._look_again",
            "del server.trouble[name]",
            "return",
            "trouble that is over is told for ever",
        ),
        Mutant(
            "serve.admin_surface",
            "if 'admin' in config.sources or config.admin_engines is not None:\n    ...",
            "",
            "the admin interface that was asked for is silently not there",
        ),
        Mutant(
            "status.trouble",
            "[*server.trouble.values(), *away, *(text for text in lost if text)]",
            "[*away, *(text for text in lost if text)]",
            "what the start found is told to nobody",
        ),
        Mutant(
            "server._start",
            "await server.prepare(*sizes)",
            "",
            "the server is ready before its tiers are there",
        ),
        Mutant(
            "Server.prepare",
            "await asyncio.shield(asyncio.wrap_future(opened[slot_bytes].result().store.touched))",
            "",
            "the server is ready before its memory is there",
        ),
        Mutant(
            "server._until_told",
            "asyncio.wait({starting, telling}, return_when=asyncio.FIRST_COMPLETED)",
            "asyncio.wait({starting})",
            "a start that takes long cannot be stopped",
        ),
        # ---- what is said ---
        Mutant(
            "Notifier.__init__",
            "'\\x00' + path[1:] if path.startswith('@') else path",
            "path",
            "a service manager with an abstract socket is told nothing",
        ),
        Mutant(
            "Notifier.__init__",
            "int(patience) / 1000000.0",
            "int(patience) / 1000.0",
            "systemd kills a server that is well",
        ),
        Mutant(
            "Notifier.serving",
            "self.tell('STOPPING=1', 'STATUS=stopping')",
            "pass",
            "systemd takes a stop for a crash",
        ),
        Mutant(
            "explain._used",
            "source not in ('default', PLANNED)",
            "row is None",
            "the table shows the plan where the operator's word holds",
        ),
        Mutant(
            "explain.value_text",
            "masked(value)",
            "value",
            "the table shows the password of Redis",
        ),
        Mutant(
            "explain.settings_text",
            "f'{row.key}={_shown(row)} ({row.source})'",
            "f'{row.key}={getattr(config, row.key)} ({row.source})'",
            "the log shows the password of Redis",
        ),
    ),
)
