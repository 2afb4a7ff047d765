"""``make demo`` over a stand-in for vLLM's server: lines while it runs, a bound, and the table of
what is there when something ends it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bench.demo import Costs, Demo
from tests.child_process import DEADLINE_S

ROOT = Path(__file__).parents[3]
MODEL = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}
# vLLM's server as the client sees it. Of all starts only the first UP come up.
STAND_IN = """
import argparse, json, os, signal, sys, time
from tests.http_server import Exchange, Quiet
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
parser = argparse.ArgumentParser()
for flag in ("--host", "--port", "--kv-transfer-config"):
    parser.add_argument(flag)
given, _ = parser.parse_known_args()
mark = os.environ["STARTS"]
print("$", mark, flush=True)
with open(mark, "a") as starts:
    starts.write("x")
while os.path.getsize(mark) > int(os.environ["UP"]):
    time.sleep(0.01)
class Server(Exchange):
    def do(self):
        if self.command == "GET":
            return self.answer(b'{"version": "0"}')
        if self.path == "/tokenize":
            return self.answer(b'{"tokens": [1, 2, 3]}')
        if self.path == "/reset_prefix_cache":
            return self.answer(b'{"success": true}')
        events = [{"choices": [{"token_ids": [7]}]}]
        events += [{"choices": [], "usage": {"prompt_tokens": 4224, "completion_tokens": 1}}]
        self.answer("".join(f"data: {json.dumps(one)}\\n\\n" for one in events).encode())
Quiet((given.host, int(given.port)), Server).serve_forever()
"""
BENCH = """
import json, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in a shell's background ignore it
from kvtier.bench import demo
from kvtier.bench.processes import servers
servers._SERVER = "stand_in"
def make_model(folder, preset):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder
demo.make_model = make_model
demo._SETTLE_S = 0.0
sys.exit(demo.main(sys.argv[1:]))
"""


@contextmanager
def started(folder, up=99):
    """A benchmark in a process group of its own, as ``make`` starts it. Of its servers ``up`` come
    up."""
    (folder / "stand_in.py").write_text(STAND_IN)
    code = BENCH.replace("MODEL", str(MODEL))
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{ROOT}",
        "STARTS": str(folder / "starts"),
        "UP": str(up),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--output-dir", str(folder / "out")],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(process, words):
    """Its output up to the first line with these words."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"{words!r} was not told: {''.join(lines)}")


def ended(process):
    told, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, told


def arms(folder):
    """The arms in the file of results."""
    found: dict[str, Any] = json.loads((folder / "out/long_doc_qa.json").read_text())
    return set(found["arms"])


def alive(folder):
    """Processes whose environment names the folder."""
    return [
        entry.name
        for entry in Path("/proc").glob("[0-9]*")
        if str(folder / "starts").encode() in _environment(entry)
    ]


def _environment(entry):
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""


def test_a_quick_host_has_the_whole_story_within_the_bound(tmp_path):
    with started(tmp_path) as process:
        said = until(process, "At most 300 s")
        said += until(process, " arms, about 1 minute: kvtier-ram, kvtier-nvme-restart, none, ")
        said += until(process, "  kvtier-nvme-restart: first token after")
        assert "3 documents of 4,096 tokens" in said, "lines come while it runs"
        assert arms(tmp_path) == {"cold", "kvtier-ram", "kvtier-nvme-restart"}, "so does the file"
        status, said = ended(process)
    assert status == 0, said
    assert "kvtier-server: first token after" in said and "same greedy tokens as none" in said
    assert arms(tmp_path) >= {"none", "kvtier-ram", "kvtier-nvme-restart", "kvtier-server"}
    assert alive(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_leaves_the_table_of_what_is_there(tmp_path, number):
    """Twice, as make passes on what its group got already."""
    with started(tmp_path, up=1) as process:
        said = until(process, "server restarts ...")
        os.killpg(process.pid, number)
        if number != signal.SIGINT:
            os.killpg(process.pid, number)
        status, rest = ended(process)
    assert status == (-number if number == signal.SIGINT else 128 + number), said + rest
    assert "against cold" in rest and "kvtier-ram" in rest
    assert "It was stopped. Not measured: kvtier-nvme-restart, none" in rest
    assert arms(tmp_path) == {"cold", "kvtier-ram"}
    assert alive(tmp_path) == []


STORY = ["kvtier-ram", "kvtier-nvme-restart", "none"]


@pytest.mark.parametrize(
    ("costs", "tokens", "arms", "minutes"),
    [
        (Costs(8, 0.0005, 0.3), 4096, [*STORY, "kvtier-server", "kvtier-redis"], "2 minutes"),
        (Costs(60, 0.004, 3), 1024, STORY, "4 minutes"),
        (Costs(90, 0.008, 6), 1024, STORY[:2], "4 minutes"),
        (Costs(240, 0.02, 20), 512, STORY[:1], "5 minutes"),
    ],
)
def test_documents_and_arms_are_those_for_which_there_is_time(
    costs, tokens, arms, minutes, capsys, monkeypatch
):
    """``costs``: as on hosts of 1 to 200 seconds for an engine's start."""
    monkeypatch.setattr("shutil.which", lambda name: name)
    args: Any = SimpleNamespace(document_length=4096)
    demo = Demo(args, 300.0, begun=time.monotonic() - costs.start)
    demo._choose(costs)
    said = capsys.readouterr().err
    assert f" about {minutes}: {', '.join(arms)}\n" in said
    assert args.document_length == tokens and f"3 documents of {tokens:,} tokens" in said
