"""TLS between engines and servers, and what goes beyond loopback without it: nothing, unless
somebody gave that up."""

import logging
import socket
import ssl
from typing import Any

import pytest

from kvtier.assemble import assemble
from kvtier.client.client import Client
from kvtier.client.connect import Address, ServerAccess, client_tls, enter, hello
from kvtier.client.remote_tier import RemoteTier
from kvtier.config.load import load as load_config
from kvtier.core.chunk import ChunkKey
from kvtier.core.errors import ConfigError, TierError
from kvtier.started import Started
from kvtier.store.store import Store
from kvtier.testing import content
from tests.attack.clients import greetings, of_size
from tests.certificates import make_certificates
from tests.integration.test_server_tcp import TOKEN, cache_server, port, relay, token_file
from tests.rogue_server import greet, rogue
from tests.server_process import (
    LAYOUT,
    SLOT,
    ServerProcess,
    at_rest,
    attached,
    load,
    run,
    save,
    serving,
    short_folder,
)
from tests.stores import assembled

__all__ = ["port", "token_file"]
pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_server(port, certificates):
    """Demands certificates that ``ours`` signed, of clients too."""
    with serving(
        f"tcp://127.0.0.1:{port}",
        ram_bytes="2MiB",
        server_cert=certificates / "ours-host.pem",
        server_key=certificates / "ours-host.key",
        server_ca=certificates / "ours.pem",
    ) as server:
        yield server


def context(certificates, trusted, shown):
    files = (
        [str(certificates / f"{shown}-host.{kind}") for kind in ("pem", "key")]
        if shown
        else [None, None]
    )
    return client_tls(str(certificates / f"{trusted}.pem"), *files)


@pytest.mark.usefixtures("tls_server")
def test_a_client_is_counted_by_its_certificate(port, certificates):
    access = cache_server(port, tls=context(certificates, "ours", "ours"))
    sizes = [4096 * number for number in range(1, 17)]
    assert greetings(access, sizes) == sizes
    with pytest.raises(TierError, match=r"this client \(certificate [0-9a-f]{16}\) has asked"):
        enter(of_size(access, 4096 * 17))


def test_one_line_of_configuration_makes_the_client_that_the_address_needs(
    port, certificates, token_file
):
    files = {"server_cert": "ours-host.pem", "server_key": "ours-host.key", "server_ca": "ours.pem"}
    keys: dict[str, Any] = {key: str(certificates / file) for key, file in files.items()}
    keys["server_token_file"] = str(token_file)
    with serving(f"tcp://127.0.0.1:{port}", **keys) as server:
        near = assembled(LAYOUT, server=str(server.address), **keys)
        far_away = assembled(LAYOUT, server=f"tcp://localhost:{port}", ram_bytes=8 * SLOT, **keys)
        assert isinstance(near, Client) and isinstance(far_away, Store)
        save(near, run(1, 4))
        assert load(far_away, run(1, 4)) == ["remote"] * 4
        near.close()
        far_away.close()


@pytest.mark.parametrize(
    ("trusted", "shown"), [("theirs", "ours"), ("ours", "theirs"), ("ours", None)]
)
def test_a_wrong_certificate_of_either_side_is_refused(
    tls_server, port, certificates, trusted, shown
):
    tier = RemoteTier(cache_server(port, tls=context(certificates, trusted, shown)))
    key = run(1, 1)[0]
    assert not tier.write(key, content(key, SLOT))
    assert tier.counts["failed"] > 0
    with attached(tls_server.access()) as near:
        assert near.lookup([key]).progress == (0, 0)
        at_rest(near)
    tier.close()


def test_a_client_without_tls_gets_nothing_from_a_server_with_it(tls_server, port):
    tier = RemoteTier(cache_server(port))
    assert tier.find([ChunkKey(bytes(40))]) == 0
    assert tier.counts["failed"] > 0
    tier.close()


def test_a_server_that_asks_clients_for_nothing_is_refused(port, certificates):
    keys: dict[str, Any] = {
        "server_cert": certificates / "ours-host.pem",
        "server_key": certificates / "ours-host.key",
    }
    with short_folder() as folder:
        assert (
            "would serve KV to anybody"
            in ServerProcess(folder, f"tcp://127.0.0.1:{port}", **keys).refusal()
        )


