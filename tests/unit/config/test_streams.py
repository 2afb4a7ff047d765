"""``admin.engines``: what is a list of event streams, and what is none."""

import pytest

from kvtier.config.values import Stream, masked, parse_stream, parse_streams


def test_names_endpoints_and_replay_endpoints():
    text = (
        "engine-1=tcp://10.0.0.1:5557?replay=5558, b=tcp://[::1]:1?replay=tcp://h:2,"
        "c=ipc:///run/e?replay=ipc:///run/r,d=tcp://host.name:3"
    )
    assert parse_streams(text) == [
        Stream("engine-1", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        Stream("b", "tcp://[::1]:1", "tcp://h:2"),
        Stream("c", "ipc:///run/e", "ipc:///run/r"),
        Stream("d", "tcp://host.name:3", None),
    ]


def test_a_servers_own_stream_has_no_name():
    assert parse_stream("tcp://127.0.0.1:5561?replay=5562") == Stream(
        "server", "tcp://127.0.0.1:5561", "tcp://127.0.0.1:5562"
    )
    for text in ("", "a=tcp://h:1", "tcp://h:1,b=tcp://h:2", "tcp://*:5557", "5561"):
        with pytest.raises(ValueError, match=r"no list of event streams|too many values"):
            parse_stream(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "engine-1",
        "engine-1=",
        "=tcp://h:1",
        "a b=tcp://h:1",
        f"{'n' * 65}=tcp://h:1",
        "a=tcp://h",
        "a=tcp://*:5557",
        "a=http://h:1",
        "a=ipc://relative",
        "a=tcp://h:1?replay=",
        "a=tcp://h:1?replay=http://h:2",
        "a=tcp://h:1?other=2",
        "a=ipc:///x?replay=2",
        "a=tcp://h:1,",
        "a=tcp://h:1,a=tcp://h:2",
        ",".join(f"e{number}=tcp://h:1" for number in range(65)),
    ],
)
def test_what_is_no_list_of_streams(text):
    with pytest.raises(ValueError, match="no list of event streams"):
        parse_streams(text)


def test_streams_are_shown_as_they_are_and_a_password_in_them_is_not():
    for text in (
        "engine-1=tcp://10.0.0.1:5557?replay=5558",
        "a=ipc:///run/e?replay=ipc:///run/r, b=tcp://h:1?replay=2",
        "ipc:///run/events?replay=ipc:///run/replay",
        "tcp://127.0.0.1:5561?replay=5562",
    ):
        assert masked(text) == text
    for text in (
        "a=tcp://secret@h:1?replay=2",
        "tcp://secret@h:1?replay=2",
        "a=tcp://h:1?x=secret",
    ):
        assert "secret" not in str(masked(text))
