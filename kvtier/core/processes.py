"""The environment of this process, and every process that kvtier starts or becomes. No other file
reads the one or starts the other.

Python puts the working folder first into the path of ``python -m`` and ``python -c``, and an empty
or relative entry of ``PYTHONPATH`` means it too. Whoever may write that folder would have his code
run by an operator's ``kvtier doctor``. So no child of kvtier's imports, finds a program or loads a
library from it, and neither do the processes that a child starts. An absolute ``PYTHONPATH`` stays:
that is the operator's own environment, and where he may have kvtier or vLLM.

Each caller says which environment its child gets. Only what is kvtier with the operator's own
configuration gets all of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from kvtier.core.errors import ConfigError

SAFE_PATH = "PYTHONSAFEPATH"
_SEARCHED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_FOLDERS = ("PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")
_OURS = ("KVTIER_", "LMCACHE_")
_EVERYBODYS = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_*"),
    *("PYTHON*", "MALLOC_*"),
)
"""Variables that any program needs, and that hold no secret."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_TYPED, _SI_KERNEL = {signal.SIGINT, signal.SIGQUIT}, 0x80
"""Signals that a terminal sends to parent and child alike."""
_PASSED = _TYPED | {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}


def environment(**more: str | None) -> dict[str, str]:
    """Return this process's environment with ``more``. A None changes nothing."""
    return {**os.environ, **{name: value for name, value in more.items() if value is not None}}


def python(interpreter: str, *words: str) -> list[str]:
    """Return the command of a Python of ours. A Python before 3.11 refuses ``-P``, and does not
    know :data:`SAFE_PATH`."""
    return [interpreter, "-P", *words]


def chosen(env: Mapping[str, str], *patterns: str) -> dict[str, str]:
    """Return the variables that any program needs, and those of these names, such as ``AWS_*``."""
    every = (*_EVERYBODYS, *patterns)
    return {
        name: value
        for name, value in env.items()
        if any(fnmatchcase(name, pattern) for pattern in every)
    }


def without_settings(env: Mapping[str, str], *but: str) -> dict[str, str]:
    """Return an environment without kvtier's and LMCache's variables, some of which are secrets."""
    return {name: value for name, value in env.items() if name in but or not name.startswith(_OURS)}


def run(
    command: Sequence[str], env: Mapping[str, str], **more: Any
) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(command, env=isolated(env), **more)  # noqa: PLW1510 - the caller says it


def start(command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(command, env=isolated(env), **more)


def become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Become a command of the operator's, by :func:`os.execvpe`. Its environment is as he has it.
    Raises ConfigError."""
    try:
        os.execvpe(command[0], list(command), env)  # noqa: S606 - no shell
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error}") from error


def parent() -> int | None:
    """Fork. Returns None in the child, which is killed with this process and gets its signals, and
    here, at the child's end, the exit status that a shell would tell."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED)
    child = os.fork()
    if not child:
        end_with_parent(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        told = signal.sigwaitinfo(_PASSED)
        by_terminal = told.si_code == _SI_KERNEL and told.si_signo in _TYPED
        if told.si_signo != signal.SIGCHLD and not by_terminal:
            os.kill(child, told.si_signo)
    status = os.waitstatus_to_exitcode(ended[1])
    return status if status >= 0 else 128 - status


def end_with_parent(by: signal.Signals) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, by)


def isolated(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that leads to nothing in the working folder."""
    found = dict(env) | {SAFE_PATH: "1"}
    for name in _SEARCHED:
        entries = found.pop(name, "").split(os.pathsep)
        if absolute := os.pathsep.join(filter(os.path.isabs, entries)):
            found[name] = absolute
    for name in _FOLDERS:
        if not os.path.isabs(found.get(name, "/")):
            del found[name]
    return found
