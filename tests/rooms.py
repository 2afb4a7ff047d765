"""The tests of one room of the product, which need seconds: ``make test-room ROOM=store``.

``python -m tests.rooms ROOM`` prints them for pytest's command line. A room has the folder of its
name in ``tests/unit``, and what :data:`BESIDE` names.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
BESIDE = {
    "admin": ("fault/test_hostile_doors.py",),
    "autoconfig": ("property/test_plan_limits.py",),
    "client": ("fault/test_slow_servers.py",),
    "config": ("property/test_config_fuzz.py",),
    "connectors": ("property/test_load_in_parts.py",),
    "eviction": ("property/test_store_machine.py",),
    "extensions/mooncake": ("contract/test_mooncake_tier.py", "fault/test_mooncake_faults.py"),
    "extensions/objects": ("contract/test_object_tier.py", "fault/test_object_faults.py"),
    "protocol": ("property/test_wire_fuzz.py",),
    "record": ("property/test_record_rotation.py",),
    "server": (*("property/test_shared_quotas.py", "fault/test_server_faults.py"),
        *("fault/test_floods.py", "fault/test_hostile_clients.py", "fault/test_attacks.py")),
    "store": ("property/test_store_machine.py", "property/test_shared_quotas.py"),
    "tiers": ("contract/test_check_tier.py", "contract/test_sealed_tier.py"),
    "tiers/nvme": (*("contract/test_nvme_tier.py", "property/test_stored_forms.py"),
        *("fault/test_nvme_disks.py", "fault/test_nvme_faults.py", "fault/test_nvme_folder.py")),
    "tiers/redis": (*("contract/test_redis_tier.py", "property/test_redis_wire.py"),
        *("fault/test_redis_faults.py", "fault/test_hostile_redis.py"),
        "fault/test_redis_credentials.py"),
}  # fmt: skip
"""Files outside of ``tests/unit`` that test one room more than others."""
FOLDERS = ("contract", "fault", "packaging", "property")
"""Rooms of their own: tests of several rooms."""


def rooms():
    """Room -> the files and folders of its tests."""
    unit = TESTS / "unit"
    found = {path.parent for path in unit.rglob("test_*.py")}
    found |= {folder.parent for folder in found} - {unit, TESTS}
    own = {str(folder.relative_to(unit)): [folder] for folder in found}
    every = {name: own.get(name, []) for name in own.keys() | BESIDE.keys()}
    for name, files in BESIDE.items():
        every[name] = every[name] + [TESTS / file for file in files]
    return dict(sorted((every | {name: [TESTS / name] for name in FOLDERS}).items()))


def main(argv):
    every, room = rooms(), argv[0].strip("/") if argv else ""
    if room not in every:
        given = f"ROOM={room} is no room" if room else "ROOM is not given"
        return f"make test-room: {given}; expected one of {', '.join(every)}"
    sys.stdout.writelines(f"{path.relative_to(TESTS.parent)}\n" for path in every[room])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
