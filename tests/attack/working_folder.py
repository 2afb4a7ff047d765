"""A folder in which an operator types a command, and into which somebody else may write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.attack.stage import Stage
from tests.child_process import DEADLINE_S

COMMAND = (sys.executable, "-P", "-m", "kvtier")
"""As the script ``kvtier``: a Python whose own path is without the working folder."""
_MODULES = (
    *("json", "sitecustomize", "usercustomize", "vllm", "subprocess", "runpy", "numpy", "msgspec"),
    *("torch", "obstore", "aiohttp", "yaml", "resource"),
)
_PACKAGES = ("encodings", "kvtier", "multiprocessing")
_PROGRAMS = ("nvidia-smi", "python", "redis-server")
_CODE = "import sys\nopen({mark!r}, 'a').write(f'{{__name__}} {{sys.argv}} {{sys.flags}}\\n')\n"


class Trap:
    """A folder of a stranger's, whose files say that they ran."""

    def __init__(self, place: Path) -> None:
        self.folder, self._mark = place / "strangers", place / "ran"
        code = _CODE.format(mark=str(self._mark))
        for name in _PACKAGES:
            (self.folder / name).mkdir(parents=True)
            for file in ("__init__.py", "__main__.py"):
                (self.folder / name / file).write_text(code)
        for name in _MODULES:
            (self.folder / f"{name}.py").write_text(code)
        for name in _PROGRAMS:
            program = self.folder / name
            program.write_text(f"#!/bin/sh\necho {name} >> {self._mark}\n")
            program.chmod(0o755)

    @property
    def ran(self) -> str:
        """What of it ran since the last look."""
        said = self._mark.read_text() if self._mark.exists() else ""
        self._mark.unlink(missing_ok=True)
        return said

    def typed(
        self, *words: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command of kvtier's, in that folder."""
        return subprocess.run(
            [*COMMAND, *words],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )


def planted_code(stage: Stage) -> None:
    """Commands are typed in the folder while a server runs."""
    server, trap = stage.serve(), Trap(stage.folder)
    with stage.attack(server):
        for words in (("doctor", "--no-engine"), ("plan",)):
            trap.typed(*words)
            stage.must(not trap.ran, f"kvtier {' '.join(words)} ran a stranger's code")
