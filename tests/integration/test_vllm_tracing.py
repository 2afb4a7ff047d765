"""A real vLLM that is started with ``--otlp-traces-endpoint``: what a real receiver gets of
kvtier's lookups and loads, beside vLLM's own span of the request."""

import pytest

from kvtier.bench.model import make_model
from kvtier.connectors.vllm.extensions.hit_log import LOAD, LOOKUP
from tests.child_process import wait_for
from tests.integration.scenarios import document
from tests.integration.test_vllm import DOCUMENT_HIT
from tests.integration.test_vllm_http import Server
from tests.otlp_receiver import HTTP, PARENT, TRACE, TRACEPARENT, attributes, receiving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
VLLMS = "llm_request"


def test_a_request_is_one_trace_with_its_lookup_and_its_load(tmp_path, monkeypatch):
    for name, value in (HTTP | SOON).items():
        monkeypatch.setenv(name, value)
    model = make_model(tmp_path / "tiny", "tiny")
    with receiving() as received:
        server = Server(model, tmp_path, "--otlp-traces-endpoint", received.url)
        with server:
            server.complete(document(1), {"traceparent": TRACEPARENT})
            server.forget()
            server.complete(document(1), {"traceparent": TRACEPARENT})
            wait_for(lambda: len(received.named(VLLMS)) == 2, "vLLM's own spans")
            wait_for(lambda: len(received.named(LOOKUP)) == 2, "both lookups")
            wait_for(lambda: len(received.named(LOAD)) == 1, "the load")
    cold, warm = (attributes(span) for span in received.named(LOOKUP))
    assert (cold["kvtier.hit_tokens"], cold["kvtier.miss_reason"]) == (0, "cold")
    assert (warm["kvtier.hit_tokens"], warm["kvtier.tiers"]) == (DOCUMENT_HIT, ["ram"])
    (span,) = received.named(LOAD)
    load = attributes(span)
    assert load["kvtier.hit_tokens"] == DOCUMENT_HIT
    assert load["kvtier.tiers"] == ["ram"] and not load["kvtier.failed"]
    assert load["kvtier.bytes"] > 0 < load["kvtier.seconds"]
    own = received.named(VLLMS)[1]
    assert load["kvtier.request_id"].startswith(attributes(own)["gen_ai.request.id"])
    for one in (own, span, *received.named(LOOKUP)):
        assert (one.trace_id.hex(), one.parent_span_id.hex()) == (TRACE, PARENT)
