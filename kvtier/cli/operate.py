"""A server's admin interface, asked; ``kvtier clear``, ``kvtier check`` and ``kvtier token``."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtier.admin.forms import JSON, Cleared, InvalidateAll, Problem
from kvtier.client.connect import client_tls, long_enough, read_token
from kvtier.config.load import load, typed
from kvtier.core.deadline import exchange
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.secret_files import read_secret
from kvtier.core.terminal import size_text
from kvtier.protocol import admin_proof
from kvtier.tiers.nvme.check import Report, check, discard, tier_folders
from kvtier.tiers.nvme.disks import probe_disk

_TIMEOUT_S = 60.0
_START_LETTERS = 64
T = TypeVar("T")


class Surface:
    """A server's admin interface. TierError if it does not answer, ConfigError if it refuses."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--admin", metavar="URL", help="the server's admin interface; default: the key admin")
        help_text = "configuration file that has admin and admin_token_file"
        add("--config", metavar="YAML", help=help_text)
        help_text = "the server's token; default: the key admin_token_file"
        add("--token-file", metavar="FILE", help=help_text)

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Take the address from the flags of :meth:`add_arguments`, else from the configuration."""
        flags = {"admin": arguments.admin, "admin_token_file": arguments.token_file}
        config = load(arguments.config, flags=typed(flags))
        if config.admin.address == "off":
            raise ConfigError(
                "admin=off: the server has no admin interface; give --admin http://host:port"
            )
        secret = config.admin.token_file
        self._url = config.admin.address.rstrip("/")
        self._token = read_token(secret, "admin_token_file") if secret else None
        self._start = ""
        """Word of the server's start, as its last answer named it."""
        self._tls = (
            client_tls(config.server.ca, config.server.cert, config.server.key_)
            if config.server.ca and config.admin.address.startswith("https")
            else None
        )

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def ask(self, path: str, kind: type[T], body: msgspec.Struct | None = None) -> T:
        """Send a GET, or POST a body. With a token the request is signed, and an unsigned answer is
        not believed. The token itself is never sent, because anybody may have taken the port."""
        sent = None if body is None else msgspec.json.encode(body)
        headers, answer, text = self._exchanged(path, sent)
        start = answer.headers.get(admin_proof.START_HEADER, "")
        if self._token is not None and start != self._start:
            self._start = start[:_START_LETTERS]
            headers, answer, text = self._exchanged(path, sent)
        if answer.status == 200 and self._token is not None:
            proof = answer.headers.get(admin_proof.ANSWER_HEADER, "")
            if not admin_proof.is_answer(self._token, headers["Authorization"], 200, text, proof):
                raise ConfigError(
                    f"what answers at {self._url} does not prove that it knows the token: it is "
                    "not the server, or it has another admin_token_file. The token was not sent, "
                    "and the answer is not believed. See which process has the port (ss -ltnp), "
                    "and give the server's own token"
                )
        return self._read(text, answer.status, kind)

    def _exchanged(
        self, path: str, sent: bytes | None
    ) -> tuple[dict[str, str], http.client.HTTPResponse, bytes]:
        headers, method = {"Content-Type": JSON}, "GET" if sent is None else "POST"
        if self._token is not None:
            headers["Authorization"] = admin_proof.signed(
                self._token, method, path, sent or b"", time.time(), self._start
            )
        try:
            return headers, *exchange(self._url, path, sent, headers, _TIMEOUT_S, self._tls)
        except (OSError, http.client.HTTPException) as error:
            raise TierError(
                f"no kvtier server answers at {self._url}: {error}; is it running, with admin on?"
            ) from error

    def _read(self, text: bytes, status: int, kind: type[T]) -> T:
        try:
            if status == 200:
                return msgspec.json.decode(text, type=kind)
            problem = msgspec.json.decode(text, type=Problem)
        except msgspec.DecodeError as error:
            raise TierError(
                f"{self._url} is not a kvtier server of this version: {status} {text[:100]!r}"
            ) from error
        if status in (401, 403) and self._token is None:
            raise ConfigError(
                f"{self._url} refused: {problem.what}; give --token-file FILE, or the key "
                "admin_token_file"
            )
        raise ConfigError(
            f"{self._url} refused: {problem.what}; expected {problem.expected}: {problem.do}"
        )


_TOKEN_BYTES = 4096
_COUNTS = ("good", "corrupt", "damaged", "stale", "free")
_UNSEARCHED = (
    "not searched to the end, or chunks have no owner there (the server's log says how many): "
    "what this server does not know of may be left there; --everything searches it"
)
"""Reason told for a shared tier that may still have chunks."""


class ClearCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        Surface.add_arguments(parser)
        help_text = "only this tenant's chunks, and those without an owner"
        parser.add_argument("--namespace", metavar="NAME", help=help_text)
        parser.add_argument("--everything", action="store_true", help="all chunks of all tenants")
        help_text = (
            "give the disk back that an NVMe tier has reserved here, or in several folders; "
            "no server is asked"
        )
        parser.add_argument("--folder", metavar="FOLDER", help=help_text)
        parser.add_argument("--json", action="store_true", help="print the answer of /v1/clear")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        wishes = (arguments.namespace is not None, arguments.everything, arguments.folder)
        if sum(map(bool, wishes)) != 1:
            raise ConfigError(
                "say what to clear: either --namespace NAME, --everything or --folder FOLDER"
            )
        if arguments.folder is not None:
            return _discard([Path(place).absolute() for place in arguments.folder.split(",")])
        wish = InvalidateAll(arguments.namespace, arguments.everything)
        done = Surface(arguments).ask("/v1/clear", Cleared, wish)
        print(msgspec.json.encode(done).decode() if arguments.json else _cleared(done))
        return 0 if done.complete else 1


class CheckCommand:
    """Tell whether all is true that an NVMe tier's folder says. Only ``--repair`` changes any."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        help_text = "a tier's folder, or one that has some, or several; none: nvme_path"
        parser.add_argument("--nvme", metavar="FOLDER", help=help_text)
        parser.add_argument(
            "--config", metavar="YAML", help="configuration file that has nvme_path"
        )
        help_text = "make every bad slot free; without it nothing is changed"
        parser.add_argument("--repair", action="store_true", help=help_text)
        parser.add_argument(
            "--json", action="store_true", help="print one JSON list, an object a folder"
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Return 0 if nothing bad is left, else 1. Raises an error if no check is possible."""
        places = arguments.nvme or load(arguments.config).nvme.path
        if places is None:
            raise ConfigError("no folder to check: give --nvme /path, or the key nvme_path")
        reports: list[Report] = []
        refused: list[str] = []
        for folder in (each for place in places.split(",") for each in tier_folders(Path(place))):
            try:
                reports.append(check(folder, repair=arguments.repair))
            except TierError as error:
                refused.append(str(error))
        if arguments.json:
            print(msgspec.json.format(msgspec.json.encode(reports)).decode())
        else:
            for report in reports:
                print(_checked(report))
        if any(report.bad for report in reports) and not arguments.repair:
            print("kvtier check: --repair makes the bad slots free", file=sys.stderr)
        if refused:
            raise TierError("; ".join(refused))
        return int(any(report.bad for report in reports))


class TokenCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        help_text = (
            "print the token that only reads the metrics, made of the admin token in FILE "
            "(-: standard input)"
        )
        parser.add_argument("--metrics", metavar="FILE", help=help_text)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        given = arguments.metrics
        if given is None:
            print(secrets.token_hex(32))
            return 0
        key = "--metrics"
        token = sys.stdin.buffer.read(_TOKEN_BYTES) if given == "-" else read_secret(given, key)
        print(admin_proof.metrics_token(long_enough(token.strip(), given, key)))
        return 0


def _discard(places: Sequence[Path]) -> int:
    """Remove the tiers of these folders. Raises ConfigError if one has none, and TierError at the
    end for those that are in use or somebody else's."""
    refused = []
    for folder in [each for place in places for each in tier_folders(place)]:
        size = probe_disk(str(folder)).own.value or 0
        try:
            chunks = discard(folder)
        except TierError as error:
            refused.append(str(error))
            continue
        print(f"{folder}: {chunks:,} chunks dropped, {size_text(size)} given back")
    for place in places:
        with contextlib.suppress(OSError):
            place.rmdir()
    if refused:
        raise TierError("; ".join(refused))
    return 0


def _cleared(done: Cleared) -> str:
    lines = [f"{done.chunks:,} chunks dropped"]
    if done.left:
        lines.append(
            f"{done.left:,} are still being saved or deleted: stop the engines, or run this again"
        )
    if done.owed_deletes:
        lines.append(
            f"{done.owed_deletes:,} deletes wait for a tier to be back: keep the server running "
            "until then"
        )
    for place in done.untouched:
        why = "in use by another process" if place.startswith("/") else _UNSEARCHED
        lines.append(f"{place}: {why}")
    return "\n".join(lines)


def _checked(report: Report) -> str:
    end = "closed cleanly" if report.closed else "not closed by its last owner"
    counts = ", ".join(f"{getattr(report, count):,} {count}" for count in _COUNTS)
    lines = [
        f"{report.path}: {report.slots:,} slots of {size_text(report.slot_bytes)}, {end}: {counts}"
    ]
    if report.repaired:
        lines.append(f"{report.repaired:,} made free")
    return "\n  ".join([*lines, *report.problems])
