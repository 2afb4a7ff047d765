"""What an operator writes as ``redis_url``: what is understood, and that no password is shown."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {"urls": (*PYTEST, "tests/unit/config/test_redis_url.py", "tests/unit/config/test_config.py")},
    (
        Mutant(
            "RedisUrl.masked",
            "f\"{self.login.user or ''}:***@\"",
            "f\"{self.login.user or ''}:{self.login.password}@\"",
            "commands and logs show the password",
        ),
        Mutant(
            "url.Login",
            "field(default=None, repr=False)",
            "None",
            "an object in a traceback shows the password",
        ),
        Mutant(
            "RedisUrl._options",
            "shown.append('sentinel_password=***')",
            "shown.append(f'sentinel_password={self.sentinel_login.password}')",
            "commands and logs show the Sentinels' password",
        ),
        Mutant(
            "redis.url.masked",
            "f'{scheme.lower()}://***' if known else '***'",
            "text",
            "a URL with a typing error is shown with its password",
        ),
        Mutant(
            "redis.url.parse",
            "'@' in tail",
            "False",
            "a login with a slash is taken for a path, and shown",
        ),
        Mutant(
            "redis.url.parse",
            "_UNPRINTABLE.search(rest) or '#' in rest",
            "_UNPRINTABLE.search(rest)",
            "the rest of a URL behind a # is dropped in silence",
        ),
        Mutant(
            "redis.url.parse",
            "authority.rpartition",
            "authority.partition",
            "a password with an @ sends the login to another host",
        ),
        Mutant(
            "redis.url.parse",
            "('rediss', 'valkeys')",
            "('rediss',)",
            "valkeys:// goes in plain text",
        ),
        Mutant(
            "url._tls",
            "options.get('ssl_cert_reqs', 'required')",
            "options.get('ssl_cert_reqs', 'none')",
            "certificates are not verified",
        ),
        Mutant(
            "url._tls",
            "_FLAGS[host]",
            "not _FLAGS[host]",
            "host names of certificates are not verified",
        ),
        Mutant(
            "url._seeds",
            "len(seeds) > 1 and kind == 'server'",
            "False",
            "of several hosts of redis:// all but one are dropped in silence",
        ),
        Mutant(
            "url._path",
            "kind == 'cluster' and number",
            "False",
            "a database number of a cluster is dropped in silence",
        ),
        Mutant(
            "url._options",
            "name not in _OPTIONS",
            "False",
            "an option that nobody knows is dropped in silence",
        ),
        Mutant(
            "url._pair",
            "user is not None and password is None",
            "False",
            "a user without a password is dropped in silence",
        ),
        Mutant(
            "url._decoded",
            "re.search('%(?![0-9A-Fa-f]{2})', text)",
            "False",
            "a password with a percent sign may be changed in silence",
        ),
        Mutant(
            "url._seeds",
            "SENTINEL_PORT if kind == 'sentinel' else PORT",
            "PORT",
            "Sentinels are asked on Redis's port",
        ),
        Mutant(
            "load._url",
            "rules.masked(text)",
            "text",
            "the error about a URL shows its password",
        ),
        Mutant(
            "load._parse",
            "KEYS[key].unit == 'url'",
            "KEYS[key].unit == 'url' and (not str(given).startswith('redis'))",
            "a URL that is none is found when the first engine attaches",
        ),
        Mutant(
            "explain.value_text",
            "str(masked(value))",
            "value",
            "kvtier plan shows the password",
        ),
    ),
)
