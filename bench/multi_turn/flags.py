"""The command line of the multi-turn benchmark."""

from __future__ import annotations

import argparse
import shlex

from kvtier.bench.flags import add_engine_flags, add_run_flags, positive, seconds, words
from kvtier.bench.multi_turn.arms import ARMS

SESSION_BY = ("header", "cookie", "user")
_ROUTER = "haproxy -db -f deploy/routing/haproxy.cfg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. Every length is in tokens."""
    add_run_flags(parser, "multi_turn", "router", ARMS)
    about = "what tells a router the conversation (default: header)"
    parser.add_argument("--session-by", choices=SESSION_BY, default="header", help=about)
    _add_shape(parser)
    group = parser.add_argument_group("engines and router started here")
    add_engine_flags(group)
    own = group.add_argument
    about = "after this turn of all conversations one engine is killed (default: none)"
    own("--kill-after-turn", type=positive, metavar="TURN", help=about)
    about = "command of the router, which reads ROUTER_HOST, ROUTER_PORT, ENGINE_1, ENGINE_2"
    about += f" and for cache-aware arms ROUTER_LOOKUP (default: {_ROUTER})"
    own("--router", type=_command, default=_command(_ROUTER), metavar="'COMMAND'", help=about)
    about = "conversations that the GPU cache of an engine holds (default: 1.5)"
    own("--gpu-conversations", type=seconds, default=1.5, metavar="N", help=about)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """What the conversations are like."""
    add = parser.add_argument
    add("--sessions", type=positive, default=8, help="conversations at once (default: 8)")
    add("--turns", type=positive, default=4, help="of each (default: 4)")
    about = "tokens of the first turn's prompt (default: 2048)"
    add("--first-length", type=positive, default=2048, help=about)
    about = "tokens that the user adds in every other turn (default: 128)"
    add("--turn-length", type=positive, default=128, help=about)
    add("--output-len", type=positive, default=32, help="tokens of an answer (default: 32)")
    about = "mean pause before a turn (default: 2)"
    add("--think-seconds", type=seconds, default=2.0, metavar="S", help=about)
    add("--seed", type=int, default=0, help="for words and pauses")


def _command(text: str) -> list[str]:
    found = shlex.split(words(text))
    if not found:
        raise argparse.ArgumentTypeError("the router's command is empty")
    return found
