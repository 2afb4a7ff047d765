"""One engine's life, for the oracle: ``python -m tests.trust.identity.life OUT SPEC``, or by a fork
server. The engine answers each prompt of the specification twice, and tells what it runs.

What an engine runs is told by itself (:func:`facts`), because vLLM falls back in silence.
"""

import dataclasses
import enum
import gc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BLOCK = 32
ENGINE: dict[str, Any] = {
    "dtype": "float32",  # a prefill that is split elsewhere moves an answer's last bits only
    "max_model_len": 512,
    "enforce_eager": True,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 64,
    "seed": 0,
    "disable_log_stats": True,
}
"""Arguments of every engine, which a specification replaces."""
_TOP = 20
"""Log-probabilities of each answered token. vLLM gives no more unasked."""
_ANSWER_TOKENS = 6


class Life:
    """The engine, and how it is asked."""

    def __init__(self, spec):
        from vllm import LLM

        self.llm = LLM(spec["model"], **(ENGINE | spec["engine"]))
        self.model = spec["model"]

    def ask(self, prompt):
        from vllm import SamplingParams

        settings = SamplingParams(
            temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, logprobs=_TOP
        )
        (output,) = self.llm.generate(
            [self._inputs(prompt)], settings, use_tqdm=False, lora_request=_adapter(prompt)
        )
        answer = output.outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "top": [
                {str(token): one.logprob for token, one in step.items()}
                for step in answer.logprobs or ()
            ],
            "cached": output.num_cached_tokens,
        }

    def _inputs(self, prompt):
        if "chat" in prompt:
            told = self.llm.get_tokenizer().apply_chat_template(
                prompt["chat"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            return {"prompt_token_ids": list(told)}
        if "text" in prompt:
            return {"prompt": prompt["text"]}
        if "embeds" in prompt:
            import torch

            draw = torch.Generator().manual_seed(prompt["embeds"])
            return {"prompt_embeds": torch.randn(*prompt["shape"], generator=draw)}
        inputs = {"prompt_token_ids": prompt["tokens"]}
        if "salt" in prompt:
            inputs["cache_salt"] = prompt["salt"]
        if "pictures" in prompt:
            from tests.integration.tiny_models import picture

            inputs["multi_modal_data"] = {"image": [picture(one) for one in prompt["pictures"]]}
        for name in ("multi_modal_uuids", "mm_processor_kwargs"):
            if name in prompt:
                inputs[name] = prompt[name]
        return inputs


def _adapter(prompt):
    if "lora" not in prompt:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(*prompt["lora"])


def facts(llm):
    """What the engine runs: every value of its configuration by path, and under ``runs`` what its
    worker and its scheduler are made of."""
    config = llm.llm_engine.vllm_config
    found = dict(_flat("", config, 0))
    found |= _environment()
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return found
    found["runs.scheduler"] = type(core.scheduler).__name__
    executor = core.model_executor
    worker = getattr(executor, "driver_worker", None)
    if worker is None:
        return found
    runner = getattr(worker, "worker", worker).model_runner
    rooms = {one.__module__ for one in type(runner).__mro__}
    v2 = any(room.startswith("vllm.v1.worker.gpu.") for room in rooms)
    found["runs.runner"] = "V2" if v2 else "V1"
    found["runs.model"] = type(runner.model).__name__
    parameters = {str(one.dtype) for one in runner.model.parameters()}
    found["runs.dtypes"] = ",".join(sorted(parameters))
    backends, kinds, caches = set(), set(), set()
    for module in runner.model.modules():
        if quant := getattr(module, "quant_method", None):
            kinds.add(type(quant).__name__)
    for layer in config.compilation_config.static_forward_context.values():
        if get := getattr(layer, "get_attn_backend", None):
            backends.add(get().get_name())
        cache = getattr(layer, "kv_cache", None)
        for one in cache if isinstance(cache, (list, tuple)) else [cache]:
            if one is not None and hasattr(one, "dtype"):
                caches.add(f"{one.dtype}{list(one.shape[1:])}")
    found["runs.backends"] = ",".join(sorted(backends))
    found["runs.methods"] = ",".join(sorted(kinds))
    found["runs.caches"] = " ".join(sorted(caches))
    return found


def _environment():
    from vllm import envs

    found = {}
    for name in envs.environment_variables:
        if name in os.environ:
            found[f"env.{name}"] = str(getattr(envs, name))
    return found


_DEPTH = 6


def _flat(path, value, depth):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {
            field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
        }
    elif hasattr(value, "to_dict") and not isinstance(value, type):
        inner = value.to_dict()
    elif isinstance(value, Mapping):
        inner = dict(value)
    else:
        yield path, value.name if isinstance(value, enum.Enum) else str(value)[:300]
        return
    if depth < _DEPTH:
        for name, one in inner.items():
            yield from _flat(f"{path}.{name}" if path else str(name), one, depth + 1)


def live(spec, out):
    """Answer every prompt, twice, and write that with the facts. With ``hold``, two FIFOs by that
    name: tell by one that it is written, and live on until the other is closed."""
    life = Life(spec)
    try:
        found = facts(life.llm)
        answers = [[life.ask(one) for one in spec["prompts"]] for _ in range(2)]
        out.write_text(json.dumps({"facts": found, "answers": answers}))
        if hold := spec["hold"]:
            Path(f"{hold}.told").write_text("told")
            Path(hold).read_text()
    finally:
        life.llm.llm_engine.engine_core.shutdown()


def read_environment():
    """What was read when the fork server started: where modules lie, and the hub's cache."""
    if folder := os.environ.get("TEST_PYTHON"):
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    if home := os.environ.get("HF_HOME"):
        from huggingface_hub import constants

        constants.HF_HOME = home
        constants.HF_HUB_CACHE = constants.HUGGINGFACE_HUB_CACHE = f"{home}/hub"


def blind():
    """A fault: every engine's chunks have one name, whatever it runs."""
    from kvtier.connectors.vllm import layout

    setattr(layout, "fingerprint", lambda _: bytes(32))  # noqa: B010 no export of its own


def main():
    read_environment()
    if os.environ.get("TEST_BLIND") == "1":
        blind()
    out, spec = map(Path, sys.argv[1:3])
    import torch._dynamo

    torch._dynamo.config.disable = True  # vLLM compiles the ranks of log-probabilities: 3 seconds
    gc.freeze()  # what vLLM's import made is for ever: collecting it took 2 seconds
    asked = json.loads(spec.read_text())
    os.chdir(asked["folder"] or ".")
    live(asked, out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__mp_main__" and "TEST_PATCH" in os.environ:  # a worker of several
    from tests.integration.scenarios import PATCHES

    PATCHES[os.environ["TEST_PATCH"]]()
if __name__ == "__main__":
    main()
