"""vLLM's OpenAI server, asked by HTTP."""

import json
import re
import urllib.request
from typing import Any

from kvtier.bench.processes.servers import VllmServer
from tests.child_process import DEADLINE_S, wait_for


def post(url, body=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | named)  # noqa: S310
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:  # noqa: S310
        said = reply.read().decode()
    return json.loads(said) if said.startswith(("{", "[")) else said


def body_of(prompt, **more):
    body: dict[str, Any] = {"model": "tiny", "prompt": list(prompt), "max_tokens": 8}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    return body | more


def complete(url, body, **headers):
    reply = post(f"{url}/v1/completions", body, **headers)
    (choice,) = reply["choices"]
    return {
        "tokens": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "cached": (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        "reply": reply,
    }


class HttpEngine(VllmServer):
    def complete(self, prompt, headers=None, **more):
        return complete(self.base_url, body_of(prompt, **more), **(headers or {}))

    def metrics(self):
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=DEADLINE_S) as reply:  # noqa: S310
            return str(reply.read().decode()).splitlines()

    def metric(self, name, **labels):
        """The sum of a metric's series that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in self.metrics() if re.match(rf"{name}[{{ ]", line)]
        return sum(float(line.split()[-1]) for line in found if all(one in line for one in wanted))

    def reset(self, **query):
        """Whether vLLM's own cache is empty. With async scheduling it is not, soon after an
        answer: :meth:`forget`."""
        words = "&".join(f"{name}={str(value).lower()}" for name, value in query.items())
        return post(f"{self.base_url}/reset_prefix_cache?{words}")["success"]

    def forget(self):
        wait_for(self.reset, "its blocks are free")
