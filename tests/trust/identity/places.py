"""Rows about where chunks lie, and about engines of several processes: a server with two engines at
once, Redis and a bucket between hosts, ranks of tensors and stages."""

from contextlib import contextmanager
from typing import Any

from tests.trust.identity import adapters, media, weights
from tests.trust.identity.rows import CONTROL, Base, Row, config, engine, family, file_changed

_V = "model.layers.0.self_attn.v_proj.weight"


@contextmanager
def of_server(folder):
    """One ``kvtier serve`` on the host."""
    from tests.server_process import serving

    with serving(ram_bytes="64MiB") as server:
        address = f"unix://{server.socket}"
        yield lambda spec, _: spec.with_tiers(server=address)


@contextmanager
def of_redis(folder):
    """A Redis that hosts share. Each engine has RAM of its own and nothing else."""
    from tests.redis_server import RedisServer

    with RedisServer() as redis:
        yield lambda spec, _: spec.with_tiers(redis_url=redis.url, redis_bytes="64MiB")


@contextmanager
def of_bucket(folder):
    from tests.s3_server import URL, S3Server

    with S3Server() as server:

        def stored(spec, _):
            given = spec.with_tiers(object_url=URL, object_bytes="64MiB")
            return given.environment_with(**server.environment)

        yield stored


BASES = [
    Base("server", family(), of_server, beside=True),
    Base("server+lora", adapters.adapted, of_server, beside=True),
    Base("server+media", media.named_by_counter, of_server, beside=True),
    Base("redis", family(), of_redis),
    Base("bucket", family(), of_bucket),
    Base("ranks", lambda folder: ranked(family()(folder), "tensor")),
]


def ranked(spec, kind):
    """Two ranks, in processes of their own."""
    more: dict[str, Any] = {f"{kind}_parallel_size": 2}
    spec = spec.environment_with(VLLM_CPU_OMP_THREADS_BIND="0|1")
    if kind == "pipeline":
        spec = spec.environment_with(TEST_PATCH="pipeline_buffers")
    return spec.engine_with(**more, distributed_executor_backend="mp")


def _everywhere(base):
    return [
        Row(CONTROL, base, lambda spec, _: spec, None, warm=True),
        Row("one byte of a matrix", base, file_changed(weights.byte_of(_V, 5))),
        Row("rope_theta", base, config("rope_parameters", "rope_theta", value=50000.0)),
        Row("dtype bfloat16", base, engine(dtype="bfloat16"), {"model_config.dtype": "bfloat16"}),
    ]


_RANKS = {"parallel_config.tensor_parallel_size": "2"}
ROWS = [
    *_everywhere("server"),
    *_everywhere("redis"),
    *_everywhere("bucket"),
    Row("another adapter by path, by ~ and by a hub id", "server+lora", adapters.another),
    Row(CONTROL, "server+lora", lambda spec, _: spec, None, warm=True),
    Row("named by a counter, another picture", "server+media", media.other_pictures),
    Row(CONTROL, "ranks", lambda spec, _: spec, None, warm=True),
    Row("one byte of a matrix", "ranks", file_changed(weights.byte_of(_V, 5))),
    Row("tensor_parallel_size 2", "tiny", lambda spec, _: ranked(spec, "tensor"), _RANKS),
    Row(
        "pipeline_parallel_size 2",
        "tiny",
        lambda spec, _: ranked(spec, "pipeline"),
        {"parallel_config.pipeline_parallel_size": "2"},
    ),
]
