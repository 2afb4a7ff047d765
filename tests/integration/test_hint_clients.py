"""What real clients send goes through the middleware in a real HTTP server: the examples of
deploy/HINTS.md with the ``openai`` client and with curl, and a body as Anthropic's clients write
it."""

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
