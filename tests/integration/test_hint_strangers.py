"""The middleware in vLLM's own front end with an API key: who has no key is refused as fast, and
with as little memory, as without the middleware, because his body is never read."""

import asyncio
from typing import Any

import pytest

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
