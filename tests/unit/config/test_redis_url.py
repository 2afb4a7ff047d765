"""redis_url: what is understood, what is refused with what words, and that no password is ever
shown."""

from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.autoconfig.explain import as_json, value_text
from kvtier.autoconfig.facts import GIB, Facts
from kvtier.autoconfig.plan import make_plan
from kvtier.config.keys import describe
from kvtier.config.load import load
from kvtier.config.values import masked
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.fact import known
from kvtier.tiers.redis.layout import Form
from kvtier.tiers.redis.parts import Redis, RedisSection, findings, probe
from kvtier.tiers.redis.servers import RedisServers
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.url import MOST_SEEDS, Login, Tls, parse
from kvtier.tiers.redis.url import masked as masked_url

ONE = (("h", 6379),)


@pytest.mark.parametrize(
    ("text", "kind", "seeds", "database"),
    [
        ("redis://h", "server", ONE, 0),
        ("redis://h/", "server", ONE, 0),
        ("REDIS://h:7/3", "server", (("h", 7),), 3),
        ("redis://h?db=3", "server", ONE, 3),
        ("valkey://h", "server", ONE, 0),
        ("redis://[::1]:7", "server", (("::1", 7),), 0),
        ("redis+cluster://h:1,h:2,other", "cluster", (("h", 1), ("h", 2), ("other", 6379)), 0),
        ("redis+cluster://h:1,h:1/0", "cluster", (("h", 1),), 0),
        ("valkey+cluster://h", "cluster", ONE, 0),
        ("redis+sentinel://h,o:9/main/2", "sentinel", (("h", 26379), ("o", 9)), 2),
        ("valkey+sentinel://h/main", "sentinel", (("h", 26379),), 0),
    ],
)
def test_what_is_understood(text, kind, seeds, database):
    url = parse(text)
    assert (url.kind, url.seeds, url.database, url.tls) == (kind, seeds, database, None)
    assert url.service == ("main" if kind == "sentinel" else "")


@pytest.mark.parametrize("scheme", ["rediss", "valkeys", "rediss+cluster", "valkeys+cluster"])
def test_tls_is_by_scheme_and_verifies(scheme):
    assert parse(f"{scheme}://h").tls == Tls()
    given_ = "?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem&ssl_check_hostname=false"
    assert parse(f"{scheme}://h{given_}").tls == Tls("/ca.pem", "/c.pem", "/k.pem", True, False)
    loose = parse(f"{scheme}://h?ssl_cert_reqs=none").tls
    assert loose is not None and not loose.verify


@pytest.mark.parametrize(
    ("text", "login"),
    [
        ("redis://u:p%40ss%2Fw@h", Login("u", "p@ss/w")),
        ("redis://:p@h", Login(None, "p")),
        ("redis://u:a:b@c@h", Login("u", "a:b@c")),
        ("redis://h?username=u&password=p%26q", Login("u", "p&q")),
        ("unix://u:p@/run/r.sock", Login("u", "p")),
        ("redis+sentinel://u:p@h,o/main", Login("u", "p")),
        ("redis+cluster://u:p@h,o", Login("u", "p")),
    ],
)
def test_who_logs_in(text, login):
    assert parse(text).login == login
    assert parse(text).sentinel_login == Login()


def test_sentinels_have_a_login_of_their_own():
    url = parse("redis+sentinel://:p@h/main?sentinel_username=s&sentinel_password=q")
    assert (url.login, url.sentinel_login) == (Login(None, "p"), Login("s", "q"))
    assert url.masked == "redis+sentinel://:***@h:26379/main/0?sentinel_password=***"


def test_a_socket_has_a_path_and_a_database():
    url = parse("unix:///run/my%20redis.sock?db=2")
    found = (url.path, url.database, url.seeds, url.label)
    assert found == ("/run/my redis.sock", 2, (), "/run/my redis.sock")


