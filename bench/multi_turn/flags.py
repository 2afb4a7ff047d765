"""The command line of the multi-turn benchmark."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from kvtier.bench.long_doc_qa.flags import DTYPE_BYTES, positive, seconds, url, words
from kvtier.bench.multi_turn.arms import ARMS, Arm

SHAPE = ("sessions", "turns", "first_length", "turn_length", "output_len", "think_seconds", "seed")
"""What goes into the results as the workload."""
SESSION_BY = ("header", "cookie", "user")
_ROUTER = "haproxy -db -f deploy/routing/haproxy.cfg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; every length is in tokens."""
    add = parser.add_argument
    add(
        "--model", help="directory or name; with --base-url the name it serves (default: its first)"
    )
    add(
        "--base-url",
        type=url,
        metavar="URL",
        help="measure this running router instead of starting one per arm",
    )
    add(
        "--arms",
        type=_arms,
        default=list(ARMS.values()),
        help=f"of {','.join(ARMS)} (default: all)",
    )
    add(
        "--session-by",
        choices=SESSION_BY,
        default="header",
        help="what tells a router the conversation (default: header)",
    )
    _add_shape(parser)
    add(
        "--request-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="for one request (default: 600)",
    )
    add(
        "--require-same-tokens",
        action="store_true",
        help="exit with 1 when an arm answers differently from the first",
    )
    folder = Path("build/multi_turn")
    add(
        "--output-dir",
        type=Path,
        default=folder,
        help=f"for multi_turn.json, .csv, .png and logs (default: {folder})",
    )
    _add_own(parser)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """What the conversations are like; every length is in tokens."""
    add = parser.add_argument
    add("--sessions", type=positive, default=8, help="conversations at once (default: 8)")
    add("--turns", type=positive, default=4, help="of each (default: 4)")
    add(
        "--first-length",
        type=positive,
        default=2048,
        help="tokens of the first turn's prompt (default: 2048)",
    )
    add(
        "--turn-length",
        type=positive,
        default=128,
        help="tokens the user adds in every other turn (default: 128)",
    )
    add("--output-len", type=positive, default=32, help="tokens of an answer (default: 32)")
    add(
        "--think-seconds",
        type=seconds,
        default=2.0,
        metavar="S",
        help="mean pause before a turn (default: 2)",
    )
    add("--seed", type=int, default=0, help="of words and pauses")


def _add_own(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("engines and router started here").add_argument
    own(
        "--load-every-hit",
        action="store_true",
        help="load hits even where computing is sooner, as with a tiny model in a test",
    )
    about = "after this turn of all conversations one engine is killed (default: none)"
    own("--kill-after-turn", type=positive, metavar="TURN", help=about)
    about = "command of the router, which reads ROUTER_HOST, ROUTER_PORT, ENGINE_1 and ENGINE_2"
    own(
        "--router",
        type=_command,
        default=_command(_ROUTER),
        metavar="'COMMAND'",
        help=f"{about} (default: {_ROUTER})",
    )
    about = "conversations that the GPU cache of an engine holds (default: 1.5)"
    own("--gpu-conversations", type=seconds, default=1.5, metavar="N", help=about)
    own(
        "--dtype",
        choices=["auto", *DTYPE_BYTES],
        default="auto",
        help="float32 makes answers comparable bit by bit",
    )
    own(
        "--block-size",
        type=positive,
        help="vLLM's block in tokens (default: 128 on CPU, 16 on GPU)",
    )
    own("--chunk-tokens", type=positive, default=256, help="kvtier's chunk (default: 256)")
    own("--server-args", type=words, default="", metavar="'ARGS'", help="more arguments for vLLM")
    about = "until an engine must be healthy (default: 600)"
    own("--server-timeout", type=seconds, default=600.0, metavar="S", help=about)


def _arms(text: str) -> list[Arm]:
    unknown = [name for name in text.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown arm {', '.join(unknown)}; known: {', '.join(ARMS)}"
        )
    return [ARMS[name] for name in text.split(",")]


def _command(text: str) -> list[str]:
    found = shlex.split(words(text))
    if not found:
        raise argparse.ArgumentTypeError("the router's command is empty")
    return found
