"""``kvtier warm``: send the home of each document to a running engine, so that it is cached.

A home is the prompt ``anchor + document`` (:mod:`kvtier.spans`). Each is sent as a plain completion
of one token, so the engine computes it exactly and kvtier keeps it as any other prompt. One home is
in flight at a time: the engine's users go first.
"""

from __future__ import annotations

import argparse
import http.client
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvtier.config.load import load
from kvtier.core.deadline import exchange
from kvtier.core.errors import ConfigError
from kvtier.core.secret_files import read_secret
from kvtier.core.terminal import progress
from kvtier.spans import homes

_MOST_ERROR_CHARS = 300
_JSON = "application/json"


class Warmed(NamedTuple):
    homes: int
    tokens: int
    cached: int | None
    """Tokens that the engine had already, or None if it does not tell."""
    refused: dict[int, str]


class NoCompletionError(Exception):
    pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_text = (
        "the engine, such as http://localhost:8000; with data-parallel engines, each of them"
    )
    add("--base-url", required=True, metavar="URL", help=help_text)
    add("--model", metavar="NAME", help="name that it serves, or an adapter's (default: its first)")
    help_text = (
        "what every prompt begins with, special tokens and line ends included: a text, or, "
        "when it is called .json, a list of token ids"
    )
    add("--anchor", required=True, metavar="FILE", help=help_text)
    help_text = 'JSON lines: "a text", {"text": ...}, [token ids] or {"tokens": ...}'
    add("--documents", required=True, metavar="FILE", help=help_text)
    help_text = "kvtier's chunk in that engine (default: the key chunk_tokens here)"
    add("--chunk-tokens", type=int, metavar="TOKENS", help=help_text)
    add("--config", metavar="YAML", help="configuration file that has chunk_tokens")
    add("--cache-salt", metavar="SALT", help="the cache_salt that requests for them will have")
    add("--api-key-file", metavar="FILE", help="key that the engine wants, in a file of yours only")
    help_text = "for one home (default: 600)"
    add("--request-timeout", type=float, default=600.0, metavar="S", help=help_text)
    add("--json", action="store_true", help="print the counts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Send every home. Returns 1 if the engine refused one. Raises ConfigError for bad input."""
    chunk = arguments.chunk_tokens
    if chunk is None:
        chunk = load(arguments.config).engine.chunk_tokens
    anchor, documents = _anchor(arguments.anchor), list(_documents(arguments.documents))
    engine = _Served(arguments)
    first = engine.tokens(anchor, "the anchor")
    done = _warm(engine, first, documents, chunk)
    for line, why in done.refused.items():
        print(f"kvtier: {arguments.documents}, line {line}: {why}", file=sys.stderr)
    if arguments.json:
        print(msgspec.json.encode(done._asdict()).decode())
    else:
        print(_told(done))
    return 1 if done.refused else 0


class _Served:
    """One engine behind its HTTP server. Raises ConfigError when it cannot be reached."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        url, secret = arguments.base_url, arguments.api_key_file
        self._url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--base-url {url}: expected an address such as http://localhost:8000"
            )
        self._headers = {"Content-Type": _JSON}
        if secret:
            key = read_secret(secret, "--api-key-file")
            self._headers["Authorization"] = f"Bearer {key.decode('latin-1')}"
        self._timeout_s = arguments.request_timeout
        self._salt = arguments.cache_salt
        self.model = self._known(arguments.model)

    def _known(self, wanted: str | None) -> str:
        try:
            names = [str(one["id"]) for one in self._ask("/v1/models", None)["data"]]
        except (NoCompletionError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--base-url {self._url}: expected an OpenAI-compatible server such as vllm serve; "
                f"asked for its models, it answered {_shown(error)}"
            ) from error
        if not names or (wanted is not None and wanted not in names):
            there = ", ".join(names) or "none"
            raise ConfigError(f"--model {wanted}: {self._url} serves {there}; give one of these")
        return wanted or names[0]

    def tokens(self, part: str | list[int], what: str) -> list[int]:
        """Ask for the token ids of a text, without special tokens."""
        if not isinstance(part, str):
            return part
        body = {"model": self.model, "prompt": part, "add_special_tokens": False}
        try:
            return list(self._ask("/tokenize", body)["tokens"])
        except (NoCompletionError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{what} is a text, and {self._url}/tokenize answered {_shown(error)}: expected "
                "vLLM's own server; through a router that has no /tokenize, give token ids"
            ) from error

    def prefill(self, tokens: Sequence[int]) -> int | None:
        """Send a prompt. Returns its cached tokens, if told. Raises NoCompletionError."""
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        if self._salt is not None:
            body["cache_salt"] = self._salt
        answer = self._ask("/v1/completions", body)
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise NoCompletionError(f"an answer without a token: {answer!r}")
        told = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = told.get("cached_tokens")
        return int(cached) if cached is not None else None

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        """Send a GET, or POST a body. Raises NoCompletionError unless the answer is JSON."""
        sent = None if body is None else msgspec.json.encode(body)
        try:
            answer, text = exchange(self._url, path, sent, self._headers, self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"--base-url {self._url}: {path} was not answered: {_shown(error)}; is "
                "the engine running? A home that takes longer wants a larger --request-timeout"
            ) from error
        if answer.status != 200:
            raise NoCompletionError(f"HTTP {answer.status}: {text.decode(errors='replace')}")
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise NoCompletionError(f"no JSON: {text[:_MOST_ERROR_CHARS]!r}") from error


def _warm(
    engine: _Served, anchor: list[int], documents: list[tuple[int, str | list[int]]], chunk: int
) -> Warmed:
    tokens, cached, refused = 0, 0, {}
    told, tell = True, progress("homes", len(documents))
    for done, (line, document) in enumerate(documents, 1):
        what = f"the document of line {line}"
        (home,) = homes(anchor, [engine.tokens(document, what)], chunk)
        try:
            there = engine.prefill(home.tokens)
        except NoCompletionError as error:
            refused[line] = _shown(error)
        else:
            tokens += len(home.tokens)
            cached += there or 0
            told = told and there is not None
        tell(done)
    sent = len(documents) - len(refused)
    return Warmed(sent, tokens, cached if told and sent else None, refused)


def _told(done: Warmed) -> str:
    words = f"{done.homes:,} homes of {done.tokens:,} tokens in all"
    if done.cached is not None:
        words += f"; {done.tokens - done.cached:,} were computed, {done.cached:,} were cached"
    if done.refused:
        words += f"; {len(done.refused):,} more were refused"
    return words


def _anchor(path: str) -> str | list[int]:
    """Read the anchor: a text with all its line ends, or the token ids of a JSON list."""
    text = _read(path, "--anchor")
    if not path.endswith(".json"):
        return text
    try:
        return msgspec.json.decode(text, type=list[int])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--anchor {path}: expected a JSON list of token ids: {error}") from error


def _documents(path: str) -> Iterator[tuple[int, str | list[int]]]:
    lines = _read(path, "--documents").split("\n")
    found = False
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = True
            yield number, _document(path, number, line)
    if not found:
        raise ConfigError(f"--documents {path}: expected a document a line, and it has none")


def _document(path: str, number: int, line: str) -> str | list[int]:
    try:
        given = msgspec.json.decode(line, type=str | list[int] | dict[str, Any])
        if isinstance(given, dict):
            given = given["tokens"] if "tokens" in given else given.get("text")
        value: str | list[int] = msgspec.convert(given, str | list[int])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--documents {path}, line {number}: {error}; expected JSON: "
            '"a text", {"text": "a text"}, [1, 2] or {"tokens": [1, 2]}'
        ) from error
    if not value:
        raise ConfigError(f"--documents {path}, line {number}: the document is empty; leave it out")
    return value


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: expected text in UTF-8: {error}") from error


def _shown(error: Exception) -> str:
    text = " ".join((str(error) or type(error).__name__).split())
    return text if len(text) <= _MOST_ERROR_CHARS else f"{text[:_MOST_ERROR_CHARS]} ..."
