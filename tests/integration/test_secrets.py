"""No secret in an error, a log line, a name or a file: every kind is planted in a whole run of
every command that has it, rightly and wrongly, and then looked for in all that was said and
written."""

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.config.load import ENCRYPTION_KEY
from kvtier.core.errors import ConfigError
from kvtier.tiers.sealed import key_name
from tests.child_process import wait_for
from tests.command import bare
from tests.redis_server import RedisServer, make_certificate
from tests.server_process import LAYOUT, SLOT, ServerProcess, attached, run, save, short_folder
from tests.stores import assembled

KEY = random.Random(7).randbytes(32)
TOKEN, ADMIN_TOKEN, PASSWORD = "engines-token-4f1c9d", "admins-token-77aa01", "redis-pass-0be5d3"
OTHERS = "lmcaches-pass-c0ffee", "lmcaches-token-abad1d"


@pytest.fixture
def place():
    with short_folder() as folder:
        yield folder


def secret_file(folder, name, text):
    path = folder / name
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


def secrets_in(folder):
    """Everything that must not be told, those in files line by line."""
    lines = [
        line
        for file in folder.glob("*.key")
        for line in file.read_text().splitlines()
        if "---" not in line
    ]
    return [KEY.hex(), TOKEN, ADMIN_TOKEN, PASSWORD, *OTHERS, *lines]


def said(words, env):
    command = [sys.executable, "-m", "kvtier", *words]
    with tempfile.NamedTemporaryFile("r") as log:
        with subprocess.Popen(
            command, env=bare() | dict(env), stdout=log.fileno(), stderr=subprocess.STDOUT
        ) as process:

            def done():
                return process.poll() is not None or "serving at" in Path(log.name).read_text()

            wait_for(done, f"{words} ends or serves")
            process.terminate()
        out = Path(log.name).read_text()
    assert out.strip(), f"{words} says nothing"
    return out


def commands(folder):
    return [
        ("config",),
        ("config", "--yaml"),
        ("plan",),
        ("doctor", "--no-engine"),
        ("serve", "--listen", f"unix://{folder}/run/kvtier.sock"),
    ]


def settings(folder, redis_url):
    """Every key that holds or names a secret."""
    certificate, key = make_certificate(folder, "server")
    return {
        "KVTIER_RAM_BYTES": "1MiB",
        "KVTIER_NVME_PATH": str(folder / "nvme"),
        "KVTIER_NVME_BYTES": "1MiB",
        "KVTIER_REDIS_URL": redis_url,
        "KVTIER_REDIS_BYTES": "1MiB",
        "KVTIER_ENCRYPTION_KEY_FILE": secret_file(folder, "encryption", KEY.hex()),
        "KVTIER_SERVER_TOKEN_FILE": secret_file(folder, "token", TOKEN),
        "KVTIER_ADMIN_TOKEN_FILE": secret_file(folder, "admin", ADMIN_TOKEN),
        "KVTIER_SERVER_CERT": str(certificate),
        "KVTIER_SERVER_KEY": str(key),
        "KVTIER_ADMIN": f"http://127.0.0.1:{free_port()}",
        "KVTIER_LOG_LEVEL": "DEBUG",
    }


def tells(folder, env, *only):
    """Run the commands and look for every secret in what they say."""
    for words in commands(folder):
        if not only or words[0] in only:
            text = said(words, env)
            assert [one for one in secrets_in(folder) if one in text] == [], (
                f"{words} tells a secret: {text[:2000]}"
            )


@pytest.mark.redis
def test_a_whole_run_with_every_secret_tells_none(place):
    with RedisServer(requirepass=PASSWORD) as redis:
        url = redis.url.replace("redis://", f"redis://default:{PASSWORD}@")
        env = settings(place, url)
        tells(place, env)
        assert "***" in said(("config",), env)
        keys: dict[str, Any] = {
            name.removeprefix("KVTIER_").lower(): value for name, value in env.items()
        }
        server = ServerProcess(place, patient=True, **keys)
        with server, attached(replace(server.access(), token=TOKEN.encode())) as client:
            save(client, run(1, 2))
            wait_for(lambda: client.stats().get("redis_held") == 2, "spilled, with the password")
            assert server.stop() == 0
        assert [one for one in secrets_in(place) if one in server.said()] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"KVTIER_REDIS_URL": f"redis://default:{PASSWORD}@127.0.0.1:1/0"},
        {"KVTIER_REDIS_URL": f"redis://127.0.0.1:1/0?password={PASSWORD}"},
        {"KVTIER_REDIS_URL": f"redis:/default:{PASSWORD}@127.0.0.1:1/0"},
        {"KVTIER_ENCRYPTION_KEY_FILE": KEY.hex()},
        {"KVTIER_SERVER_TOKEN_FILE": TOKEN},
        {"KVTIER_ADMIN_TOKEN_FILE": ADMIN_TOKEN},
        {"KVTIER_ENCRYPTION_KEY_FILE": "", ENCRYPTION_KEY: KEY.hex() + "0"},
        {ENCRYPTION_KEY: KEY.hex()},
        {"KVTIER_ENCRYPTION_KEYS": KEY.hex()},
        {"KVTIER_REDIS_PASSWORD": PASSWORD},
    ],
    ids=", ".join,
)
def test_what_is_given_wrongly_is_not_told_either(place, wrong):
    env = settings(place, "redis://127.0.0.1:1/0") | wrong
    only = ("config", "doctor", "serve") if "KVTIER_REDIS_URL" in wrong else ("config", "serve")
    tells(place, {name: value for name, value in env.items() if value}, *only)


