"""An HTTP server that answers as a vLLM engine does, as far as routers and clients can tell. It
computes nothing."""

import contextlib
import json
import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

from tests.http_server import Exchange, Quiet


@dataclass
class StubEngine:
    """``port`` is the one it has for its life. ``asked``: bodies of completions, with the request's
    headers."""

    port: int = 0
    asked: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    dies: bool = False
    """The next completion is read and never answered: the connection ends."""
    _server: Quiet | None = None
    _connections: set[socket.socket] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def start(self):
        engine = self

        class Answers(Exchange):
            def setup(self):
                super().setup()
                with engine._lock:
                    engine._connections.add(self.connection)

            def do(self):
                if self.command == "GET":
                    self.get()
                else:
                    self.post()

            def get(self):
                if self.path == "/metrics":
                    kind = "text/plain; version=0.0.4"
                    return self.answer(b"vllm:num_requests_running 0\n", Content_Type=kind)
                return self.tell({"data": [{"id": "stub"}]})

            def post(self):
                body = json.loads(self.body)
                if self.path == "/tokenize":
                    return self.tell({"tokens": [*map(ord, body["prompt"])]})
                if engine.dies:
                    engine.dies, self.close_connection = False, True
                    return None
                with engine._lock:
                    engine.asked.append(
                        (body, {name.lower(): value for name, value in self.headers.items()})
                    )
                tokens = [len(engine.asked)] * body["max_tokens"]
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
                events = [
                    {"choices": [{"token_ids": tokens, "text": "ba" * len(tokens)}]},
                    {"usage": usage, "choices": []},
                ]
                lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                data = "".join([*lines, "data: [DONE]\n\n"]).encode()
                return self.answer(data, Content_Type="text/event-stream")

            def tell(self, told):
                self.answer(json.dumps(told).encode(), Content_Type="application/json")

        self._server = Quiet(("127.0.0.1", self.port), Answers)
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
