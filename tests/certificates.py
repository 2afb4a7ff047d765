"""Certificates for tests of TLS, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificates(folder: Path) -> Path:
    """Two authorities, ``ours`` and ``theirs``, and of each a certificate for localhost,
    ``ours-host`` and so on, and one for another name, ``ours-other``: ``.pem`` and ``.key`` files
    in ``folder``."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for who in ("ours", "theirs"):
        openssl(
            folder,
            "req",
            "-x509",
            *curve,
            "-subj",
            f"/CN={who}",
            "-keyout",
            f"{who}.key",
            "-out",
            f"{who}.pem",
        )
        for kind, name in (("host", "localhost"), ("other", "elsewhere")):
            openssl(
                folder,
                "req",
                "-x509",
                *curve,
                "-subj",
                f"/CN={name}",
                "-addext",
                f"subjectAltName=DNS:{name}",
                "-addext",
                "basicConstraints=critical,CA:FALSE",
                "-CA",
                f"{who}.pem",
                "-CAkey",
                f"{who}.key",
                "-keyout",
                f"{who}-{kind}.key",
                "-out",
                f"{who}-{kind}.pem",
            )
    return folder


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
