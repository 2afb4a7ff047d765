"""A bucket: the requests that a tier makes of it through ``obstore``, and what went wrong with one,
in words.

The words are ours. What a store or a library says of an error can hold a signed URL or a key's
name, so of it only the store's error code and the HTTP status are ever shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from os import urandom
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from kvtier.core.errors import TierError
from kvtier.core.tenant import NOBODY, OWNER_BYTES
from kvtier.tiers.objects.environment import object_hosts, plain_http_allowed
from kvtier.tiers.objects.layout import HEADER_BYTES, Form
from kvtier.tiers.objects.url import ObjectUrl, parse

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

FAULTS = (BaseError, OSError)
"""What a request may end with. A name that is not there is an OSError too, and handled before."""

_CONNECT_S = 2
_ANSWER_S = 5
_SLOWEST = 8 << 20
"""Bytes a second. A request that is slower has failed."""
_NOWHERE = "http://127.0.0.1:1"
"""A proxy that is none. The library follows redirects wherever they lead, and has no setting for
it. So all hosts but the endpoint's are behind this one, and cannot be reached. The providers' own
endpoints are trusted to lead to their own hosts."""
_RETRIES = 1
_RETRY_S = 5
_MULTIPART_BYTES = 64 << 20
"""From here on a chunk is written in several requests at once. Below, their overhead (three
requests more, each of which costs money) is more than what they save, because several chunks are on
their way at once anyway."""
_PART_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
"""Of an answer, taken at once."""
_MOST_TEXT = 16 << 10
"""Characters of an error that are searched. A search of more would hold up all other threads."""

_NOBODYS = bytes(8)
"""The namespace of a trial. Chunks have their engine's."""

_OWNER = "kvtierowner"
"""The metadata of an object that says whose it is, in hexadecimal. Azure takes only letters and
digits in such a name. Objects without it are nobody's."""

