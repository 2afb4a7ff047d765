"""Surface: a server's admin interface, asked from a terminal."""

from __future__ import annotations

import argparse
import http.client
import time
from typing import TypeVar

import msgspec

from kvtier.admin.forms import JSON, Problem
from kvtier.client.connect import client_tls, read_token
from kvtier.config.load import load, typed
from kvtier.core.deadline import exchange
from kvtier.core.errors import ConfigError, TierError
from kvtier.protocol import admin_proof

_TIMEOUT_S = 60.0
_LONGEST_START = 64
T = TypeVar("T")


class Surface:
    """Raises TierError when the server cannot be reached, and ConfigError when it refuses."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--admin", metavar="URL", help="the server's admin interface; default: the key admin")
        add(
            "--config",
            metavar="YAML",
            help="configuration file that has admin and admin_token_file",
        )
        add(
            "--token-file",
            metavar="FILE",
            help="the server's token; default: the key admin_token_file",
        )

    def __init__(self, arguments: argparse.Namespace) -> None:
        """The one of :func:`add_arguments`' flags, else the configuration's."""
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
        """The server's start, as its last answer named it."""
        self._tls = (
            client_tls(config.server.ca, config.server.cert, config.server.key_)
            if config.server.ca and config.admin.address.startswith("https")
            else None
        )

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def ask(self, path: str, kind: type[T], body: msgspec.Struct | None = None) -> T:
        """GET, or POST with a body. With a token the request is signed, and an unsigned answer is
        not believed. The token itself is never sent, because anybody may have taken the port."""
        sent = None if body is None else msgspec.json.encode(body)
        headers, answer, text = self._exchanged(path, sent)
        start = answer.headers.get(admin_proof.START_HEADER, "")
        if self._token is not None and start != self._start:
            self._start = start[:_LONGEST_START]
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
