"""LMCache's configuration files as LMI's and LMCache's own documentation have them: each one starts
an engine.

What kvtier has is used. What it lacks is named in warnings, and RAM and NVMe serve without it.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import lmcache
from kvtier.config.keys import Config
from kvtier.config.load import load

FILES = Path(__file__).parents[2] / "data" / "lmcache"
GIB = 2**30
LOADED: dict[str, dict[str, Any]] = {
    "lmi_cpu": {"ram_bytes": 10 * GIB},
    "lmi_local_storage": {"nvme_path": "/tmp/lmcache"},
    "lmi_performance": {
        "ram_bytes": 20 * GIB,
        "nvme_path": "/tmp/lmcache",
        "nvme_bytes": 100 * GIB,
    },
    "lmi_nvme": {"ram_bytes": 210 * GIB, "nvme_path": "/tmp/lmcache", "nvme_bytes": 66 * GIB},
    "lmi_redis": {"redis_url": "redis://cache.example:6379"},
}
"""File -> what it sets, besides 256 tokens a chunk. Nothing in it is asked for in vain."""
PARTLY: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "redis_hosts": ({"ram_bytes": 5 * GIB}, ("remote_url=redis://",)),
    "s3": ({"ram_bytes": 50 * GIB, "nvme_path": "/tmp/lmcache", "nvme_bytes": 100 * GIB,
            "load_timeout_ms": 10_000},
        ("remote_url=s3://", "extra_config.s3_region")),
    "mooncakestore": ({"ram_bytes": 20 * GIB},
        ("remote_url=mooncakestore://", "extra_config.master_server_address",
            "extra_config.transfer_timeout")),
    "infinistore": ({"ram_bytes": 20 * GIB}, ("remote_url=***",)),
    "lm_server": ({"ram_bytes": 5 * GIB}, ("remote_url=lm://", "remote_serde=cachegen")),
    "valkey": ({"redis_url": "redis://localhost:6379"}, ("extra_config.valkey_password=***",)),
}  # fmt: skip
"""File -> what it sets, and what its warnings name."""
SENTINELS = ("redis_sentinel", "redis_cluster")


def of(name, **env):
    return load(env={"LMCACHE_CONFIG_FILE": str(FILES / f"{name}.yaml"), **env})


def warnings(config):
    return [remark for remark in config.remarks if remark.level >= logging.WARNING]


def test_every_file_is_tested():
    assert {file.stem for file in FILES.glob("*.yaml")} == LOADED.keys() | PARTLY.keys() | set(
        SENTINELS
    )


@pytest.mark.parametrize("name", LOADED)
def test_a_documented_file_is_loaded_whole(name):
    config = of(name)
    assert config == Config().with_keys(**LOADED[name])
    assert warnings(config) == []


@pytest.mark.parametrize("name", PARTLY)
def test_a_warning_names_each_key_that_kvtier_lacks_and_the_rest_serves(name):
    expected, named = PARTLY[name]
    config = of(name)
    assert config == Config().with_keys(**expected)
    told = "\n".join(warning.text for warning in warnings(config))
    assert all(told.count(name) == 1 for name in named)
    assert "hidden-word" not in str(config.remarks)


@pytest.mark.parametrize("name", [*LOADED, *PARTLY])
def test_every_key_is_remarked_on_once(name):
    content = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    extra = content.pop("extra_config", {})
    said = "\n".join(remark.text for remark in of(name).remarks)
    for key in [*content, *(f"extra_config.{key}" for key in extra)]:
        assert said.count(f" {key}=") == 1, key


@pytest.mark.parametrize(
    ("name", "service", "url"),
    [
        (
            "redis_sentinel",
            {},
            "redis+sentinel://user:secret@s1:26379,s2:26379,s3:26379/redismaster",
        ),
        (
            "redis_sentinel",
            {"redis_service_name": "kv"},
            "redis+sentinel://user:secret@s1:26379,s2:26379,s3:26379/kv",
        ),
        ("redis_cluster", {}, "redis+cluster://n1:6379,n2:6379"),
    ],
)
def test_sentinel_and_cluster_in_kvtiers_words(name, service, url):
    raw = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    notes = lmcache.translate({**raw, **service}, ranks=1)
    assert [note.value for note in notes if note.ours == "redis_url"] == [url]
    assert not any(note.lost for note in notes)


def test_sentinels_service_comes_from_the_variable_that_lmcache_reads():
    env = {"REDIS_SERVICE_NAME": "kv", "LMCACHE_CHUNK_SIZE": "256"}
    for every in (False, True):
        assert lmcache.from_environment(env, every=every)["redis_service_name"] == "kv"
    assert lmcache.variable("redis_service_name") == "REDIS_SERVICE_NAME"


@pytest.mark.parametrize(
    "lines", ["local_disk: /a\nremote_url: file:///b", "remote_url: file:///b\nlocal_disk: /a"]
)
def test_two_folders_are_one_too_many(tmp_path, lines):
    file = tmp_path / "two.yaml"
    file.write_text(lines)
    config = load(env={"LMCACHE_CONFIG_FILE": str(file)})
    assert config.nvme.path == "/a"
    (warning,) = warnings(config)
    assert "remote_url=file:///b: not used: local_disk names the NVMe tier's folder" in warning.text


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://bucket.s3.eu-west-1.amazonaws.com", "KVTIER_OBJECT_URL=s3://bucket/prefix"),
        ("mooncakestore://m:50051/", "KVTIER_MOONCAKE_URL='mooncake://master:50051?bytes=64GiB'"),
    ],
)
def test_a_store_that_kvtier_has_under_a_key_of_its_own_is_named_by_that_key(url, told):
    (note,) = lmcache.translate({"remote_url": url}, ranks=1)
    assert note.lost and told in note.reason


def test_a_key_that_is_misspelt_is_told_from_one_that_kvtier_lacks():
    raw = {"chunck_size": 128, "enable_p2p": True, "max_local_cpu_sise": 0}
    typo, lacking, other = lmcache.translate(raw, ranks=1)
    assert typo.lost and typo.reason.endswith("has no effect; chunk_size is one")
    assert lacking.lost and lacking.reason == "has no effect in kvtier"
    assert other.lost and "max_local_cpu_size is one" in other.reason


def test_what_every_tutorial_of_lmcaches_sets_is_no_warning(tmp_path):
    file = tmp_path / "none.yaml"
    file.write_text("chunk_size: 256\n")
    env = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_USE_EXPERIMENTAL": "True"}
    assert warnings(load(env=env)) == []
    assert not lmcache.translate({"use_experimental": True}, ranks=1)[0].lost
