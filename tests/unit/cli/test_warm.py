"""``kvtier warm`` and what it sends, against an HTTP server that answers as vLLM's does."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.processes.servers import free_port
from kvtier.cli import main as cli
from tests.http_server import answered_by

CHUNK = 8


class Served:
    """A character is a token. ``limit``: longer prompts are refused. ``asked``: the completions.
    ``told``: what it says of its cache. ``lacks``: a page."""

    url, lacks, limit = "", "", 10_000

    def __init__(self):
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.told: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": 3}}

    def __call__(self, exchange):
        exchange.answer(*self._said(exchange))

    def _said(self, exchange):
        if exchange.command == "GET":
            return _json({"data": [{"id": "m"}, {"id": "adapter"}]}), 200
        body = json.loads(exchange.body)
        self.keys.add(exchange.headers.get("Authorization", ""))
        if exchange.path == self.lacks:
            return _json({"error": "no such page"}), 404
        if exchange.path.endswith("/tokenize"):
            added = [1] if body.get("add_special_tokens", True) else []
            return _json({"tokens": [*added, *map(ord, body["prompt"])]}), 200
        if len(body["prompt"]) > self.limit:
            return _json({"error": {"message": "the prompt is\ntoo long"}}), 400
        self.asked.append(body)
        usage = {"prompt_tokens": len(body["prompt"])} | self.told
        return _json({"choices": [{"text": "x"}], "usage": usage}), 200


def _json(told):
    return json.dumps(told).encode()


@pytest.fixture
def served():
    served = Served()
    with answered_by(served) as served.url:
        yield served


@pytest.fixture
def files(tmp_path):
    """The flags that name an anchor of 3 tokens and documents of 4 and 5."""
    (tmp_path / "anchor").write_text("<s>")
    (tmp_path / "documents").write_text('"cats"\n\n{"id": 7, "text": "a dog"}\n')
    return ["--anchor", str(tmp_path / "anchor"), "--documents", str(tmp_path / "documents")]


def warm(served, *words):
    chunk = ["--chunk-tokens", str(CHUNK)]
    return cli.main(["warm", "--base-url", served.url, *chunk, *words])


def prompts(served):
    return ["".join(map(chr, body["prompt"])) for body in served.asked]


def test_homes_are_sent_as_plain_completions_of_one_token(served, files, capsys):
    assert warm(served, *files) == 0
    assert prompts(served) == ["<s>catss", "<s>a dog"]
    fields = {"model", "prompt", "max_tokens", "temperature"}
    assert all(set(body) == fields for body in served.asked)
    assert {(body["model"], body["max_tokens"]) for body in served.asked} == {("m", 1)}
    shown = capsys.readouterr()
    assert shown.out == "2 homes of 16 tokens in all; 10 were computed, 6 were cached\n"
    assert shown.err == ""


def test_model_salt_and_key_are_the_ones_given(served, files, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    more = ["--model", "adapter", "--cache-salt", "s", "--api-key-file", str(key)]
    assert warm(served, *files, *more) == 0
    asked = {(body["model"], body["cache_salt"]) for body in served.asked}
    assert asked == {("adapter", "s")}
    assert served.keys == {"Bearer secret"}


def test_token_ids_are_sent_as_they_are(served, tmp_path):
    served.lacks = "/tokenize"
    (tmp_path / "anchor.json").write_text("[1, 2]")
    (tmp_path / "documents").write_text('[3, 4]\n{"tokens": [5]}')
    files = ["--anchor", str(tmp_path / "anchor.json"), "--documents", str(tmp_path / "documents")]
    assert warm(served, *files) == 0
    found = [body["prompt"] for body in served.asked]
    assert found == [[1, 2, 3, 4, 4, 4, 4, 4], [1, 2, 5, 5, 5, 5, 5, 5]]


def test_the_chunk_is_the_configurations_where_it_is_not_given(served, files, tmp_path):
    (tmp_path / "kvtier.yaml").write_text("chunk_tokens: 32\n")
    config = ["--config", str(tmp_path / "kvtier.yaml")]
    assert cli.main(["warm", "--base-url", served.url + "/v1/", *files, *config]) == 0
    assert {len(body["prompt"]) for body in served.asked} == {32}


def test_a_refused_home_is_named_by_its_line_and_the_others_go_on(served, tmp_path, capsys):
    served.limit, served.told = 100, {}
    (tmp_path / "anchor").write_text("a")
    lines = [json.dumps(text) for text in ("x" * 200, "short")]
    (tmp_path / "documents").write_text("\n".join(lines))
    files = ["--anchor", str(tmp_path / "anchor"), "--documents", str(tmp_path / "documents")]
    assert warm(served, *files, "--json") == 1
    shown = capsys.readouterr()
    assert "documents, line 1: HTTP 400" in shown.err and "the prompt is" in shown.err
    found = json.loads(shown.out) | {"refused": 0}
    assert found == {"homes": 1, "tokens": 8, "cached": None, "refused": 0}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("cats", "line 2: JSON is malformed"),
        ("7", "line 2: Expected"),
        ('{"body": "cats"}', "line 2: Expected"),
        ('{"tokens": ["cats"]}', "line 2: Expected"),
        ('""', "line 2: the document is empty"),
    ],
)
def test_a_line_that_is_no_document_is_named_before_anything_is_sent(
    served, files, line, told, capsys
):
    Path(files[3]).write_text(f'"cats"\n{line}\n')
    assert warm(served, *files) == 2
    assert told in capsys.readouterr().err
    assert served.asked == []


def test_no_documents_and_no_files_are_errors(served, files, capsys):
    Path(files[3]).write_text("\n")
    assert warm(served, *files) == 2
    assert "expected a document a line" in capsys.readouterr().err
    Path(files[1]).write_bytes(b"\xff")
    assert warm(served, *files) == 2
    assert "expected text in UTF-8" in capsys.readouterr().err
    Path(files[1]).unlink()
    assert warm(served, *files) == 2
    assert "No such file" in capsys.readouterr().err


def test_who_does_not_answer_or_is_no_engine_is_told(served, files, capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert cli.main(["warm", "--base-url", url, *files]) == 2
    shown = capsys.readouterr().err
    assert f"--base-url {url}: /v1/models was not answered" in shown and shown.count("\n") == 1
    assert cli.main(["warm", "--base-url", "localhost:8000", *files]) == 2
    assert "expected an address such as" in capsys.readouterr().err
    assert warm(served, *files, "--model", "other") == 2
    assert "serves m, adapter; give one of these" in capsys.readouterr().err
    served.lacks = "/tokenize"
    assert warm(served, *files) == 2
    assert "the anchor is a text, and" in capsys.readouterr().err
