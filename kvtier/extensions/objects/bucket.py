"""Bucket: a tier's requests through ``obstore``, and their faults in words.

An error's text can hold a signed URL or a key's name, so only the store's error code and the HTTP
status are ever shown.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from os import urandom
from pathlib import Path
from urllib.parse import urlsplit

from kvtier.core.errors import TierError
from kvtier.core.processes import chosen, environment
from kvtier.core.tenant import OWNER_BYTES, UNOWNED
from kvtier.extensions.objects.url import ObjectUrl, parse
from kvtier.tiers.away import library_process
from kvtier.tiers.away.whole_objects import HEADER_BYTES, ObjectForm, room

_ENDPOINTS = (
    *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    *("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_STORE_KEYS = ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY")
_CREDENTIALS_FROM = (
    *("AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    *("AZURE_AUTHORITY_HOST", "IDENTITY_ENDPOINT"),
)
_CREDENTIAL_HOSTS = (
    *("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23"),
    *("amazonaws.com", "amazonaws.com.cn", "microsoftonline.com", "microsoftonline.us"),
)
"""Hosts that give credentials: those of instances' roles, and services that exchange tokens."""
_PROVIDERS = {
    "s3": ("AWS_*",),
    "gs": ("GOOGLE_*", "GCE_METADATA_*", "SERVICE_ACCOUNT"),
    "az": ("AZURE_*", "IDENTITY_*", "IMDS_*", "MSI_*"),
}
_ANY_PROVIDERS = ("SSL_CERT_*", *_PROXIES, "NO_PROXY", "RUST_*")
"""Variables that the library reads for every provider, beside :data:`_PROVIDERS`."""


def library_environment(scheme: str) -> dict[str, str]:
    """Return the environment of the library's process: the provider's variables and no other
    secret. Names of proxies are read in small letters too."""
    both = (*_ANY_PROVIDERS, *(name.lower() for name in _ANY_PROVIDERS))
    return chosen(environment(), *_PROVIDERS[scheme], *both)


def plain_http_allowed() -> bool:
    """Whether the operator allows plain HTTP, by a variable of the store's library."""
    surroundings = environment()
    return any(
        surroundings.get(f"{name}_ALLOW_HTTP", "").lower() in ("true", "1")
        for name in ("AWS", "GOOGLE", "AZURE")
    )


def object_hosts() -> tuple[str, ...]:
    """Return the only hosts that the library has to reach if variables name an endpoint: that one,
    and without a key those that give credentials. Empty for the provider's own hosts, or a
    proxy."""
    given = {name.upper(): value for name, value in environment().items() if value}
    if given.keys().isdisjoint(_ENDPOINTS) or not given.keys().isdisjoint(_PROXIES):
        return ()
    hosts = [urlsplit(given.get(name, "")).hostname or "" for name in _ENDPOINTS]
    if given.keys().isdisjoint(_STORE_KEYS):
        hosts += [urlsplit(given.get(name, "")).hostname or "" for name in _CREDENTIALS_FROM]
        hosts += _CREDENTIAL_HOSTS
    return tuple(filter(None, hosts))


_LOG = logging.getLogger(__name__)
FAULTS = (library_process.LibraryError,)

_CHILD = str(Path(__file__).with_name("child.py"))
_CALLS = 24
"""Most calls at once: eight of the tier's lane, sixteen that ask for owners."""
_MOST_BYTES = 192 << 20
"""Most memory of the library's process, besides the chunks. Eight gets at once need a quarter."""
_WORKERS = "4"
"""Number of the library's threads, by default one a core. Their stacks count as memory."""
_BEGIN_S = 5.0
_LATE_S = 2.0
"""Time between the library's own limit of a request and the end of its process."""
_ANSWER_S = 5
_SLOWEST_BYTES_S = 8 << 20
"""Pace below which a request has failed."""
_NOWHERE = "http://127.0.0.1:1"
"""Address of a proxy that does not exist, for all hosts but the endpoint's: the library follows
redirects anywhere, and has no setting for it. The providers' own endpoints are trusted."""
_MULTIPART_BYTES = 64 << 20
"""Size from which a chunk is written by several requests at once. Below, three more requests, each
of which costs money, would save too little: several chunks are on their way anyway."""
_PART_STEPS = 3
"""Steps of a write in parts: beginning, parts and end. Each may take as long as a request."""
_NOBODYS = bytes(8)
"""Namespace of trial objects. Chunks have their engine's."""

