"""``kvtier top`` against a real server: one frame, a terminal that it draws in, and what it says
where it cannot draw."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from kvtier.admin.status import Stats
from kvtier.cli.top import Look, screen
from kvtier.config.keys import Config
from kvtier.core.lookup import Progress, Served
from kvtier.started import Started
from tests.admin_server import administered, spilled
from tests.child_process import DEADLINE_S, wait_for
from tests.command import ROOT, bare, kvtier
from tests.integration.test_shell import without
from tests.server_process import LAYOUT, attached, load, run, save


def use(server):
    """Three chunks are saved, spilled and loaded. A fourth is not there."""
    with attached(server.access()) as client:
        save(client, run(0, 3))
        spilled(server, 3)
        load(client, run(0, 3))
        load(client, run(7, 1))
        client.served(Served(2048, {"ram": 768}, run(7, 1), 256))
        wait_for(lambda: server.metric("kvtier_asked_tokens_total") == 2048, "it was told")
    wait_for(lambda: server.metric("kvtier_connections", state="open") == 0, "the client has left")


def lines(text, first):
    """The words of the line that begins so."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_one_frame_has_what_the_page_has():
    with administered() as server:
        use(server)
        done = server.cli("top", "--once")
        assert done.returncode == 0, done.stderr
        shown = done.stdout
        assert "ready" in shown and "TROUBLE" not in shown
        assert "hit rate 37.5% in the last minute, 37.5% of 2,048 tokens since the start" in shown
        assert "(37.5% if nothing had ever left); saved compute 36.8%" in shown
        assert "0 connected" in shown and "rejected" not in shown, "what is 0 is left out"
        assert "policy: lru rules, " in shown
        assert "computed: 100% cold" in shown
        ram, nvme = (lines(shown.partition("hits over")[0], tier) for tier in ("ram", "nvme"))
        heads = lines(shown, "tier")
        assert heads[:8] == ["tier", "held", "full", "holds", "of", "hits", "loads", "stores"]
        assert ram[-7:-4] == ["37.5%", "3", "3"] and nvme[-7:-4] == ["0.0%", "0", "3"]
        (name,) = server.ask("GET", "/v1/namespaces").body["namespaces"]
        assert f"tenants and models: {name['engine']}" in shown


def test_an_engine_is_called_by_the_model_that_it_serves():
    with administered() as server:
        config = Config().with_keys(server=str(server.address))
        for model, shown in (("tiny", "tiny"), ("/models/" + "x" * 80 + "/tiny", "xxx/tiny")):
            named = replace(LAYOUT, model=model)
            with attached(Started(config).access(str(server.address), named)) as client:
                save(client, run(1, 2))
            (told,) = server.ask("GET", "/v1/namespaces").body["namespaces"]
            assert told["engine"].endswith(f"{shown}, process {os.getpid()}")
            assert len(told["engine"]) == min(64, len(f"{model}, process {os.getpid()}"))
            frame = server.cli("top", "--once").stdout
            assert f"tenants and models: {told['engine']}" in frame
            assert frame.count("(tiny)") == 1, "its last part, beside the size of its chunks"
        with attached(server.access()) as client:
            assert client.lookup(run(1, 2)).progress == Progress(2, 0)


def test_a_name_that_a_client_chose_is_not_followed_by_the_terminal():
    with administered() as server:
        stats = msgspec.json.decode(server.ask("GET", "/v1/stats").text, type=Stats)
        shown = screen(Look(stats, ["\x1b]0;owned\x07\x1b[2J", "\u202eabc", "\x9b31m", "a-1"]))
    assert not set("\x1b\x07\x9b\u202e") & set(shown)
    assert r"\x1b]0;owned\x07\x1b[2J, \u202eabc, \x9b31m, a-1" in shown


def resized(terminal, columns, lines):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def its_own_terminal():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def drawing(server, shown):
    """The command in a terminal of 80 columns and 24 lines, and the other end of that."""
    ours, theirs = pty.openpty()
    resized(theirs, 80, 24)
    command = [sys.executable, "-m", "kvtier", "top", "--admin", server.url]
    command += ["--token-file", str(server.token)]
    sizes = {name: value for name, value in bare().items() if name not in ("COLUMNS", "LINES")}
    top = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=sizes | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        preexec_fn=its_own_terminal,  # noqa: PLW1509
    )
    before = termios.tcgetattr(theirs)
    try:
        yield ours
        assert top.wait(DEADLINE_S) == 0
        assert termios.tcgetattr(theirs) == before, "typing is seen again afterwards"
    finally:
        top.kill()
        top.wait()
        os.close(ours)
        os.close(theirs)


def frames(shown):
    """The lines of each frame that is whole, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-GI-Z]", "", shown.decode(errors="replace"))
    return [frame.split("\r\n") for frame in text.split("\x1b[H")[1:-1]]


def until(shown, terminal, condition, words):
    def read():
        shown.extend(os.read(terminal, 65536))
        return condition()

    wait_for(read, words)


@pytest.mark.parametrize("end", ["q", "Ctrl-C"])
def test_it_draws_in_a_small_terminal_until_it_is_ended(end):
    with administered() as server:
        use(server)
        shown = bytearray()
        with drawing(server, shown) as terminal:
            until(shown, terminal, lambda: len(frames(shown)) >= 2, "two frames")
            assert b"\x1b[?1049h" in shown, "on a screen of its own"
            frame = frames(shown)[-1]
            assert max(map(len, frame)) <= 80 and len(frame) <= 24
            assert frame[0].startswith("kvtier ") and frame[1].startswith("hit rate 37.5%")
            assert "…" not in "".join(frame), "nothing is cut"
            assert any(line.startswith("tenants and models") for line in frame)
            resized(terminal, 120, 30)
            wide = "tokens since the start (37.5% if nothing had ever left)"
            until(shown, terminal, lambda: wide in frames(shown)[-1][1], "the new width")
            resized(terminal, 80, 8)
            few = "more in a higher window)"
            until(
                shown,
                terminal,
                lambda: few in "".join(frames(shown)[-1]),
                "what has no room is told",
            )
            os.write(terminal, {"q": b"q", "Ctrl-C": b"\x03"}[end])


@pytest.mark.parametrize("admin", ["http://127.0.0.1:1", "off"])
def test_no_server_is_an_error_in_words(admin):
    done = kvtier("top", "--once", "--admin", admin)
    assert done.returncode != 0 and ("no kvtier server answers" in done.stderr) == (admin != "off")


def test_without_rich_it_says_what_to_do(tmp_path):
    done = kvtier("top", env=without(tmp_path, "rich"))
    assert done.returncode == 2
    assert "pip install rich" in done.stderr and "kvtier stats" in done.stderr