def test_a_certificate_for_another_host_is_refused(port, certificates, token_file):
    with serving(
        f"tcp://127.0.0.1:{port}",
        server_cert=certificates / "ours-other.pem",
        server_key=certificates / "ours-other.key",
        server_token_file=token_file,
    ):
        tier = RemoteTier(cache_server(port, token=TOKEN, tls=context(certificates, "ours", None)))
        assert tier.counts["failed"] == 1
        assert tier.find([ChunkKey(bytes(40))]) == 0
        tier.close()


def test_a_server_speaks_no_older_tls(tls_server, port, certificates):
    old = context(certificates, "ours", "ours")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", port)) as sock,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        old.wrap_socket(sock, server_hostname="localhost").recv(1)


def test_an_engine_speaks_no_older_tls(certificates):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(certificates / "ours-host.pem", certificates / "ours-host.key")
    with rogue(None, lambda client: greet(old.wrap_socket(client, server_side=True))) as address:
        tier = RemoteTier(cache_server(address.port, tls=context(certificates, "ours", None)))
        assert tier.counts["failed"] == 1
        tier.close()


def test_who_sees_the_network_reads_nothing_of_a_chunk(tls_server, port, certificates):
    seen = bytearray()

    def record(data, _):
        seen.extend(data)
        return data

    with relay(port, record) as tapped:
        tier = RemoteTier(cache_server(tapped, tls=context(certificates, "ours", "ours")))
        key = run(1, 1)[0]
        assert tier.write(key, content(key, SLOT))
        assert tier.read(key, memoryview(bytearray(SLOT)))
        tier.close()
    assert len(seen) > 2 * SLOT
    assert content(key, SLOT)[100:116].tobytes() not in seen


EVERYWHERE = "0.0.0.0"  # noqa: S104 - as an address to listen at; who connects to it means this host


def test_a_server_with_a_token_alone_does_not_listen_beyond_loopback(port, token_file):
    with short_folder() as folder:
        refusal = ServerProcess(
            folder, f"tcp://{EVERYWHERE}:{port}", server_token_file=token_file
        ).refusal()
    assert "is beyond this host and not encrypted" in refusal
    assert "set server_cert and server_key for TLS" in refusal


@pytest.mark.parametrize(
    "host", [EVERYWHERE, "192.0.2.7", "[2001:db8::1]", "cache.example", "127.0.0.1.example"]
)
def test_an_engine_with_a_token_alone_does_not_connect_beyond_loopback(host, token_file):
    config = load_config(
        env={"KVTIER_SERVER": f"tcp://{host}:7", "KVTIER_SERVER_TOKEN_FILE": str(token_file)}
    )
    with pytest.raises(
        ConfigError, match=r"not encrypted: .* set server_ca for TLS\. server_unencrypted=true"
    ):
        assemble(Started(config), LAYOUT)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "[::1]", "localhost"])
def test_on_loopback_a_token_alone_will_do(host):
    ServerAccess(
        Address.parse(f"tcp://{host}:7"), hello(LAYOUT.fingerprint, SLOT, stream=True), TOKEN
    )


def test_an_engine_without_a_token_sends_nothing_in_plain(token_file):
    config = load_config(
        env={"KVTIER_SERVER": f"tcp://{EVERYWHERE}:7", "KVTIER_SERVER_UNENCRYPTED": "true"}
    )
    with pytest.raises(
        ConfigError,
        match="set server_token_file, because server_unencrypted gives up encryption only",
    ):
        assemble(Started(config), LAYOUT)


def test_both_go_without_encryption_when_told_so_and_say_it_once(port, token_file, caplog):
    keys: dict[str, Any] = {"server_token_file": str(token_file), "server_unencrypted": True}
    warning = (
        f"tcp://{EVERYWHERE}:{port} is not encrypted (server_unencrypted): who sees the "
        "network between can read"
    )
    with serving(f"tcp://{EVERYWHERE}:{port}", **keys) as server, attached(server.access()) as near:
        far = f"tcp://{EVERYWHERE}:{port}"
        store = assembled(LAYOUT, server=far, ram_bytes=8 * SLOT, **keys)
        save(near, run(1, 4))
        assert load(store, run(1, 4)) == ["remote"] * 4
        store.close()
        assert server.said().count(warning) == 1
    assert [record.levelno for record in caplog.records if warning in record.getMessage()] == [
        logging.WARNING
    ]


def test_on_loopback_nothing_is_said_of_encryption(port, token_file):
    with serving(f"tcp://127.0.0.1:{port}", server_token_file=token_file) as server:
        assert "not encrypted" not in server.said()
