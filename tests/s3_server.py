"""A real S3 server (moto) for tests, on a free port. Every start is an empty one."""

import os
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.extensions.objects.bucket import Bucket
from kvtier.extensions.objects.tier import ObjectTier
from kvtier.tiers.away.whole_objects import ObjectForm
from tests.child_process import ChildProcess
from tests.tier_chunks import CHUNK_BYTES, NAMESPACE

FORM = ObjectForm("cache/a", NAMESPACE)
URL = "s3://bucket/cache/a"
SECRET = "5ec3e75ec3e75ec3e7"


class S3Server(ChildProcess):
    """One moto server with an empty bucket called ``bucket``. ``refuses_after``: after so many
    requests it refuses access keys that it does not know."""

    def __init__(self, refuses_after=None):
        env = dict(os.environ)
        if refuses_after is not None:
            env["INITIAL_NO_AUTH_ACTION_COUNT"] = str(refuses_after)
        super().__init__(Path(os.devnull), env)
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._tiers: list[ObjectTier] = []

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def command(self):
        program = "from moto.server import main; main()"
        # Isolated (-I): it must not import what PYTHONPATH or the working directory holds.
        return [moto_python(), "-I", "-c", program, "-H", "127.0.0.1", "-p", str(self.port)]

    def answers(self):
        try:
            self._ask("GET", "/moto-api/")
        except OSError:
            return False
        return True

    def start(self):
        super().start()
        self._ask("PUT", "/bucket")

    def reset(self):
        """An empty bucket, and no tier on it."""
        while self._tiers:
            self._tiers.pop().close()
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", "/bucket")

    def tier(self, url=URL, *, capacity=64, clock=None):
        bucket = Bucket(url, CHUNK_BYTES)
        bytes_ = capacity * (CHUNK_BYTES + 80)
        tier = ObjectTier(bucket, FORM, bytes_, CHUNK_BYTES, *([] if clock is None else [clock]))
        self._tiers.append(tier)
        return tier

    def _ask(self, method, path):
        request = urllib.request.Request(self.endpoint + path, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            answer.read()


def moto_python():
    peers = Path(__file__).resolve().parents[1] / ".venv-peers"
    places = sorted(peers.glob("moto-*/bin/python"))
    return str(places[0]) if places else pytest.skip("moto is not installed (make peers)")


@contextmanager
def operated(environment):
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
                patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
