"""vLLM's own front end with an API key and the middleware for hints, in a process of its own and
without an engine: ``python -m tests.attack.front_end PORT``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from kvtier.bench.processes.servers import free_port
from tests.attack.admin_bodies import answered
from tests.child_process import ChildProcess

API_KEY = "key"
MIDDLEWARE = "kvtier.connectors.vllm.hints.Middleware"
_VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
_START_S = 180.0
"""For vLLM's imports."""


def front_end() -> Any:
    """vLLM's ASGI application, as ``vllm serve`` builds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        words = ["--api-key", API_KEY, "--middleware", MIDDLEWARE]
        given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        return build_app(given, ("generate",))


class FrontEnd(ChildProcess):
    """That process. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(folder / "front_end.log", start_s=_START_S)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.attack.front_end", str(self.port)]

    def answers(self) -> bool:
        try:
            return answered(self.url, _VERSION, 5.0) == 200
        except OSError:
            return False


def main() -> int:
    """See the module's text."""
    import uvicorn

    app = front_end()
    app.state.log_stats = False  # there is no engine to ask
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
