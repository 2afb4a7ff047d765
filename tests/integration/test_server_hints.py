"""Hints of engines on a server's host, as they leave the engine and arrive."""

from kvtier.core.lookup import Asker
from kvtier.eviction.hints import session_name
from tests.admin_server import administered
from tests.child_process import wait_for
from tests.server_process import at_rest, attached, run, save


def test_a_session_is_closed_over_http_for_its_tenant_and_salt_alone():
    with administered() as server, attached(server.access(namespace="tenant")) as client:
        ended, other = run(1, 10), run(2, 10)
        for keys, name in (
            (other, session_name(None, "mine")),
            (ended, session_name("salt", "mine")),
        ):
            client.load(keys, asker=Asker(name)).close()
            save(client, keys)
        wait_for(lambda: client.stats().get("followed_prompts", 0) == 2, "followed")
        asked = {"session": "mine", "salt": "salt", "over": True}
        assert server.ask("POST", "/v1/hint", asked | {"namespace": "nobody"}).body == {"told": 0}
        assert server.ask("POST", "/v1/hint", asked | {"namespace": "tenant"}).body == {"told": 1}
        wait_for(lambda: client.stats().get("hints_followed", 0) == 1, "followed")
        at_rest(client)  # a chunk that is being written keeps its slot
        assert save(client, run(3, 16)) == 16
        assert client.lookup(other).ready == 10, "it is the older one, and stays"
        assert client.lookup(ended).ready < 10