@pytest.mark.parametrize("name", ["encryption", "token", "admin", "server.key"])
@pytest.mark.parametrize("harm", ["open to all", "cut", "lengthened"])
def test_a_secret_file_that_is_refused_is_not_told(place, name, harm):
    env = settings(place, "redis://127.0.0.1:1/0")
    del env["KVTIER_REDIS_URL"], env["KVTIER_REDIS_BYTES"]
    file = place / name
    text = file.read_text()
    if harm == "open to all":
        file.chmod(0o644)
    else:
        file.write_text(text[: len(text) // 2] if harm == "cut" else text + text)
    known = secrets_in(place)
    words = ("serve", "--listen", f"tcp://127.0.0.1:{free_port()}")
    told = said(words, env)
    assert "kvtier: " in told or harm == "lengthened", told
    parts = {
        one[at : at + 8]
        for one in [*known, *text.split()]
        for at in range(0, max(1, len(one) - 8), 4)
    }
    assert [one for one in parts if len(one) == 8 and "----" not in one and one in told] == []


@pytest.mark.parametrize("way", ["file", "environment"])
def test_lmcaches_secrets_are_not_told(place, way):
    password, token = OTHERS
    extra = {"redis_password": password, "peer": {"token": token}, "sentinels": [password]}
    env: dict[str, str] = {"LMCACHE_REMOTE_URL": f"redis://u:{password}@127.0.0.1:1"}
    if way == "file":
        file = place / "lmcache.yaml"
        file.write_text(
            f"remote_url: redis://u:{password}@127.0.0.1:1\nextra_config: {json.dumps(extra)}\n"
        )
        env["LMCACHE_CONFIG_FILE"] = str(file)
    else:
        env |= {"KVTIER_REPLACE_LMCACHE": "1", "LMCACHE_EXTRA_CONFIG": json.dumps(extra)}
        env |= {"LMCACHE_INTERNAL_API_KEY": token, "LMCACHE_CONTROLLER_PASSWORD": password}
    tells(place, env, "config", "doctor")
    told = said(("config",), env | {"LMCACHE_EXTRA_CONFIG": json.dumps(extra)[:-1]})
    assert "expected a JSON object" in told
    assert not any(one in told for one in OTHERS)


def test_a_tls_key_that_every_user_may_read_is_refused(place):
    certificate, key = make_certificate(place, "server")
    key.chmod(0o644)
    files: dict[str, Any] = {
        "server_ca": str(certificate),
        "server_cert": str(certificate),
        "server_key": str(key),
    }
    server = ServerProcess(place, f"tcp://127.0.0.1:{free_port()}", **files)
    assert "server_key" in server.refusal()
    with pytest.raises(ConfigError, match=r"server_key=.* is open to every user: chmod 600"):
        assembled(LAYOUT, ram_bytes=8 * SLOT, server="tcp://127.0.0.1:1", **files)


def windows(secret, size=4):
    return [secret[at : at + size] for at in range(len(secret) - size + 1)]


def test_the_name_of_a_key_is_the_digest_that_chunks_of_earlier_versions_carry():
    assert key_name(bytes(range(32))).hex() == "f2417028aa8a8d36"


@pytest.mark.redis
def test_no_four_bytes_of_the_key_are_in_what_is_written_named_or_logged(place):
    with RedisServer() as redis:
        where: dict[str, Any] = {
            "nvme_path": place / "nvme",
            "nvme_bytes": 1 << 20,
            "log_level": "DEBUG",
        }
        where |= {"redis_url": redis.url, "redis_bytes": 1 << 20, "encryption_key": KEY.hex()}
        server = ServerProcess(place, patient=True, **where)
        with server, redis.admin() as behind, attached(server.access()) as client:
            save(client, run(1, 4))
            wait_for(
                lambda: client.stats().get("redis_held") == client.stats().get("nvme_held") == 4,
                "spilled",
            )
            names = [bytes(name) for name in behind.scan_iter()]
            chunks = [name for name in names if not name.endswith(b"{signed}")]
            values = [bytes(behind.get(name) or b"") for name in chunks]
            assert server.stop() == 0
        folder = place / "nvme" / f"slots-{SLOT}"
        plain = b"".join([*names, (folder / "index.kvtier").read_bytes(), server.log.read_bytes()])
        tails = [
            value[:200] + value[SLOT:] for value in values
        ]  # headers, and what lies behind the ciphertext
        sealed = b"".join([*values, (folder / "slots.kvtier").read_bytes()])
        assert len(sealed) > 8 * SLOT
        told = [*windows(KEY), *(part.hex().encode() for part in windows(KEY))]
        assert [part for part in told if part in plain] == []
        assert [part for part in windows(KEY) for tail in tails if part in tail] == []
        assert [part for part in windows(KEY, 8) if part in sealed] == []


def test_an_embedded_store_says_which_key_and_not_the_key(place, caplog):
    caplog.set_level("DEBUG")
    disk = {"nvme_path": str(place / "nvme"), "nvme_bytes": 1 << 20}
    key = secret_file(place, "encryption", KEY.hex())
    assert assembled(LAYOUT, ram_bytes=8 * SLOT, encryption_key_file=key, **disk).close()
    assert key_name(KEY).hex() in caplog.text
    assert not any(part.hex() in caplog.text for part in windows(KEY))
