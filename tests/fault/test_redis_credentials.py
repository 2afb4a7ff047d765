"""Logins of a credential provider on a real redis-server: tokens that expire, a provider that
fails, hangs or gives anything, and none of it in a log."""

import logging
import re
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis.credentials import UsernamePasswordCredentialProvider

from kvtier.assemble import assemble_store
from kvtier.config.load import load
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError, TierError
from kvtier.started import Started
from kvtier.tiers.redis.connections import provided_logins
from kvtier.tiers.redis.parts import RedisSection, away
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier
from tests.child_process import DEADLINE_S, wait_for
from tests.clock import Clock
from tests.conftest import ROOT
from tests.redis_server import FORM, RedisServer, impatient
from tests.tier_chunks import CHUNK_BYTES, KEYS, chunk, holds

pytestmark = pytest.mark.redis
PLACE = "acme_redis.provider"


class Tokens:
    """A provider, and who decides which of its tokens are good."""

    def __init__(self, admin):
        self._admin, self.asked, self._number = admin, 0, 0
        self.given: Any = None
        """What it gives next, instead of the token of now."""
        self.expire()

    def expire(self):
        """As a managed Redis does: another token is good, and connections of the old one end."""
        self._number += 1
        self.token = f"s3cr3t-{self._number}"
        for command in (
            f"ACL SETUSER app reset on >{self.token} ~* &* +@all",
            "CLIENT KILL USER app",
        ):
            self._admin.execute_command(*command.split())

    def get_credentials(self):
        self.asked += 1
        given, self.given = self.given, None
        return given() if callable(given) else given or ("app", self.token)


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server, server.admin() as admin:
        admin.execute_command(*["ACL", "SETUSER", "root", "on", "nopass", "~*", "&*", "+@all"])
        admin.execute_command(*["ACL", "SETUSER", "default", "off"])
        yield server


@pytest.fixture
def tokens(server, monkeypatch):
    with Redis.from_url(f"unix://root:-@{server.path}") as admin:
        tokens = Tokens(admin)
        monkeypatch.setitem(sys.modules, "acme_redis", SimpleNamespace(provider=tokens))
        provided_logins.cache_clear()
        yield tokens


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tier(server, tokens, clock):
    servers = RedisServers(server.url, credential_provider=PLACE, timeout_s=DEADLINE_S)
    tier = RedisTier(servers, FORM, 64 * FORM.room(CHUNK_BYTES), CHUNK_BYTES, clock=clock)
    yield tier
    tier.close()


def test_a_token_that_expires_costs_nothing(tier, tokens, caplog):
    caplog.set_level(logging.DEBUG)
    for index in range(3):
        assert tier.write(KEYS[index], chunk(KEYS[index]))
        asked = tokens.asked
        tokens.expire()
        assert holds(tier, KEYS[index]) and tokens.asked == asked + 1
    assert not tier.open_breakers and "s3cr3t" not in caplog.text


def test_a_store_logs_in_by_the_keys_of_the_page(server, tokens, monkeypatch):
    page = (ROOT / "deploy/CONFIGURATION.md").read_text(encoding="utf-8")
    assert "| `redis.credential_provider` | `KVTIER_REDIS_CREDENTIAL_PROVIDER` | none |" in page
    layout = ChunkLayout(bytes(32), 1, 1, (CHUNK_BYTES,))
    monkeypatch.setenv("KVTIER_RAM_BYTES", f"{4 * layout.slot_bytes}B")
    monkeypatch.setenv("KVTIER_REDIS_URL", server.url)
    monkeypatch.setenv("KVTIER_REDIS_BYTES", "16MiB")
    monkeypatch.setenv("KVTIER_REDIS_CREDENTIAL_PROVIDER", PLACE)
    keys = layout.keys([7, 8])
    for token, key in zip(("first", "next"), keys, strict=True):
        store = assemble_store(Started(load()), layout)
        assert tokens.asked, token
        with store.save([key]) as lease:
            lease.commit()
        wait_for(partial(_has_stored_one, store), f"{token} token")
        assert store.close()
        tokens.expire()


def _has_stored_one(store):
    return store.stats()["redis_stored"] == 1


def test_a_stale_token_in_the_providers_hands_is_asked_for_again(tier, tokens):
    stale = tokens.token
    tokens.expire()
    tokens.given, asked = ("app", stale), tokens.asked
    assert tier.write(KEYS[0], chunk(KEYS[0])) and tokens.asked == asked + 2


def test_a_provider_that_hangs_costs_a_calls_time(tier, tokens, clock):
    hanging = threading.Event()

    def late():
        hanging.wait(DEADLINE_S)
        return "app", tokens.token

    tokens.expire()
    tokens.given, asked = late, tokens.asked
    with impatient(tier._servers, 0.1):
        assert [tier.write(KEYS[0], chunk(KEYS[0])) for _ in range(2)] == [False, False]
    assert tokens.asked == asked + 1
    hanging.set()
    clock.now += 100
    assert tier.write(KEYS[0], chunk(KEYS[0])) and tokens.asked == asked + 1, (
        "the late answer serves"
    )


def _raises():
    raise OSError("s3cr3t of a metadata service")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (_raises, "cannot be reached: redis_credential_provider failed: OSError;"),
        (lambda: "a text", "gave neither"),
        (lambda: ("app", b"bytes"), "gave neither"),
        (lambda: ("app", "wrong"), "login refused .*; correct what redis_credential_provider"),
    ],
)
def test_what_no_login_can_be_made_of_is_told_without_it(server, tokens, given, words):
    tokens.get_credentials = given
    try:
        said = away(RedisSection(url=server.url, credential_provider=PLACE, bytes_=1 << 24))
    except TierError as error:
        said = str(error)
    assert re.search(words, said) and "s3cr3t" not in said, said


def test_redis_pys_own_provider_will_do(server, tokens):
    sys.modules["acme_redis"].provider = UsernamePasswordCredentialProvider("app", tokens.token)  # type: ignore[attr-defined]
    assert away(RedisSection(url=server.url, credential_provider=PLACE, bytes_=1 << 24)) == ""


@pytest.mark.parametrize("place", ["acme_redis.absent", "no_such_module.x", "sys.path"])
def test_a_path_that_leads_to_none_is_refused(tokens, place):
    with pytest.raises(ConfigError, match=f"redis_credential_provider='{place}' cannot be used"):
        RedisServers("redis://h", credential_provider=place)


def test_a_password_in_the_url_as_well_is_refused(tokens):
    with pytest.raises(ConfigError, match="have a password each"):
        RedisServers("redis://:x@h", credential_provider=PLACE)
