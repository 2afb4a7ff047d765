"""A command line whose errors are one line: what is wrong, and where the flags stand."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

_CUTOFF = 0.6


class Parser(argparse.ArgumentParser):
    """argparse prints a screen of usage before an error, and takes a flag's beginning for it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "allow_abbrev": False})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = self.parse_known_args(args, namespace)
        if others:
            words = [word.partition("=")[0] for word in others]
            flag = next((word for word in words if word.startswith("-")), "")
            near = nearest(flag, self._option_string_actions) if flag else ""
            self.error(f"unrecognized arguments: {' '.join(others)}{near}")
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; '{self.prog} --help' shows what there is\n")


def nearest(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1, cutoff=_CUTOFF)
    return f"; the nearest is {near[0]!r}" if near else ""