REFUSED = {
    "": "scheme is not one of redis",
    "h:6379": "scheme is not one of redis",
    "http://h": "scheme is not one of redis",
    "redis+unix://h": "scheme is not one of redis",
    "unix+cluster:///run/r.sock": "scheme is not one of redis",
    "redis://": "a host cannot be read",
    "redis://h:port": "port is not a number",
    "redis://h:0": "port is not a number",
    "redis://h:70000": "port is not a number",
    "redis://h h": "a space",
    "redis://h\n": "unprintable",
    "redis://h#0": "a #",
    "redis://h/zero": "database is not a number",
    "redis://h/1/2": "database is not a number",
    "redis://h/1?db=2": "database is given twice",
    "redis://h:1,h:2": r"several hosts; write redis\+cluster:// .* or redis\+sentinel://",
    "redis+cluster://h,": "a host cannot be read",
    "redis+cluster://h/3": "no database numbers",
    "redis+cluster://" + ",".join(f"h{n}" for n in range(MOST_SEEDS + 1)): "are enough",
    "redis+sentinel://h": "needs the service's name",
    "redis+sentinel://h/main/0/1": "needs the service's name",
    "redis+sentinel://h/ma*in": "needs the service's name",
    "redis://h?sentinel_password=x": r"for redis\+sentinel:// only",
    "redis://u@h": "a user without a password",
    "redis://u:@h": "a user without a password",
    "redis://h?username=u": "a user without a password",
    "redis://:p@h?password=q": "given twice",
    "redis://:p/q@h": "%2F",
    "redis://:p?q@h": "%3F",
    "redis://:p#q@h": "%23",
    "redis://:p%zz@h": "begins no escape",
    "redis://:p%ff@h": "no UTF-8",
    "redis://h?password=a&b": "%26",
    "redis://h?socket_timeout=100": "an option is not one of db",
    "redis://h?db=1&db=2": "given twice",
    "redis://h?db=": "is empty",
    "redis://h?ssl_ca_certs=/ca.pem": "for rediss://",
    "rediss://h?ssl_cert_reqs=maybe": "required or none",
    "rediss://h?ssl_check_hostname=maybe": "true or false",
    "rediss://h?ssl_keyfile=/k": "without ssl_certfile",
    "unix:///u:p@/run/r.sock": "an @ behind the host or the path",
    "unix://run/r.sock": "absolute path",
    "unix://": "absolute path",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_says_what_to_write(text):
    with pytest.raises(ConfigError, match=REFUSED[text]):
        parse(text)
    with pytest.raises(ConfigError, match=REFUSED[text]) as raised:
        load(env={"KVTIER_REDIS_URL": text or "x"})
    assert str(raised.value).startswith("redis_url='") and "KVTIER_REDIS_URL" in str(raised.value)
    assert str(raised.value).endswith("correct it or remove it")
    with pytest.raises(ConfigError, match="redis_url: "):
        RedisServers(text)


@pytest.mark.parametrize("given_", [6379, ["redis://h"], True])
def test_what_is_no_text_is_refused(given_):
    with pytest.raises(ConfigError, match="redis_url="):
        load(env={}, flags={"redis_url": given_})


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("redis://localhost", True),
        ("redis://u:p@127.0.0.1:1", True),
        ("redis://[::1]", True),
        ("unix:///r", True),
        ("redis://h", False),
        ("redis+cluster://h:1,127.0.0.1:2", True),
    ],
)
def test_whether_it_takes_this_host_s_memory(text, local):
    assert parse(text).local == local


def test_a_certificate_file_that_is_not_there_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="certificate files cannot be used: No such file"):
        RedisServers(f"rediss://h?ssl_ca_certs={tmp_path}/ca.pem")
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="certificate files cannot be used"):
        RedisServers(f"rediss://h?ssl_ca_certs={tmp_path}/ca.pem")


SECRET = "S3CRET"
ANY = st.text(max_size=6) | st.text("/?#@:%& \n[]+,=", max_size=6)
ROADS = [
    "redis://u:{}@127.0.0.1:1/0",
    "redis://:{}@127.0.0.1:1",
    "rediss://u:{}@127.0.0.1:1",
    "redis+cluster://u:{}@127.0.0.1:1,127.0.0.1:2",
    "redis+sentinel://u:{}@127.0.0.1:1/main",
    "redis+sentinel://127.0.0.1:1/main?sentinel_password={}",
    "redis://127.0.0.1:1/0?password={}",
    "unix:///nowhere?password={}",
    "valkey://u:{}@127.0.0.1:1",
    "redis:/u:{}@127.0.0.1:1",
    "u:{}@127.0.0.1:1",
    "http://u:{}@127.0.0.1:1",
    "redis-sentinel://u:{}@127.0.0.1:1",
    "redis://:{}",
]


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(ANY, ANY, st.booleans(), st.sampled_from(ROADS))
def test_no_road_shows_a_password(before, after, escaped, road):
    secret = before + SECRET + after
    url = road.format(quote(secret, safe="") if escaped else secret)
    said = [masked_url(url), str(masked(url)), value_text("redis_url", url)]
    for step in (read_configuration, look_at_it, open_tier):
        try:
            said += step(url)
        except (ConfigError, TierError) as error:
            said.append(str(error))
    assert SECRET not in "\n".join(said)


def read_configuration(url):
    config = load(env={"KVTIER_REDIS_URL": url})
    return [repr(parse(url)), *(str(row) for row in describe(config))]


def look_at_it(url):
    """As doctor and plan do."""
    if not hasattr(parse(url), "label"):
        return []
    said = [finding.seen + finding.do for finding in findings(RedisSection(url=url), None)]
    seen = probe(RedisSection(url=url))
    plan = make_plan(
        Facts(
            tiers={
                "redis": Redis(
                    url,
                    known(True, seen.reachable.source),
                    maxmemory=known(8 * GIB, "x"),
                    used=known(0, "x"),
                )
            }
        )
    )
    return [*said, str(seen.reachable), as_json(plan), *map(str, plan.left_out)]


def open_tier(url):
    servers = RedisServers(url, timeout_s=0.2)
    RedisTier(servers, Form("kvtier", b"x"), 1 << 20, 4096).close()
    return [servers.label]
