"""An HTTP server that answers as a vLLM engine does, as far as routers and clients can tell. It
computes nothing."""

import contextlib
import json
import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A router hangs up on health checks."""


@dataclass
class StubEngine:
    """``port`` is the one it has for its life. ``asked``: bodies of completions, with the request's
    headers."""

    port: int = 0
    asked: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    dies: bool = False
    """The next completion is read and never answered: the connection ends."""
    _server: ThreadingHTTPServer | None = None
    _connections: set[socket.socket] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def start(self):
        engine = self

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                with engine._lock:
                    engine._connections.add(self.connection)

            def do_GET(self):
                if self.path == "/metrics":
                    self._send(b"vllm:num_requests_running 0\n", "text/plain; version=0.0.4")
                    return
                self._send(json.dumps({"data": [{"id": "stub"}]}).encode(), "application/json")

            def do_POST(self):
                body = json.loads(self._body())
                if self.path == "/tokenize":
                    tokens = [*map(ord, body["prompt"])]
                    self._send(json.dumps({"tokens": tokens}).encode(), "application/json")
                    return
                if engine.dies:
                    engine.dies, self.close_connection = False, True
                    return
                with engine._lock:
                    engine.asked.append(
                        (body, {name.lower(): value for name, value in self.headers.items()})
                    )
                tokens = [len(engine.asked)] * body["max_tokens"]
                events = [
                    {"choices": [{"token_ids": tokens, "text": "ba" * len(tokens)}]},
                    {
                        "usage": {
                            "prompt_tokens": len(body["prompt"]),
                            "completion_tokens": len(tokens),
                        },
                        "choices": [],
                    },
                ]
                lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                self._send("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

            def _body(self):
                if "Content-Length" in self.headers:
                    return self.rfile.read(int(self.headers["Content-Length"]))
                pieces = list[bytes]()
                while length := int(self.rfile.readline(), 16):
                    pieces.append(self.rfile.read(length))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)

            def _send(self, content, kind):
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words):
                """Not on the test's output."""

        self._server = _Quiet(("127.0.0.1", self.port), Answers)
        self.port = self._server.server_port
        Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def stop(self):
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._connections.clear()


@contextmanager
def stub_engines(count):
    engines = [StubEngine() for _ in range(count)]
    try:
        for engine in engines:
            engine.start()
        yield engines
    finally:
        for engine in engines:
            engine.stop()
