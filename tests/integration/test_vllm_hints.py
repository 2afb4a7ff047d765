"""A real vLLM server with the middleware: what a client says in its own words arrives in the
scheduler, and a client that says something odd is served like any other."""

import json
from pathlib import Path

import pytest

from kvtier.bench.model import make_model
from kvtier.bench.traces.mooncake import lines_of
from tests.child_process import wait_for
from tests.integration.http_engine import body_of, complete
from tests.integration.scenarios import document
from tests.integration.test_vllm import CHUNK
from tests.integration.test_vllm_http import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("hints")
    model = make_model(folder / "tiny", "tiny")
    middleware = ("--middleware", "kvtier.connectors.vllm.hints.Middleware")
    server = Server(model, folder, *middleware, record=str(folder / "record"))
    with server:
        yield server


def hints(server, kind):
    return server.metric("vllm:kvtier_hints_total", kind=kind)


def test_hints_arrive_and_bad_ones_fail_nothing(server):
    body = body_of(document(1))
    complete(server.base_url, body, X_Session_ID="one")
    assert [hints(server, kind) for kind in ("over", "keep", "priority", "bad")] == [0, 0, 0, 0]
    said = {"prompt_cache_options": {"ttl": "30m"}, "nvext": {"agent_hints": {"priority": 3}}}
    complete(server.base_url, body | said, X_Session_ID="one", X_Dynamo_Session_Final="true")
    complete(server.base_url, body_of(document(2)))  # numbers are told with the steps of an engine
    wait_for(
        lambda: [hints(server, kind) for kind in ("over", "keep", "priority")] == [1, 1, 1],
        "counted",
    )
    odd = {"prompt_cache_options": "for ever", "nvext": [1], "kv_hints": {"actions": [{}]}}
    complete(server.base_url, body | odd, X_Dynamo_Session_Final="perhaps")
    complete(server.base_url, body_of(document(2)))
    wait_for(lambda: hints(server, "bad") == 4, "counted")
    complete(server.base_url, body | {"kv_transfer_params": {"kvtier.over": True}})
    complete(server.base_url, body_of(document(2)))
    wait_for(lambda: hints(server, "over") == 2, "without the middleware's help")


def test_an_engine_records_prompts_once_and_hints_after_them(server):
    record = str(server.folder / "record")
    before = len(list(lines_of(record)))
    body = body_of(document(11))
    for _ in range(2):
        complete(server.base_url, body, X_Session_ID="two")
    complete(server.base_url, body, X_Session_ID="two", X_Dynamo_Session_Final="true")
    complete(
        server.base_url, body_of(document(2))
    )  # the engine tells of the last request's end with a step
    wait_for(lambda: len(list(lines_of(record))) == before + 5, "recorded")
    lines = [json.loads(line) for line in lines_of(record)][before:]
    prompts = [line for line in lines if "about" not in line]
    (hint,) = (line for line in lines if "about" in line)
    tokens = len(body["prompt"])
    ids = prompts[0]["hash_ids"]
    assert [line["input_length"] for line in prompts[:3]] == [tokens] * 3
    assert [line["hash_ids"] for line in prompts[:3]] == [ids] * 3
    assert {line["stop"] for line in prompts[:3]} == {"length"}
    assert {line["output_length"] for line in prompts[:3]} == {body["max_tokens"]}
    assert len(ids) == tokens // CHUNK
    assert hint["over"] and hint["about"][: len(ids)] == ids
    assert {line.get("session") for line in [*prompts[:3], hint]} == {prompts[0]["session"]}
