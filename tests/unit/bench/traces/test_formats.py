"""Each form of recorded requests is told from its file, read as promised, and simulated. What is
none of them is told with what to do."""

import json
import struct

import pytest

from kvtier.bench.traces.formats import FORMS, read
from kvtier.bench.traces.simulate import unique
from kvtier.cli.main import main
from kvtier.core.errors import ConfigError


def written(folder, name, *lines):
    """A file with these lines, as JSON unless they are text."""
    path = folder / name
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in lines))
    return str(path)


def chat(number, ids, parent=-1, length=None):
    """A request as Bailian records it."""
    tokens = 16 * len(ids) if length is None else length
    told = {"timestamp": 0.5 * number, "input_length": tokens, "output_length": 7, "turn": 1}
    return {"chat_id": number, "parent_chat_id": parent, **told, "hash_ids": list(ids)}


def agent(name, *requests, scope="local"):
    """A conversation as kv-cache-tester records it."""
    told = {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": list(requests)}
    return told | {"models": ["m"], "tool_tokens": 64, "system_tokens": 64}


def turn(at, ids, length=None):
    tokens = 64 * len(ids) if length is None else length
    return {"t": at, "type": "s", "in": tokens, "out": 3, "hash_ids": list(ids), "stop": ""}


def shared(trace, first, second):
    """How many leading chunks two requests have in common."""
    runs = trace.requests[first].run, trace.requests[second].run
    return next((at for at, (a, b) in enumerate(zip(*runs, strict=False)) if a != b), len(runs[0]))


def test_mooncakes_lines_are_read_and_more_fields_are_allowed(tmp_path):
    line = {"timestamp": 2000, "input_length": 1100, "output_length": 1, "hash_ids": [7, 8, 9]}
    path = written(tmp_path, "trace.jsonl", line | {"session": "a", "over": True, "colour": "red"})
    trace = read(path)
    assert (trace.form, trace.block_tokens) == ("mooncake", 512)
    (request,) = trace.requests
    assert (request.at, len(request.run), request.session, request.hint.over) == (2.0, 2, "a", True)
    assert len(read(path, partial=True).requests[0].run) == 3


def test_bailians_chats_are_sessions_and_their_ids_stand_for_their_own_tokens(tmp_path):
    chats = [chat(1, [5, 6, 7]), chat(2, [5, 6, 7, 8], parent=1), chat(3, [9, 6, 7])]
    chats.append(chat(4, [5, 6, 7, 8, 9], parent=2, length=79))
    path = written(tmp_path, "qwen.jsonl", *chats)
    trace = read(path)
    assert (trace.form, trace.block_tokens) == ("bailian", 16)
    assert [request.session for request in trace.requests] == ["1", "1", "3", "1"]
    assert [request.at for request in trace.requests] == [0.5, 1.0, 1.5, 2.0]
    assert shared(trace, 0, 1) == 3
    assert shared(trace, 0, 2) == 0 and unique(trace.requests) == 7, (
        "equal blocks behind another beginning are other chunks"
    )
    assert len(trace.requests[3].run) == 4, "its last block is not full"
    assert len(read(path, partial=True).requests[3].run) == 5


def test_a_folder_of_conversations_is_one_trace_by_time(tmp_path):
    aside = {"t": 3, "type": "subagent", "agent_id": "x", "requests": [turn(3.5, [1, 2, 3])]}
    written(tmp_path, "a.json", agent("a", turn(0, [1, 2]), aside, turn(9, [1, 2, 3], 150)))
    written(tmp_path, "b.json", agent("b", turn(4, [1, 2])))
    trace = read(str(tmp_path))
    assert (trace.form, trace.block_tokens) == ("kv-cache-tester", 64)
    order = [(request.at, request.session) for request in trace.requests]
    assert order == [(0, "a"), (3.5, "a/x"), (4, "b"), (9, "a")]
    assert shared(trace, 0, 1) == 2, "a sub-agent has the ids of its conversation"
    assert shared(trace, 0, 2) == 0, "another conversation has ids of its own"
    assert len(trace.requests[3].run) == 2, "its last block is not full"


@pytest.mark.parametrize("lines", [True, False])
def test_conversations_with_global_ids_share_chunks(tmp_path, lines):
    whole = agent("a", turn(0, [1, 2]), scope="global")
    other = agent("b", turn(1, [1, 2, 3]), scope="global")
    if lines:
        assert shared(read(written(tmp_path, "t.jsonl", whole, other)), 0, 1) == 2
    else:
        path = written(tmp_path, "t.json", json.dumps(whole, indent=1))
        assert len(read(path).requests) == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("# time, object, size, next_access_vtime", "1, 4a, 10, 3", "2, 5, 7, -1", "3, 4a, 10, -1"),
        ("1,4a,10", "2,5,7", "3,4a,10"),
        ("obj_id,op,time", "4a,get,1", "5,get,2", "4a,set,3"),
        ("version,time,op,size,lbn", "1,1,2a,512,4a", "1,2,2a,512,5", "1,3,28,512,4a"),
    ],
)
def test_libcachesims_csv_is_read_by_its_header_or_by_place(tmp_path, lines):
    trace = read(written(tmp_path, "trace.csv", *lines))
    assert (trace.form, trace.block_tokens) == ("libcachesim-csv", 0)
    runs = [request.run for request in trace.requests]
    assert [request.at for request in trace.requests] == [1, 2, 3]
    assert runs[0] == runs[2] != runs[1] and len(runs[0]) == 1


