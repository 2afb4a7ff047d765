"""The page at ``/``: one file, which asks ``/v1/stats`` every two seconds and shows the answer. It
contains no secret, and no code of another origin may run in it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

HTML = "text/html"


class Page:
    """The file is read once. Raises OSError when it is not there."""

    def __init__(self) -> None:
        self.body = Path(__file__).with_name("page.html").read_bytes()

    @property
    def headers(self) -> Mapping[str, str]:
        """A policy that lets the browser run what is in the file and ask this server, and nothing
        else."""
        policy = [
            "default-src 'none'",
            f"script-src '{self._digest('script')}'",
            f"style-src '{self._digest('style')}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
        return {
            "Content-Type": f"{HTML}; charset=utf-8",
            "Content-Security-Policy": "; ".join(policy),
            "Referrer-Policy": "no-referrer",
        }

    def _digest(self, tag: str) -> str:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), self.body, re.DOTALL)
        return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