_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_RIGHTS = {
    "s3": "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket",
    "gs": "storage.objects.get, create, delete and list",
    "az": "the role Storage Blob Data Contributor",
}
_REGION = "the bucket is in another region, or AWS_REGION is not set; correct AWS_REGION"
_TOKEN = "the session token is no longer valid; get new credentials"  # noqa: S105
_BUCKET = "there is no such bucket; make it, or correct object_url"
_KEY = "the secret key does not fit; correct {environment}"
_DENIED = "the credentials lack a right; allow {rights}"
_HOPELESS = {
    "InvalidAccessKeyId": "the access key is not known there; correct {environment}",
    "SignatureDoesNotMatch": _KEY,
    "AuthenticationFailed": _KEY,
    "ExpiredToken": _TOKEN,
    "InvalidToken": _TOKEN,
    "InvalidClientTokenId": _TOKEN,
    "RequestTimeTooSkewed": "this host's clock is too far from the store's; set the clock",
    "RequestExpired": "this host's clock is too far from the store's; set the clock",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "NoSuchBucket": _BUCKET,
    "ContainerNotFound": _BUCKET,
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AuthorizationFailure": _DENIED,
    "AuthorizationPermissionMismatch": _DENIED,
}
_INSTANCE_ROLE = re.compile(r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal")


class Bucket:
    """The requests of one tier. Names are those of :class:`~kvtier.tiers.objects.layout.Form`.

    Args:
        url: where it is. Credentials, region and endpoint are the environment's.
        chunk_bytes: the largest chunk. A request may take as long as one needs at 8 MiB/s, and five
            seconds more.

    Raises ConfigError for a URL that cannot be read, and TierError for an environment that can
    never do. Threads: any. Every method blocks until the store has answered or time is over, and
    raises FAULTS.
    """

    faults: tuple[type[Exception], ...] = FAULTS

    def __init__(self, url: str, chunk_bytes: int) -> None:
        self.url: ObjectUrl = parse(url)
        self.label = self.url.label
        limit = _ANSWER_S + chunk_bytes // _SLOWEST
        client: ClientConfig = {
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "timeout": timedelta(seconds=limit),
            "allow_http": plain_http_allowed(),
        }
        retry: RetryConfig = {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=min(limit, _RETRY_S)),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(milliseconds=500),
            },
        }
        if hosts := object_hosts():
            client |= {"proxy_url": _NOWHERE, "proxy_excludes": ",".join(hosts)}
        try:
            self._store = from_url(
                f"{self.url.scheme}://{self.url.bucket}", client_options=client, retry_config=retry
            )
        except (*FAULTS, ValueError) as error:
            reason = (
                self.hopeless(error)
                or f"{_ENVIRONMENT[self.url.scheme]} make no store ({words(error)})"
            )
            raise TierError(f"object store {self.label}: {reason}") from None

    def put(self, name: str, parts: Sequence[bytes | memoryview], owner: int = NOBODY) -> int:
        """Write an object whole, or not at all, with its owner as metadata. Its bytes."""
        length = sum(memoryview(part).nbytes for part in parts)
        obstore.put(
            self._store,
            name,
            parts,
            use_multipart=length >= _MULTIPART_BYTES,
            chunk_size=_PART_BYTES,
            attributes={_OWNER: f"{owner:0{2 * OWNER_BYTES}x}"} if owner else None,
        )
        return length

    def get(self, name: str, length: int) -> memoryview | None:
        """The bytes of an object. No bytes when it is of another length. None when there is
        none."""
        found = memoryview(bytearray(length))
        whole = self._fill(name, [found])
        return None if whole is None else found if whole else memoryview(b"")

    def fetch(self, name: str, into: memoryview) -> bytes | None:
        """See :meth:`~kvtier.tiers.whole_objects.WholeObjects.fetch`."""
        head = bytearray(HEADER_BYTES)
        whole = self._fill(name, [memoryview(head), into])
        return None if whole is None else bytes(head) if whole else b""

    def _fill(self, name: str, parts: list[memoryview]) -> bool | None:
        """Fill ``parts`` with an object, one after the other. None when there is none. False when
        it is of another length than it should have, or than it says: then no more is taken of it
        than what the library reads at once, and ``parts`` may hold some of it."""
        try:
            answer = obstore.get(self._store, name)
        except FileNotFoundError:
            return None
        if answer.meta["size"] != sum(part.nbytes for part in parts):
            return False
        for piece in answer.stream(_PIECE_BYTES):
            left = memoryview(piece)
            while left.nbytes:
                if not parts:
                    return False
                count = min(left.nbytes, parts[0].nbytes)
                parts[0][:count] = left[:count]
                parts[0], left = parts[0][count:], left[count:]
                if not parts[0].nbytes:
                    del parts[0]
        return not any(part.nbytes for part in parts)

    def has(self, name: str) -> bool:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def owner(self, name: str) -> int:
        """Whose an object is. Nobody's where there is none, or its metadata does not say."""
        try:
            answer = obstore.get(self._store, name, options={"head": True})
        except FileNotFoundError:
            return NOBODY
        told = answer.attributes.get(_OWNER, "")
        return int(told, 16) if re.fullmatch(f"[0-9a-f]{{{2 * OWNER_BYTES}}}", told) else NOBODY

    def delete(self, names: Sequence[str]) -> int:
        """How many names were given. One that is not there is no fault."""
        for name in names:
            with suppress(
                FileNotFoundError
            ):  # S3 says nothing of a name that is not there, others do
                obstore.delete(self._store, name)
        return len(names)

    def listed(self, folder: str) -> Iterator[tuple[str, int, datetime]]:
        """Name, bytes and time of the last write of every object below ``folder``, in no order,
        page by page."""
        for page in obstore.list(self._store, prefix=folder):
            for meta in page:
                yield meta["path"], meta["size"], meta["last_modified"]

    def greet(self, folder: str) -> None:
        """Try once what a tier does. Raises FAULTS when the store cannot be reached now, TierError
        for what only the operator can mend."""
        trial, text = f"{folder}/trial-{urandom(8).hex()}", b"kvtier"
        try:
            self.get(trial, 0)  # not a HEAD, whose answer could not say in a body what is wrong
            self.put(trial, [text])
            try:
                back = self.get(trial, len(text))
                next(self.listed(folder), None)
            finally:
                self.delete([trial])
        except FAULTS as error:
            if (reason := self.hopeless(error)) is not None:
                raise TierError(f"object store {self.label}: {reason}") from None
            raise
        if back is None or bytes(back) != text:
            raise TierError(
                f"object store {self.label}: what was written is not what is read; look at "
                "the store"
            )

    def told(self, error: BaseException) -> str:
        """What went wrong, and what to do where waiting mends nothing."""
        return self.hopeless(error) or words(error)

    def hopeless(self, error: BaseException) -> str | None:
        """What the operator has to mend, where waiting mends nothing."""
        text, code = _text(error), _code(error)
        environment, rights = _ENVIRONMENT[self.url.scheme], _RIGHTS[self.url.scheme]
        if code in _HOPELESS:
            return (
                f"{_HOPELESS[code].format(environment=environment, rights=rights)} ({words(error)})"
            )
        if _INSTANCE_ROLE.search(text):
            return (
                "no credentials: the environment has none, and no role of this instance gave "
                f"any; set {environment}"
            )
        if "MissingAccount" in text or "Account must be specified" in text:
            return f"no account: set {environment}"
        if "incorrectly configured region" in text:
            return _REGION
        if "BadScheme" in text:
            return (
                "the endpoint is http://, which the network can read and forge; set "
                "AWS_ALLOW_HTTP=true if it may be"
            )
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
            return (
                f"the credentials are refused; correct {environment}, or allow {rights} "
                f"({words(error)})"
            )
        return None


def tried(url: str) -> str:
    """Why the bucket of ``url`` cannot be reached now. Empty when it can. Raises TierError for what
    waiting does not mend."""
    bucket = Bucket(url, 1)
    try:
        bucket.greet(Form(bucket.url.prefix, _NOBODYS).folder)
    except FAULTS as error:
        return f"object store {bucket.label} cannot be reached: {words(error)}"
    return ""


def words(error: BaseException) -> str:
    """What went wrong with a request, without anything that could be a secret."""
    text, code = _text(error), _code(error)
    status = found[1] if (found := re.search(r"status code: (\d{3})", text)) else ""
    if code or status:
        return " ".join(part for part in (f"HTTP {status}" if status else "", code) if part)
    if re.search(r"kind: Timeout|TimedOut|timed out", text):
        return "no answer in time"
    if re.search(r"kind: (Connect|Request|Interrupted)|ConnectError", text):
        return "no connection"
    return type(error).__name__


def _code(error: BaseException) -> str:
    """The error code in the store's answer. Empty where there is none."""
    found = re.search(r"<Code>([A-Za-z]{1,64})</Code>", _text(error))
    return found[1] if found else ""


def _text(error: BaseException) -> str:
    """The part of a library's words in which something is looked for. The whole holds the body of
    a refusal, which a hostile store may make as long as it likes."""
    return str(error)[:_MOST_TEXT]
