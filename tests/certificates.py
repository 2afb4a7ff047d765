"""Certificates for tests of TLS, made by openssl."""

import subprocess

_NEW = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"


def make_certificates(folder):
    """Two authorities, ``ours`` and ``theirs``, and of each a certificate for localhost,
    ``ours-host`` and so on, and one for another name, ``ours-other``: ``.pem`` and ``.key`` files
    in ``folder``."""
    for who in ("ours", "theirs"):
        _make(folder, who, f"/CN={who}")
        for kind, name in (("host", "localhost"), ("other", "elsewhere")):
            names = ["-addext", f"subjectAltName=DNS:{name}"]
            names += ["-addext", "basicConstraints=critical,CA:FALSE"]
            signed = ["-CA", f"{who}.pem", "-CAkey", f"{who}.key"]
            _make(folder, f"{who}-{kind}", f"/CN={name}", *names, *signed)
    return folder


def _make(folder, file, subject, *words):
    files = ["-keyout", f"{file}.key", "-out", f"{file}.pem"]
    openssl(folder, *_NEW.split(), "-subj", subject, *words, *files)


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