def test_oracle_general_is_read(tmp_path):
    path = tmp_path / "trace.bin"
    rows = [(1, 9, 10, 2), (1, 2**63, 5, -1), (4, 9, 10, -1)]
    path.write_bytes(b"".join(struct.pack("<IQIq", *row) for row in rows))
    trace = read(str(path))
    assert trace.form == "oracle-general"
    assert [request.at for request in trace.requests] == [1, 1, 4]
    assert shared(trace, 0, 2) == 1 and shared(trace, 0, 1) == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"hello\n", "begins with 'hello'.*--format"),
        (b"\0\1\2\3" * 10, "binary data"),
        (b"\x28\xb5\x2f\xfd rest", "zstd -d"),
        (b"\x1f\x8b rest", "gunzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b'{"chat_id": 1, "hash_ids": [1]}', "read as bailian: line 1: .*input_length"),
        (b'{"hash_ids": 3}', "read as mooncake: line 1"),
        (b'{"requests": [{"t": 0}], "block_size": 64}', "read as kv-cache-tester: bad: .*hash_ids"),
        (b'{"requests": ' + b"[" * 100_000, "read as kv-cache-tester: maximum recursion"),
        (b'{"requests": [{"t": NaN, "hash_ids": [], "in": 1}], "block_size": 64}', "the time is"),
        (b"time,obj_id\n1,2\nx,3\n", "read as libcachesim-csv: line 3"),
        (b'{"hash_ids": [1], "timestamp": 1' + b"0" * 400 + b"}", "read as mooncake: .*float"),
        (b'{"requests": 1' + b"0" * 5000 + b"}", "read as kv-cache-tester: Exceeds the limit"),
    ],
)
def test_what_is_no_trace_is_told_and_what_to_do(tmp_path, content, says, capsys):
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read(str(path))
    assert main(["simulate", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_the_form_can_be_forced(tmp_path, capsys):
    path = written(tmp_path, "t", chat(1, [1, 2]), chat(2, [1, 2]))
    assert main(["simulate", path, "--ram", "4", "--policy", "lru", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)
    assert (case["asked"], case["ram"]) == (4, 2)
    with pytest.raises(ConfigError, match=r"read as libcachesim-csv: line 1: .*header with one of"):
        read(path, "libcachesim-csv")
    assert read(path, "mooncake", partial=True).form == "mooncake"
    for form in ("oracle-general", "kv-cache-tester"):
        with pytest.raises(ConfigError, match=f"read as {form}"):
            read(path, form)
    assert len(FORMS) == 5
