"""Where the object store is: the only reader of ``object_url``. It parses, refuses and masks.

::

    s3://bucket[/prefix]         Amazon S3, and what speaks like it
    gs://bucket[/prefix]         Google Cloud Storage
    az://container[/prefix]      Azure Blob Storage

Credentials, region and endpoint are never in it: they come from the environment, by each provider's
own names. Where somebody wrote them into the URL all the same, no error shows a piece of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvtier.core.errors import ConfigError

EXPECTED = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"

Scheme = Literal["s3", "gs", "az"]

_SCHEMES: dict[str, Scheme] = {"s3": "s3", "gs": "gs", "az": "az"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_PREFIX = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_PREFIX_LETTERS = 512
"""Longest prefix. Names in S3 have at most 1,024 bytes, of which ours take 160 behind it."""


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    scheme: Scheme
    bucket: str
    prefix: str

    @property
    def label(self) -> str:
        """Text for logs: the URL itself, because one that was understood holds no secret."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse(text: str) -> ObjectUrl:
    """Parse ``object_url``. Raises ConfigError, which never shows a piece of ``text``."""
    scheme, separator, rest = text.partition("://")
    known = _SCHEMES.get(scheme.lower()) if separator else None
    if known is None:
        raise ConfigError(
            f"the scheme is not one of s3, gs or az; expected {EXPECTED}{_hint(scheme.lower())}"
        )
    if re.search("[@?#]", rest):
        raise ConfigError(
            "there is an @, ? or #; credentials, region and endpoint come from the environment; "
            f"expected {EXPECTED}"
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            "the bucket's name has characters other than letters, digits and . _ -, or has a wrong "
            f"length; expected {EXPECTED}"
        )
    parts = prefix.split("/")
    if prefix and (
        len(prefix) > _PREFIX_LETTERS or not _PREFIX.fullmatch(prefix) or {".", ".."} & set(parts)
    ):
        raise ConfigError(
            "the prefix cannot be used: it may have words of letters, digits and . _ = - with "
            f"single / between, at most {_PREFIX_LETTERS} characters; expected {EXPECTED}"
        )
    return ObjectUrl(known, bucket, prefix)


def masked(text: str) -> str:
    """Return ``text`` for logs: only the scheme if it cannot be read."""
    try:
        return parse(text).label
    except ConfigError:
        scheme = text.partition("://")[0].lower()
        return f"{scheme}://***" if scheme in _SCHEMES else "***"


def safe(_text: str) -> str | None:
    """Return None: no URL of an object store holds a secret, because @, ? and # are refused."""
    return None


def _hint(scheme: str) -> str:
    if scheme in ("http", "https"):
        return (
            "; for a store that speaks like S3, write s3://bucket/prefix and set AWS_ENDPOINT_URL"
        )
    return "; a Redis is given as redis_url" if scheme.startswith(("redis", "valkey")) else ""
