"""``kvtier stats``, ``kvtier clear`` and ``kvtier token``: a server's admin interface, asked."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtier.admin.forms import JSON, Cleared, InvalidateAll, Problem
from kvtier.admin.status import SizeClassStatus, Stats, TierStatus
from kvtier.client.connect import client_tls, long_enough, read_token
from kvtier.config.load import load, typed
from kvtier.core.deadline import exchange
from kvtier.core.errors import ConfigError, TierError
from kvtier.core.secret_files import read_secret
from kvtier.core.terminal import size_text, table
from kvtier.protocol import admin_proof
from kvtier.tiers.nvme.check import discard, tier_folders
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
_NOTHING_POINTS = 0.1
"""Points of hits below which a difference is not told."""
_HEADS = (
    *("tier", "held", "fill", "loads", "stores", "read", "written"),
    *("missed", "refused", "failed", "corrupt", "queue"),
)
_UNSEARCHED = (
    "not searched to the end, or chunks have no owner there (the server's log says how many): "
    "what this server does not know of may be left there; --everything searches it"
)
"""Reason told for a shared tier that may still have chunks."""


class StatsCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        Surface.add_arguments(parser)
        parser.add_argument(
            "--json", action="store_true", help="print the document of /v1/stats on one line"
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        now = Surface(arguments).ask("/v1/stats", Stats)
        print(msgspec.json.encode(now).decode() if arguments.json else screen(now))
        return 0


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


def screen(now: Stats) -> str:
    there = now.connections
    state = "ready" if now.ready else "NOT READY"
    memory = f"memory {size_text(now.memory.process)} + pools {size_text(now.memory.pools)}"
    open_ = f"connections {there.open} open, {there.lingering} lingering, {there.leases} leases"
    past = f"{there.accepted} accepted, {there.rejected} rejected, {there.dropped} dropped"
    lines = [
        f"kvtier {now.version}  {state}  up {_duration(now.uptime_s)}  {memory}",
        f"{open_}; so far {past}",
    ]
    lines += [f"TROUBLE: {words}" for words in now.trouble]
    for size_class in now.size_classes:
        lines += ["", *_size_class_lines(size_class)]
    if not now.size_classes:
        lines += ["", "no engine has come yet"]
    return "\n".join(lines)


def _size_class_lines(size_class: SizeClassStatus) -> Iterator[str]:
    yield (
        f"chunks of {size_text(size_class.slot_bytes)}: {_hits(size_class)}, "
        f"{size_class.namespaces} namespaces, "
        f"slots {size_class.free} free, {size_class.filling} filling, {size_class.pinned} pinned"
    )
    yield from saved_compute(size_class)
    yield from _misses(size_class)
    yield from what_if(size_class)
    yield from table(_HEADS, [*map(_tier, size_class.tiers)], numbers=range(1, len(_HEADS)))


def what_if(size_class: SizeClassStatus) -> Iterator[str]:
    """Yield lines: hits of other sizes, the policy's setting that rules, hits of the others."""
    for tier in size_class.tiers:
        if any(tier.what_if.values()):
            yield _other_sizes(tier, tier.capacity * size_class.slot_bytes)
    hits, asked = size_class.policy_hits, size_class.policy_asked
    if asked and size_class.policy in hits:
        saved = size_class.policy_saved
        others = ", ".join(
            f"{name} {100 * (count - hits[size_class.policy]) / asked:+.1f}"
            f" ({saved[name] / (saved[size_class.policy] or 1):.2f} x)"
            for name, count in sorted(hits.items(), key=lambda item: -item[1])
            if name != size_class.policy
        )
        rules = f"{hits[size_class.policy] / asked:.1%} of all {asked:,} chunks of prompts"
        yield (
            f"policy: {size_class.policy} rules, {rules} in RAM, vLLM's own hits among them; the "
            f"others, in points (and saved compute): {others}"
        )


def _other_sizes(tier: TierStatus, size: int) -> str:
    """Write ``ram of 64 GiB: +64 GiB = +7.0 points``, more first, if a size changes anything."""
    ratios = {float(scale): 100 * ratio for scale, ratio in tier.what_if.items()}
    most = max(ratios.values())
    enough = min(scale for scale, ratio in ratios.items() if most - ratio < _NOTHING_POINTS)
    said = [
        f"{'-' if scale < 1 else '+'}{size_text(abs(scale - 1) * size)} = "
        f"{ratio - ratios[1]:+.1f} points"
        for scale, ratio in sorted(ratios.items(), key=lambda one: (one[0] < 1, one[0]))
        if abs(ratio - ratios[1]) >= _NOTHING_POINTS and scale <= max(1, enough)
    ]
    if enough < max(ratios):
        said.append(f"beyond {size_text(enough * size)} it adds nothing")
    error = f", give or take {100 * tier.what_if_error:.1f}" if tier.what_if_error else ""
    return (
        f"{tier.tier} of {size_text(size)} under LRU, vLLM's own hits among them: "
        f"{'; '.join(said) or 'no other size changes it'}{error}"
    )


def _tier(tier: TierStatus) -> list[str]:
    moved = (size_text(count) for count in (tier.bytes_read, tier.bytes_written))
    return [
        tier_name(tier),
        f"{tier.held:,}",
        f"{tier.held / tier.capacity:.0%}" if tier.capacity else "-",
        *(f"{count:,}" for count in (tier.loads, tier.stores)),
        *(moved if tier.lane else ("-", "-")),
        *(f"{count:,}" for count in (tier.misses, tier.refused, tier.failed, tier.corrupt)),
        queued(tier),
    ]


def tier_name(tier: TierStatus) -> str:
    return f"{tier.tier} AWAY" if tier.open_breakers else tier.tier


def queued(tier: TierStatus) -> str:
    return f"{tier.lane.queued_reads}+{tier.lane.queued_writes}" if tier.lane else "-"


def _hits(size_class: SizeClassStatus) -> str:
    if not size_class.asked:
        return "no chunk asked for"
    part = sum(tier.loads for tier in size_class.tiers) / size_class.asked
    return f"{part:.1%} of {size_class.asked:,} chunks asked for were hits"


def saved_compute(size_class: SizeClassStatus) -> Iterator[str]:
    if size_class.asked_compute:
        tokens = sum(tier.hit_tokens for tier in size_class.tiers)
        yield (
            f"saved compute: {size_class.saved_compute / size_class.asked_compute:.1%} of the "
            f"prefill, by {tokens / size_class.asked_tokens:.1%} of the tokens asked for"
        )


def _misses(size_class: SizeClassStatus) -> Iterator[str]:
    """Yield why chunks were computed, the most common first, the audit's finds, and zero hits."""
    counts = Counter(size_class.missed) + Counter(size_class.declined)
    if counts:
        whole = counts.total()
        yield "computed: " + ", ".join(
            f"{count / whole:.0%} {reason}" for reason, count in counts.most_common()
        )
    if size_class.audited:
        yield (
            f"audit: {size_class.audited:,} chunks compared, {size_class.audit_mismatches:,} had "
            "other bytes"
        )
    if size_class.zero_hits:
        yield f"NO HITS: {size_class.zero_hits}"


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
