"""``kvtier top`` against a real server: one frame, a terminal that it draws in, and what it says
where it cannot draw."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvtier.admin.status import Stats
from kvtier.assemble import access
from kvtier.cli.top import Look, Screen
from kvtier.config.keys import Config
from kvtier.core.lookup import Progress, Served
from tests.admin_server import AdminServer, administered, spilled
from tests.child_process import DEADLINE_S, wait_for
from tests.integration.test_shell import ENV, ROOT, kvtier, without
from tests.server_process import LAYOUT, attached, load, run, save


def use(server: AdminServer) -> None:
    """Three chunks are saved, spilled and loaded. A fourth is not there."""
    with attached(server.access()) as client:
        save(client, run(0, 3))
        spilled(server, 3)
        load(client, run(0, 3))
        load(client, run(7, 1))
        client.served(Served(2048, {"ram": 768}, run(7, 1), 256))
        wait_for(lambda: server.metric("kvtier_asked_tokens_total") == 2048, "it was told")
    wait_for(lambda: server.metric("kvtier_connections", state="open") == 0, "the client has left")


def lines(text: str, first: str) -> list[str]:
    """The words of the line that begins so."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_one_frame_has_what_the_page_has() -> None:
    with administered() as server:
        use(server)
        done = server.cli("top", "--once")
        assert done.returncode == 0, done.stderr
        shown = done.stdout
        assert "ready" in shown and "TROUBLE" not in shown
        for title in ("Tiers, chunks of", "Hits by tier", "Why chunks were computed"):
            assert title in shown
        assert "0 connected" in shown and "0 rejected" in shown
        assert "What would hit more" in shown and " rules with " in shown
        assert ["ram", "3", "75.0%", "768", "37.5%"] in [*map(str.split, shown.splitlines())]
        assert lines(shown, "ideal") == ["ideal", "768", "37.5%"]
        assert lines(shown, "asked") == ["asked", "4", "2,048"]
        assert lines(shown, "cold") == ["cold", "1", "100.0%"]
        (name,) = server.ask("GET", "/v1/namespaces").body["namespaces"]
        assert f"Tenants and models: {name['engine']}" in shown


def test_an_engine_is_called_by_the_model_that_it_serves() -> None:
    """By the end of its name, where it is long. The name is no part of what decides about
    chunks."""
    with administered() as server:
        config = Config(server=str(server.address))
        for model, shown in (("tiny", "tiny"), ("/models/" + "x" * 80 + "/tiny", "xxx/tiny")):
            named = replace(LAYOUT, model=model)
            with attached(access(config, str(server.address), named)) as client:
                save(client, run(1, 2))
            (told,) = server.ask("GET", "/v1/namespaces").body["namespaces"]
            assert told["engine"].endswith(f"{shown}, process {os.getpid()}")
            assert len(told["engine"]) == min(64, len(f"{model}, process {os.getpid()}"))
            assert f"Tenants and models: {told['engine']}" in server.cli("top", "--once").stdout
        with attached(server.access()) as client:
            assert client.lookup(run(1, 2)).progress == Progress(2, 0)


def test_frames_show_rates_and_bars_between_looks() -> None:
    with administered() as server:
        screen = Screen()

        def look() -> Look:
            stats = msgspec.json.decode(server.ask("GET", "/v1/stats").text, type=Stats)
            return Look(stats, None)

        def drawn() -> str:
            console = Console(width=140, force_terminal=False)
            with console.capture() as shown:
                console.print(screen.frame())
            return shown.get()

        screen.add(look())
        assert "no engine has come yet" in drawn()
        use(server)
        screen.add(look())
        assert "loads/s" not in drawn(), "a size that was not there has no rates"
        with attached(server.access()) as client:
            load(client, run(0, 3))
        screen.add(look())
        assert "loads/s" in drawn() and "█" in drawn().split("over time")[1]
        screen.trouble = "the server does not answer"
        assert "TROUBLE: the server does not answer" in drawn()
        screen.add(look()._replace(stats=msgspec.structs.replace(look().stats, uptime_s=0.0)))
        assert "loads/s" not in drawn(), "a server that was started again begins anew"
        assert "TROUBLE" not in drawn()


def test_a_name_that_a_client_chose_is_not_followed_by_the_terminal() -> None:
    with administered() as server:
        screen = Screen()
        stats = msgspec.json.decode(server.ask("GET", "/v1/stats").text, type=Stats)
        screen.add(Look(stats, ["\x1b]0;owned\x07\x1b[2J", "\u202eabc", "\x9b31m", "a-1"]))
        console = Console(width=140, force_terminal=False)
        with console.capture() as shown:
            console.print(screen.frame())
    assert not set("\x1b\x07\x9b\u202e") & set(shown.get())
    assert r"\x1b]0;owned\x07\x1b[2J, \u202eabc, \x9b31m, a-1" in shown.get()


def test_it_draws_in_a_terminal_until_it_is_interrupted() -> None:
    with administered() as server:
        use(server)
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "kvtier", "top", "--admin", server.url]
        command += ["--token-file", str(server.token)]
        env = ENV | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "140", "LINES": "50"}
        top = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            # a shell that runs the tests in the background ignores it, for its children too
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        os.close(theirs)
        shown = bytearray()

        def frames(count: int) -> bool:
            shown.extend(os.read(ours, 65536))
            return shown.count(b"Hits by tier") >= count

        try:
            wait_for(lambda: frames(2), "two frames")
            assert b"\x1b[?1049h" in shown, "on a screen of its own"
            top.send_signal(signal.SIGINT)
            assert top.wait(DEADLINE_S) == 0
        finally:
            top.kill()
            top.wait()
            os.close(ours)


@pytest.mark.parametrize("admin", ["http://127.0.0.1:1", "off"])
def test_no_server_is_an_error_in_words(admin: str) -> None:
    done = kvtier("top", "--once", "--admin", admin)
    assert done.returncode != 0 and ("no kvtier server answers" in done.stderr) == (admin != "off")


def test_without_rich_it_says_what_to_do(tmp_path: Path) -> None:
    done = kvtier("top", "--once", env=without(tmp_path, "rich"))
    assert done.returncode == 2
    assert "pip install rich" in done.stderr and "kvtier stats" in done.stderr
