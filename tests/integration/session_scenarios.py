"""Streaming sessions on an engine that sees: run as :mod:`tests.integration.scenarios` is."""

import asyncio
import os
import time
from functools import partial
from typing import Any

from tests.integration.scenarios import _LONG_S, BLOCK, CHUNK, PLENTY, answer, answered, document
from tests.integration.tiny_models import IMAGE_TOKENS, image_token, picture
from tests.integration.transfer import transfer

FIRST = 3 * CHUNK + 8
"""Tokens of a session's first turn."""
SECOND = 17 * BLOCK - 1 - FIRST - 3
"""Tokens of its second, with the image: of four that were answered before, three are kept, so that
the whole is as long as the prompts of :mod:`tests.integration.mode_scenarios`."""


class Streaming:
    """vLLM's asynchronous engine."""

    def __init__(self, model):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        more: dict[str, Any] = (
            {"kv_transfer_config": transfer()} if os.environ.get("WITH_KVTIER") == "1" else {}
        )
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model,
                dtype="float32",
                max_model_len=736,
                enforce_eager=True,
                block_size=BLOCK,
                seed=0,
                num_gpu_blocks_override=PLENTY,
                **more,
            )
        )
        self._image = image_token(model)
        self._asked = 0

    async def session(self, number):
        """A turn of text and, after its answer, another with a picture. ``whole``: the prompt that
        came of it."""
        from vllm.engine.protocol import StreamingInput

        answered = asyncio.Event()

        async def turns():
            yield StreamingInput({"prompt_token_ids": document(0, FIRST)}, self._settings(4))
            await answered.wait()
            yield StreamingInput(self._seen(_second(), number), self._settings(8))

        tokens, logprobs, cached = list[int](), list[float](), 0
        async for output in self.engine.generate(turns(), self._settings(8), self._name()):
            part = answer(output)
            tokens += part["tokens"]
            logprobs += part["logprobs"]
            cached = max(cached, output.num_cached_tokens or 0)
            if len(tokens) >= 4:
                answered.set()
        whole = document(0, FIRST) + tokens[:3]
        return {"tokens": tokens, "logprobs": logprobs, "cached": cached, "before": whole}

    async def ask(self, before, number):
        prompt = self._seen(before + _second(), number, len(before))
        settings = self._settings(8)
        tokens, logprobs, cached = list[int](), list[float](), 0
        async for output in self.engine.generate(prompt, settings, self._name()):
            part = answer(output)
            tokens += part["tokens"]
            logprobs += part["logprobs"]
            cached = output.num_cached_tokens
            assert len(output.prompt_token_ids) == FIRST + 3 + SECOND
        return {"tokens": tokens, "logprobs": logprobs, "cached": cached}

    async def reset(self):
        until = time.monotonic() + _LONG_S
        while not await self.engine.reset_prefix_cache():  # blocks are free one step later
            assert time.monotonic() < until, "blocks are held"

    def _seen(self, tokens, number, begin=0):
        at = begin + 10
        prompt = [*tokens[:at], self._image, *tokens[at:]]
        return {"prompt_token_ids": prompt, "multi_modal_data": {"image": picture(number)}}

    def _settings(self, tokens):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )

    def _name(self):
        self._asked += 1
        return f"request {self._asked}"


def _second():
    return document(1, SECOND - IMAGE_TOKENS)


async def _image_later(model):
    streaming = Streaming(model)
    told = {"session": await streaming.session(0)}
    before = told["session"]["before"]
    told["own"] = await streaming.ask(before, 0)
    await streaming.reset()
    told["warm"] = await streaming.ask(before, 0)
    await streaming.reset()
    told["other, only kvtier"] = await streaming.ask(before, 1)
    told["other, own"] = await streaming.ask(before, 1)
    told["session, own"] = await streaming.session(0)
    await streaming.reset()
    told["session, warm"] = await streaming.session(0)
    await streaming.reset()
    told["session, other"] = await streaming.session(1)
    streaming.engine.shutdown()
    return told


def image_later(model):
    """Sessions that add an image to what was text. What they leave is then asked as one prompt,
    with that image and with another."""
    return asyncio.run(_image_later(model))


main = partial(answered, globals())
if __name__ == "__main__":
    main()
