"""Which vLLM kvtier runs with, what LMCache's files become, and what takes the connector's
place."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "versions": (*PYTEST, "tests/unit/connectors/test_versions.py", "-k", "not itself"),
        "lmcache": (
            *PYTEST,
            "tests/unit/config/test_lmcache_files.py",
            "tests/unit/config/test_lmi.py",
            "tests/unit/config/test_config.py",
        ),
        "launch": (*PYTEST, "tests/unit/cli/test_launch.py"),
        "hooks": (*PYTEST, "tests/unit/connectors/test_vllm_hooks.py"),
    },
    mutants=(
        Mutant(
            "connectors/vllm/versions.py",
            "    return len(numbers) == 2 and numbers < other",
            "    return len(numbers) == 2 and numbers <= other",
            "the vLLM of LMI v27 is refused",
        ),
        Mutant(
            "connectors/vllm/versions.py",
            "    return len(numbers) == 2 and numbers < other",
            "    return numbers < other",
            "a vLLM that does not know its version is refused",
        ),
        Mutant(
            "connectors/vllm/versions.py",
            "        if not hasattr(base, hook)\n",
            "        if False\n",
            "what a vLLM never calls is not told",
        ),
        Mutant(
            "connectors/vllm/versions.py",
            "    return _is_before(version, ASKS_SCHEDULER)",
            "    return False",
            "LMI's metrics have nothing of kvtier's",
        ),
        Mutant(
            "connectors/vllm/connector.py",
            "        return TierStats(data=counts) if counts or opens else None",
            "        return TierStats(data=counts) if counts else None",
            "LMI's metrics have nothing of kvtier's: a worker never begins",
        ),
        Mutant(
            "connectors/vllm/__init__.py",
            "        versions.require()\n",
            "",
            "a vLLM that is too old dies of an import",
        ),
        Mutant(
            "connectors/vllm/connector.py",
            "if role == KVConnectorRole.SCHEDULER:  # only one process",
            "if True:  # only one process",
            "every process of an engine says the same",
        ),
        Mutant(
            "cli/checks/installed.py",
            "    return versions.verdict(found.vllm)",
            '    return f"vLLM {found.vllm}"',
            "launch starts an engine that is too old",
        ),
        Mutant(
            "cli/vllm_command.py",
            "    if value(arguments, _OWN_OFFLOADING) is not None:",
            "    if False:",
            "vLLM's own offloading silently replaces kvtier",
        ),
        Mutant(
            "cli/vllm_command.py",
            '    return None if flag == "--config" else _in_file(arguments, flag)',
            "    return None",
            "vLLM's own offloading in a file silently replaces kvtier",
        ),
        Mutant(
            "cli/launch.py",
            "    refuse_expandable_segments(command.arguments, env)\n",
            "",
            "an allocator that vLLM refuses is told a minute into the start",
        ),
        Mutant(
            "config/lmi.py",
            "    if named is None and lmcaches and not Path(lmcaches).is_file():",
            "    if named is None and lmcaches:",
            "auto-config beside LMCACHE_CONFIG_FILE does not start, as it does in LMI",
        ),
        Mutant(
            "config/load.py",
            (
                "        if given is not None and not (\n"
                "            beside and source.startswith(_SIZED_BY_HAND) and key in _SIZES\n"
                "        ):\n"
            ),
            "        if given is not None:\n",
            "sizes by hand beat auto-config's",
        ),
        Mutant(
            "config/lmcache.py",
            '    given = f"LMCache key {note.key}={shown(note.key, note.given)}"',
            '    given = f"LMCache key {note.key}={note.given}"',
            "a password beside the URL is logged",
        ),
        Mutant(
            "config/lmcache.py",
            "Remark(logging.WARNING if note.lost else logging.INFO,",
            "Remark(logging.INFO,",
            "a remote tier that is not served is not a warning",
        ),
        Mutant(
            "config/lmcache.py",
            '    if "," in hosts and "+" not in ours:',
            "    if False:",
            "several hosts are taken for one address of Redis, and the start fails",
        ),
    ),
)
