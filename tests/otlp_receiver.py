"""A receiver of OpenTelemetry traces for tests: OTLP over HTTP, on loopback."""

from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.http_server import answered_by

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
"""What a client sends in the header ``traceparent``: its trace, and its own span there."""
HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


class Received:
    """``url``: what ``--otlp-traces-endpoint`` is given."""

    def __init__(self, url):
        self.url = url
        self._spans: list[Any] = []

    def add(self, body):
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self._spans += scope.spans

    def named(self, name):
        """Spans of this name, in the order in which they ended."""
        found = [span for span in self._spans if span.name == name]
        return sorted(found, key=lambda span: span.end_time_unix_nano)


def attributes(span):
    return {one.key: _plain(one.value) for one in span.attributes}


def _plain(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def receiving():
    def answer(exchange):
        received.add(exchange.body)
        answer = ExportTraceServiceResponse().SerializeToString()
        exchange.answer(answer, Content_Type="application/x-protobuf")

    with answered_by(answer) as url:
        received = Received(f"{url}/v1/traces")
        yield received
