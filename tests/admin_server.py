"""A real kvtier server with its admin interface, for tests: asked by HTTP and by kvtier's own
commands."""

import http.client
import json
import re
import threading
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from kvtier.bench.processes.servers import free_port
from kvtier.core.lookup import Progress
from tests.child_process import DEADLINE_S, wait_for
from tests.command import kvtier
from tests.server_process import ServerProcess, run, save, short_folder

NVME = 1 << 20
TOKEN = "0123456789abcdef0123456789abcdef"
Body = dict[str, Any]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def body(self):
        return json.loads(self.text)


class AdminServer(ServerProcess):
    """A server with its surface at a port of its own and a token, unless told otherwise (None: not
    set). ``settings``: see :class:`ServerProcess`."""

    def __init__(self, folder, *listen, **settings):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)
        given = {
            "admin": self.url,
            "admin_token_file": self.token,
            "nvme_path": folder / "nvme",
            "nvme_bytes": NVME,
        }
        kept: dict[str, Any] = {
            name: value for name, value in (given | settings).items() if value is not None
        }
        super().__init__(folder, *listen, **kept)

    def ask(self, method, path, body=None, *, token=TOKEN, **headers):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        if body is not None:
            sent = {"Content-Type": "application/json"} | sent
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with closing(line):
            line.request(method, path, json.dumps(body) if isinstance(body, dict) else body, sent)
            answer = line.getresponse()
            return Answer(
                answer.status,
                {k.lower(): v for k, v in answer.getheaders()},
                answer.read().decode(),
            )

    def clear(self, **body):
        answer = self.ask("POST", "/v1/clear", body)
        assert answer.status == 200, answer
        return answer.body

    def lookup(self, **body):
        answer = self.ask("POST", "/v1/lookup", body)
        assert answer.status == 200, answer
        return answer.body

    def metric(self, name, **labels):
        """Sum of a metric's samples that have these labels."""
        text = self.ask("GET", "/metrics").text
        lines = [line for line in text.splitlines() if re.match(rf"{name}[ {{]", line)]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if all(one in line for one in wanted)
        )

    def cli(self, *words):
        return kvtier(*words, env=self._env)


@contextmanager
def administered(*listen, **settings):
    with short_folder() as folder, AdminServer(folder, *listen, **settings) as server:
        yield server


def spilled(server, chunks):
    wait_for(
        lambda: server.metric("kvtier_held_chunks", tier="nvme") == chunks,
        f"{chunks} chunks on disk",
    )


@contextmanager
def clearing(server, client):
    """``acme`` is cleared while it saves three more chunks than its two. The list gets the answer.
    The block begins when the clearing is at work. It ends with the save's commit."""
    save(client, run(1, 2))
    done: list[Any] = []
    with client.save(run(2, 3)) as lease:
        thread = threading.Thread(target=lambda: done.append(server.clear(namespace="acme")))
        thread.start()
        wait_for(lambda: client.lookup(run(1, 2)).progress == Progress(0, 0), "clear is at work")
        yield done
        lease.commit()
    thread.join(DEADLINE_S)
