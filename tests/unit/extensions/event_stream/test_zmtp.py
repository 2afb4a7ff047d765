"""What the other end of an event stream may send: bounded before any of it is read."""

import asyncio
import socket

import pytest

from kvtier.extensions import zmtp
from kvtier.extensions.zmtp import Peer, ZmtpError, accepted_peer

MOST = 16 << 20
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"


def command(body, size=None):
    return b"\x06" + (len(body) if size is None else size).to_bytes(8, "big") + body


def message(*frames):
    more = [1] * (len(frames) - 1) + [0]
    return b"".join(
        bytes([flags | 2]) + len(frame).to_bytes(8, "big") + frame
        for flags, frame in zip(more, frames, strict=True)
    )


def heard(said, then, ready=READY):
    """What ``then`` makes of a peer that has said this after its greeting, and what it got."""

    async def meet():
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            ours.setblocking(False)
            peer = await accepted_peer(ours, MOST)
            theirs.send(zmtp._GREETING + ready + said)
            try:
                await peer.greet("PUB", ["SUB"])
                async with asyncio.timeout(20):
                    found = await then(peer)
                await asyncio.sleep(0)
            finally:
                peer.close()
            return found, theirs.recv(1 << 16)

    return asyncio.run(meet())


@pytest.mark.parametrize("size", [1025, 8 << 20, 1 << 60])
def test_a_long_command_is_refused_before_it_is_read(size):
    with pytest.raises(ZmtpError, match="a command of more than 1,024 bytes"):
        heard(command(b"\x09SUBSCRIBE", size), Peer.receive)


def test_a_command_as_long_as_is_allowed_is_read():
    topic = bytes(1024 - 10)
    found, _ = heard(command(b"\x09SUBSCRIBE" + topic), Peer.receive)
    assert found == [b"\x01" + topic]


def test_a_cancel_and_a_subscription_are_told_apart():
    found, _ = heard(command(b"\x06CANCELkv"), Peer.receive)
    assert found == [b"\x00kv"]


def test_a_ping_is_answered_with_its_own_context_and_no_more():
    said = command(b"\x04PING\x00\x10" + b"c" * 20) + message(b"topic")
    found, got = heard(said, Peer.receive)
    assert found == [b"topic"]
    assert got.endswith(b"\x04\x15\x04PONG" + b"c" * 16)


def test_a_message_is_bounded_with_all_of_its_frames():
    quarter = bytes(MOST // 4)
    assert heard(b"\x00\x02ok", Peer.receive)[0] == [b"ok"]
    second = b"\x02" + (MOST // 2 + 1).to_bytes(8, "big")

    async def both(peer):
        peer._reader.feed_data(2 * (b"\x03" + len(quarter).to_bytes(8, "big") + quarter) + second)
        await peer.receive()

    with pytest.raises(ZmtpError, match="a message of more than 16,777,216 bytes"):
        heard(b"", both)


@pytest.mark.parametrize("frames", [8, 9])
def test_a_message_has_at_most_eight_frames(frames):
    if frames == 8:
        assert len(heard(message(*[b"f"] * frames), Peer.receive)[0]) == 8
        return
    with pytest.raises(ZmtpError, match="more than 8 frames"):
        heard(message(*[b"f"] * frames), Peer.receive)


def test_a_command_inside_of_a_message_ends_the_connection():
    with pytest.raises(ZmtpError, match="a command inside of a message"):
        heard(b"\x01\x01a" + command(b"\x04PING\x00\x10"), Peer.receive)


@pytest.mark.parametrize(
    "ready",
    [b"\x04\x06\x05READY", b"\x00\x06\x05READY", READY[:-3] + b"PUB", b"\x04\x02\x05R"],
    ids=["no type", "no command", "another type", "no READY"],
)
def test_a_peer_of_another_kind_is_refused(ready):
    with pytest.raises(ZmtpError):
        heard(message(b"x"), Peer.receive, ready)
