"""The middleware in vLLM's own front end with an API key: who has no key is refused as fast, and
with as little memory, as without the middleware, because his body is never read. And what real
clients send, by the examples of deploy/HINTS.md."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm.hints import of_request
from kvtier.eviction.hints import Hint
from kvtier.extensions.hint_dialects.middleware import Middleware
from tests.child_process import DEADLINE_S, wait_for

pytestmark = pytest.mark.vllm
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def front_end():
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["--api-key", "key", "--middleware", "kvtier.connectors.vllm.hints.Middleware"]
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    return build_app(given, ("generate",))


def asked(front_end, body, *headers):
    """The status of the answer, and how many bytes of the body were read for it."""
    read, said = 0, list[Any]()

    async def receive():
        nonlocal read
        piece = body[read : read + (64 << 10)]
        read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": read < len(body)}

    async def send(message):
        said.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    asyncio.run(front_end(scope, receive, send))
    return said[0]["status"], read


def test_without_a_key_not_a_byte_of_a_body_is_read(front_end):
    assert asked(front_end, b'{"messages":[' + b"{}," * (5 << 20) + b"{}]}") == (401, 0)
    assert asked(front_end, b"{}", (b"authorization", b"Bearer other")) == (401, 0)


def test_with_the_key_the_body_is_read_and_is_vllms_to_judge(front_end):
    body = b'{"messages": 5}'
    assert asked(front_end, body, (b"authorization", b"Bearer key")) == (400, len(body))


HINTS = (Path(__file__).parents[2] / "deploy" / "HINTS.md").read_text()
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Bye."}}
    ],
}


class Behind:
    def __init__(self):
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(json.loads(body))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(ANSWER).encode()})

    def said(self):
        params = self.bodies[-1].get("kv_transfer_params")
        return of_request(SimpleNamespace(kv_transfer_params=params, cache_salt=None))


@pytest.fixture
def served():
    import uvicorn

    behind, listening = Behind(), socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Middleware(behind), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    wait_for(lambda: server.started, "listening")
    yield behind, f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(DEADLINE_S)


def test_the_openai_client(served):
    behind, url = served
    (example,) = re.findall(r"```python\n(from openai import[^`]*)```", HINTS)
    code = example.replace("http://localhost:8000", url)
    exec(compile(code, "HINTS.md", "exec"), {})  # noqa: S102
    assert behind.said().hint == Hint(over=True, keep_s=86_400.0)
    assert behind.said().session and "bad" not in behind.said().kinds
    assert behind.bodies[-1]["messages"], "the rest is as it was sent"


def test_curl(served):
    behind, url = served
    curl, bash = shutil.which("curl"), shutil.which("bash")
    if curl is None or bash is None:
        pytest.skip("there is no curl")
    (command,) = re.findall(r"```sh\n *(curl [^`]*X-Session-ID[^`]*)```", HINTS)
    command = command.replace("http://localhost:8000", url)
    done = subprocess.run(
        [bash, "-c", command], capture_output=True, timeout=DEADLINE_S, check=True
    )
    assert json.loads(done.stdout) == ANSWER
    assert behind.said().hint == Hint(over=True, keep_s=1800.0)
    assert behind.said().session and "bad" not in behind.said().kinds
