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
            "versions._is_before",
            "numbers < other",
            "numbers <= other",
            "the vLLM of LMI v27 is refused",
        ),
        Mutant(
            "versions._is_before",
            "len(numbers) == 2 and numbers < other",
            "numbers < other",
            "a vLLM that does not know its version is refused",
        ),
        Mutant(
            "versions.limits",
            "not hasattr(base, hook)",
            "False",
            "what a vLLM never calls is not told",
        ),
        Mutant(
            "versions.workers_tell_first",
            "_is_before(version, ASKS_SCHEDULER)",
            "False",
            "LMI's metrics have nothing of kvtier's",
        ),
        Mutant(
            "KVTierConnector.get_kv_connector_stats",
            "counts or opens",
            "counts",
            "LMI's metrics have nothing of kvtier's: a worker never begins",
        ),
        Mutant(
            "vllm.__getattr__",
            "versions.require()",
            "",
            "a vLLM that is too old dies of an import",
        ),
        Mutant(
            "KVTierConnector.__init__",
            "role == KVConnectorRole.SCHEDULER",
            "True",
            "every process of an engine says the same",
        ),
        Mutant(
            "installed.verdict",
            "versions.verdict(found.vllm)",
            "f'vLLM {found.vllm}'",
            "launch starts an engine that is too old",
        ),
        Mutant(
            "vllm_command.transfer",
            "value(arguments, _OWN_OFFLOADING) is not None",
            "False",
            "vLLM's own offloading silently replaces kvtier",
        ),
        Mutant(
            "vllm_command.value",
            "None if flag == '--config' else _in_file(arguments, flag)",
            "None",
            "vLLM's own offloading in a file silently replaces kvtier",
        ),
        Mutant(
            "launch.run",
            "refuse_expandable_segments(command.arguments, env)",
            "",
            "an allocator that vLLM refuses is told a minute into the start",
        ),
        Mutant(
            "lmi.beside_auto",
            "named is None and lmcaches and (not Path(lmcaches).is_file())",
            "named is None and lmcaches",
            "auto-config beside LMCACHE_CONFIG_FILE does not start, as it does in LMI",
        ),
        Mutant(
            "load.load",
            "given is not None and (not (beside and source.startswith(_SIZED_BY_HAND) and "
            "(key in _SIZES)))",
            "given is not None",
            "sizes by hand beat auto-config's",
        ),
        Mutant(
            "lmcache._text",
            "f'LMCache key {note.key}={shown(note.key, note.given)}'",
            "f'LMCache key {note.key}={note.given}'",
            "a password beside the URL is logged",
        ),
        Mutant(
            "lmcache.remarked",
            "logging.WARNING if note.lost else logging.INFO",
            "logging.INFO",
            "a remote tier that is not served is not a warning",
        ),
        Mutant(
            "lmcache._remote_url",
            "',' in hosts and '+' not in ours",
            "False",
            "several hosts are taken for one address of Redis, and the start fails",
        ),
    ),
)
