"""NVIDIA Dynamo's standalone indexer of KV events, as a process, and what it says."""

import urllib.error
import urllib.request

import pytest

from kvtier.bench.processes.servers import free_port
from tests.child_process import ChildProcess
from tests.conftest import ROOT
from tests.integration.http_engine import post

MODEL = "tiny"


class Indexer:
    def __init__(self, url):
        self.url = url

    def register(self, worker, endpoint, block_size):
        told = {"instance_id": worker, "endpoint": endpoint, "block_size": block_size}
        self._post("/register", told)

    def scores(self, tokens):
        """For each worker how many leading tokens it has, by the slowest medium that is counted:
        ``gpu``, ``cpu`` (with what the GPU has), ``disk`` (with all of them)."""
        try:
            found = self._post("/query", {"token_ids": tokens})
        except urllib.error.HTTPError:
            return {}
        return {int(worker): scores for worker, scores in found["instances"].items()}

    def _post(self, path, body):
        return post(self.url + path, body | {"model_name": MODEL})


class DynamoIndexer(ChildProcess):
    """Use as a context manager. Skips the test where Dynamo is not installed."""

    def __init__(self, folder):
        places = sorted(ROOT.glob(".venv-peers/dynamo-*/bin/python"))
        if not places:
            pytest.skip("NVIDIA Dynamo is not installed (make peers)")
        port = free_port()
        self._command = [str(places[0]), "-m", "dynamo.indexer", "--port", str(port)]
        self.indexer = Indexer(f"http://127.0.0.1:{port}")
        super().__init__(folder / "indexer.log", {"PATH": "/usr/bin:/bin"})

    def command(self):
        return self._command

    def answers(self):
        try:
            urllib.request.urlopen(f"{self.indexer.url}/health", timeout=5).close()  # noqa: S310
        except OSError:
            return False
        return True
