"""Secrets: files that others could read, and what is shown of values."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_TESTS = "tests/integration/test_secrets.py"

ROOM = Room(
    {
        "permissions": (*PYTEST, "tests/integration/test_permissions.py", "-k", "secret"),
        "sealed": (*PYTEST, "tests/contract/test_sealed_tier.py", "-k", "key_file or variable"),
        "config": (*PYTEST, "tests/unit/config/test_config.py"),
        "files": (
            *PYTEST,
            _TESTS,
            "-k",
            ("without_end or tls_key or (refused_is_not_told and encryption)"),
        ),
        "lmcache": (*PYTEST, _TESTS, "-k", "lmcache"),
        "wrong": (*PYTEST, _TESTS, "-k", "wrongly"),
        "whole": (*PYTEST, _TESTS, "-k", "whole_run"),
    },
    mutants=(
        Mutant(
            "core/secret_files.py",
            "    if mode & stat.S_IRWXO:",
            "    if mode & stat.S_IROTH:",
            "a secret that every user may write is taken",
        ),
        Mutant(
            "core/secret_files.py",
            "    if mode & stat.S_IRWXO:",
            "    if mode & stat.S_IWOTH:",
            "a secret that every user may read is taken",
        ),
        Mutant(
            "core/secret_files.py",
            "    if mode & stat.S_IRWXO:",
            "    if mode & (stat.S_IRWXO | stat.S_IRWXG):",
            "a secret that Kubernetes mounts for a group is refused",
        ),
        Mutant(
            "core/secret_files.py",
            "            secret = file.read(_MOST_SECRET_BYTES).strip()",
            "            secret = file.read(_MOST_SECRET_BYTES)",
            "a line's end becomes part of the secret",
        ),
        Mutant(
            "assemble.py",
            "has {len(given)} characters that are not a key",
            "has {given!r}, which is not a key",
            "a key with one digit too many is logged",
        ),
        Mutant(
            "cli/serve.py",
            '    read_secret(config.server_key, "server_key")\n',
            "",
            "a server takes a TLS key that every user may read",
        ),
        Mutant(
            "assemble.py",
            '        read_secret(config.server_key, "server_key")\n',
            "        pass\n",
            "an engine takes a TLS key that every user may read",
        ),
        Mutant(
            "config/values.py",
            "        hidden = len(plain) >= _SHORTEST_SECRET and not",
            "        hidden = len(plain) >= 1000 and not",
            "a token that was given in the place of its file is shown",
        ),
        Mutant(
            "config/values.py",
            "        hidden = not unit and _SECRET_NAME.search(name) is not None",
            "        hidden = False",
            "LMCache's passwords are logged",
        ),
        Mutant(
            "config/values.py",
            "    if isinstance(value, Mapping | list | tuple | set):",
            "    if isinstance(value, list | tuple | set):",
            "secrets inside of LMCache's settings are logged",
        ),
        Mutant(
            "config/values.py",
            "    return text if len(plain) <= _LONGEST_SHOWN else",
            "    return text if len(plain) <= 1 << 30 else",
            "a long value fills the log",
        ),
        Mutant(
            "config/lmcache.py",
            '                f"extra_config: {error}; expected a JSON object such as {{}}"\n',
            '                f"extra_config: {error} in {extra}; expected a JSON object such '
            'as {{}}"\n',
            "an error shows all of LMCache's extra settings",
        ),
        Mutant(
            "config/keys.py",
            "            masked(getattr(config, key.flat)),\n",
            "            getattr(config, key.flat),\n",
            "kvtier config prints passwords",
        ),
    ),
)
