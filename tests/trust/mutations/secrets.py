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
            "secret_files.read_secret",
            "mode & stat.S_IRWXO",
            "mode & stat.S_IROTH",
            "a secret that every user may write is taken",
        ),
        Mutant(
            "secret_files.read_secret",
            "mode & stat.S_IRWXO",
            "mode & stat.S_IWOTH",
            "a secret that every user may read is taken",
        ),
        Mutant(
            "secret_files.read_secret",
            "mode & stat.S_IRWXO",
            "mode & (stat.S_IRWXO | stat.S_IRWXG)",
            "a secret that Kubernetes mounts for a group is refused",
        ),
        Mutant(
            "secret_files.read_secret",
            "file.read(_MOST_SECRET_BYTES).strip()",
            "file.read(_MOST_SECRET_BYTES)",
            "a line's end becomes part of the secret",
        ),
        Mutant(
            "assemble.secret_key",
            "f'{source} has {len(given)} characters that are not a key, expected 64 "
            "hexadecimal digits, such as from: openssl rand -hex 32'",
            "f'{source} has {given!r}, which is not a key, expected 64 hexadecimal digits, "
            "such as from: openssl rand -hex 32'",
            "a key with one digit too many is logged",
        ),
        Mutant(
            "serve._tls",
            "read_secret(config.server_key, 'server_key')",
            "",
            "a server takes a TLS key that every user may read",
        ),
        Mutant(
            "assemble.access",
            "read_secret(config.server_key, 'server_key')",
            "pass",
            "an engine takes a TLS key that every user may read",
        ),
        Mutant(
            "values.shown",
            "len(plain) >= _SHORTEST_SECRET",
            "len(plain) >= 1000",
            "a token that was given in the place of its file is shown",
        ),
        Mutant(
            "values.shown",
            "not unit and _SECRET_NAME.search(name) is not None",
            "False",
            "LMCache's passwords are logged",
        ),
        Mutant(
            "values.shown",
            "Mapping | list",
            "list",
            "secrets inside of LMCache's settings are logged",
        ),
        Mutant(
            "values.shown",
            "len(plain) <= _LONGEST_SHOWN",
            "len(plain) <= 1 << 30",
            "a long value fills the log",
        ),
        Mutant(
            "lmcache._flatten",
            "f'extra_config: {error}; expected a JSON object such as {{}}'",
            "f'extra_config: {error} in {extra}; expected a JSON object such as {{}}'",
            "an error shows all of LMCache's extra settings",
        ),
        Mutant(
            "keys.describe",
            "masked(getattr(config, key.flat))",
            "getattr(config, key.flat)",
            "kvtier config prints passwords",
        ),
    ),
)