_OWNER = "kvtierowner"
"""Metadata key of an object's owner, which is in hexadecimal. Azure takes only letters and digits
in it. Objects without it have no owner."""
_TRIAL_OWNER = 1

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
_REFUSED = ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")
_INSTANCE_ROLE = re.compile(r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal")


class Bucket:
    """Requests to one bucket. Names are those of
    :class:`~kvtier.tiers.away.whole_objects.ObjectForm`. Credentials, region and endpoint are the
    environment's.

    Raises ConfigError for a URL that cannot be read. Threads: any. Every method blocks until the
    store has answered or time is over (five seconds, and what ``chunk_bytes`` need at 8 MiB/s), and
    raises FAULTS."""

    faults: tuple[type[Exception], ...] = FAULTS

    def __init__(self, url: str, chunk_bytes: int) -> None:
        self.url: ObjectUrl = parse(url)
        self.label = self.url.label
        limit_s = _ANSWER_S + chunk_bytes // _SLOWEST_BYTES_S
        client: dict[str, object] = {"allow_http": plain_http_allowed()}
        if hosts := object_hosts():
            client |= {"proxy_url": _NOWHERE, "proxy_excludes": ",".join(hosts)}
        setup = [f"{self.url.scheme}://{self.url.bucket}", limit_s, client]
        library = library_process.Library(
            "the object store", _CHILD, sys.executable, lambda: setup, _BEGIN_S, _MOST_BYTES
        )
        self._library = library_process.LibraryProcess(
            library,
            room(chunk_bytes),
            _CALLS,
            limit_s * (_PART_STEPS if chunk_bytes >= _MULTIPART_BYTES else 1) + _LATE_S,
            library_environment(self.url.scheme) | {"TOKIO_WORKER_THREADS": _WORKERS},
        )

    def put(self, name: str, parts: Sequence[bytes | memoryview], owner: int = UNOWNED) -> int:
        length = 0
        attributes = {_OWNER: f"{owner:0{2 * OWNER_BYTES}x}"} if owner else None
        with self._library.seat() as (ask, memory):
            for part in parts:
                length = library_process.copied(part, memory, length)
            ask("put", name, length, attributes, length >= _MULTIPART_BYTES)
        return length

    def get(self, name: str, length: int) -> memoryview | None:
        """Read an object. Empty if it has another length, None if it does not exist."""
        with self._library.seat() as (ask, memory):
            whole = ask("get", name, length)
            return None if whole is None else memoryview(bytes(memory[: length if whole else 0]))

    def fetch(self, name: str, into: memoryview) -> bytes | None:
        length = room(into.nbytes)
        with self._library.seat() as (ask, memory):
            whole = ask("get", name, length)
            if not whole:
                return None if whole is None else b""
            library_process.copied(memory[HEADER_BYTES:length], into)
            return bytes(memory[:HEADER_BYTES])

    def has(self, name: str) -> bool:
        with self._library.seat() as (ask, _):
            return bool(ask("has", name))

    def owner(self, name: str) -> int:
        """Read the object's owner; UNOWNED without an object or metadata."""
        with self._library.seat() as (ask, _):
            told = ask("attribute", name, _OWNER)
        return int(told, 16) if re.fullmatch(f"[0-9a-f]{{{2 * OWNER_BYTES}}}", told) else UNOWNED

    def delete(self, names: Sequence[str]) -> int:
        with self._library.seat() as (ask, _):
            for name in names:
                ask("delete", name)
        return len(names)

    def listed(self, folder: str) -> Iterator[tuple[str, int, datetime]]:
        """Yield name, bytes and last write of objects, unordered. Occupies a call until the end."""
        with self._library.seat() as (ask, _):
            page = ask("first_page", folder)
            while page is not None:
                for path, size, written in page:
                    yield path, size, datetime.fromtimestamp(written, UTC)
                page = ask("next_page")

    def close(self) -> None:
        self._library.close()

    def greet(self, folder: str) -> None:
        trial, text = f"{folder}/trial-{urandom(8).hex()}", b"kvtier"
        try:
            self.get(trial, 0)  # not a HEAD, whose answer could not say in a body what is wrong
            self.put(trial, [text], _TRIAL_OWNER)
            try:
                back, owner = self.get(trial, len(text)), self.owner(trial)
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
        if owner != _TRIAL_OWNER:
            _LOG.warning(
                "object store %s: it drops the metadata %s of an object, so nobody knows whose a "
                "chunk is: clear --namespace cannot find a tenant's chunks there, --everything can",
                self.label,
                _OWNER,
            )

    def told(self, error: library_process.LibraryError) -> str:
        return self.hopeless(error) or words(error)

    def hopeless(self, error: library_process.LibraryError) -> str | None:
        """Return the fault and its remedy if waiting will not mend it, else None."""
        text, code = error.text, _code(error)
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
        if error.kind in _REFUSED:
            return (
                f"the credentials are refused; correct {environment}, or allow {rights} "
                f"({words(error)})"
            )
        if isinstance(error, library_process.HopelessError):
            return f"{environment} make no store ({words(error)})"
        return None


def tried(url: str) -> str:
    """Return why the bucket cannot be reached, or "". Raises TierError as :meth:`Bucket.greet`."""
    with closing(Bucket(url, 1)) as bucket:
        try:
            bucket.greet(ObjectForm(bucket.url.prefix, _NOBODYS).folder)
        except FAULTS as error:
            return f"object store {bucket.label} cannot be reached: {words(error)}"
    return ""


def words(error: library_process.LibraryError) -> str:
    """Describe a request's fault in words that hold no secret."""
    code = _code(error)
    status = found[1] if (found := re.search(r"status code: (\d{3})", error.text)) else ""
    if code or status:
        return " ".join(part for part in (f"HTTP {status}" if status else "", code) if part)
    if re.search(r"kind: Timeout|TimedOut|timed out", error.text):
        return "no answer in time"
    if re.search(r"kind: (Connect|Request|Interrupted)|ConnectError", error.text):
        return "no connection"
    return error.kind or str(error)


def _code(error: library_process.LibraryError) -> str:
    found = re.search(r"<Code>([A-Za-z]{1,64})</Code>", error.text)
    return found[1] if found else ""
