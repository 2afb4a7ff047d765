"""What an operator writes as ``redis_url``: what is understood, and that no password is shown."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {"urls": (*PYTEST, "tests/unit/config/test_redis_url.py", "tests/unit/config/test_config.py")},
    (
        Mutant(
            "tiers/redis/url.py",
            "        user = f\"{self.login.user or ''}:***@\" if",
            "        user = f\"{self.login.user or ''}:{self.login.password}@\" if",
            "commands and logs show the password",
        ),
        Mutant(
            "tiers/redis/url.py",
            "    password: str | None = field(default=None, repr=False)",
            "    password: str | None = None",
            "an object in a traceback shows the password",
        ),
        Mutant(
            "tiers/redis/url.py",
            '            shown.append("sentinel_password=***")',
            '            shown.append(f"sentinel_password={self.sentinel_login.password}")',
            "commands and logs show the Sentinels' password",
        ),
        Mutant(
            "tiers/redis/url.py",
            '        return f"{scheme.lower()}://***" if known else "***"\n',
            "        return text\n",
            "a URL with a typing error is shown with its password",
        ),
        Mutant(
            "tiers/redis/url.py",
            '    if "@" in tail:',
            "    if False:",
            "a login with a slash is taken for a path, and shown",
        ),
        Mutant(
            "tiers/redis/url.py",
            '    if _UNPRINTABLE.search(rest) or "#" in rest:',
            "    if _UNPRINTABLE.search(rest):",
            "the rest of a URL behind a # is dropped in silence",
        ),
        Mutant(
            "tiers/redis/url.py",
            '    userinfo, at, hosts = authority.rpartition("@")',
            '    userinfo, at, hosts = authority.partition("@")',
            "a password with an @ sends the login to another host",
        ),
        Mutant(
            "tiers/redis/url.py",
            'known[1] in ("rediss", "valkeys")',
            'known[1] in ("rediss",)',
            "valkeys:// goes in plain text",
        ),
        Mutant(
            "tiers/redis/url.py",
            'options.get("ssl_cert_reqs", "required")',
            'options.get("ssl_cert_reqs", "none")',
            "certificates are not verified",
        ),
        Mutant(
            "tiers/redis/url.py",
            'verify == "required", _FLAGS[host])',
            'verify == "required", not _FLAGS[host])',
            "host names of certificates are not verified",
        ),
        Mutant(
            "tiers/redis/url.py",
            '    if len(seeds) > 1 and kind == "server":',
            "    if False:",
            "of several hosts of redis:// all but one are dropped in silence",
        ),
        Mutant(
            "tiers/redis/url.py",
            '    if kind == "cluster" and number:',
            "    if False:",
            "a database number of a cluster is dropped in silence",
        ),
        Mutant(
            "tiers/redis/url.py",
            "        if name not in _OPTIONS:",
            "        if False:",
            "an option that nobody knows is dropped in silence",
        ),
        Mutant(
            "tiers/redis/url.py",
            "    if user is not None and password is None:",
            "    if False:",
            "a user without a password is dropped in silence",
        ),
        Mutant(
            "tiers/redis/url.py",
            '    if re.search(r"%(?![0-9A-Fa-f]{2})", text):',
            "    if False:",
            "a password with a percent sign may be changed in silence",
        ),
        Mutant(
            "tiers/redis/url.py",
            '    default = SENTINEL_PORT if kind == "sentinel" else PORT',
            "    default = PORT",
            "Sentinels are asked on Redis's port",
        ),
        Mutant(
            "config/load.py",
            "        shown = rules.masked(text)",
            "        shown = text",
            "the error about a URL shows its password",
        ),
        Mutant(
            "config/load.py",
            '    if KEYS[key].unit == "url":',
            '    if KEYS[key].unit == "url" and not str(given).startswith("redis"):',
            "a URL that is none is found when the first engine attaches",
        ),
        Mutant(
            "autoconfig/explain.py",
            "        return str(masked(value))",
            "        return value",
            "kvtier plan shows the password",
        ),
    ),
)
