"""A command line whose errors are one line: what is wrong, and where the flags stand."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse prints all of the usage before an error, which some commands have on a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; '{self.prog} --help' shows what there is\n")
