"""The page at ``/``: one file, which asks ``/v1/stats`` every two seconds and shows the answer. It
contains no secret, and no code of another origin may run in it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path


def page() -> tuple[bytes, Mapping[str, str]]:
    """The file and its headers. Their policy lets the browser run what is in the file and ask this
    server, and nothing else. Raises OSError when the file is not there."""
    body = Path(__file__).with_name("page.html").read_bytes()
    policy = [
        "default-src 'none'",
        f"script-src '{_digest('script', body)}'",
        f"style-src '{_digest('style', body)}'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return body, {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Referrer-Policy": "no-referrer",
    }


def _digest(tag: str, body: bytes) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
