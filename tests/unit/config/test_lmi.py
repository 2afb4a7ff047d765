"""LMI's two forms of an option, LMCache's variables, and what wins when several speak at once."""

import logging
import sys
from types import SimpleNamespace

import pytest

from kvtier.config import lmi
from kvtier.config.load import filled, load, replaces_lmcache
from kvtier.core.errors import ConfigError

GIB = 2**30
DJL = {
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "10.0",
    "LMCACHE_MAX_LOCAL_DISK_SIZE": "100.0",
    "LMCACHE_LOCAL_DISK": "file:///tmp/lmcache/",
    "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "True",
    "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
    "PYTHONHASHSEED": "0",
}
"""What LMI's own auto-config puts into the environment."""


@pytest.fixture(autouse=True)
def no_container(monkeypatch, tmp_path):
    """Where LMI would keep its file: not there unless a test writes it."""
    usual = tmp_path / "usual.properties"
    monkeypatch.setattr(lmi, "SERVING_PROPERTIES", str(usual))
    return usual


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("option.x=true", "true"),
        ("  option.x = true  ", "true"),
        ("option.x: true", "true"),
        ("option.x true", "true"),
        ("# option.x=false\n! option.x=false\noption.x=true\noption.xy=no", "true"),
        ("option.x=a,\\\n   b", "a,b"),
        ("option.x=C\\:\\\\d", "C:\\d"),
        ("option.x=false\noption.x=true", "true"),
        ("option.x", ""),
    ],
)
def test_java_properties(text, value):
    assert lmi.parse(text)["option.x"] == value


def test_serving_properties_is_found_where_lmi_keeps_it_and_where_it_is_named(
    no_container, tmp_path
):
    assert load(env={}).engine.auto is False
    no_container.write_text("engine=Python\noption.lmcache_auto_config=true\n")
    assert load(env={}).engine.auto is True
    assert load(env={}).sources["auto"] == f"option.lmcache_auto_config in {no_container}"
    other = tmp_path / "other.properties"
    other.write_text("option.lmcache_auto_config=False\n")
    named = {"KVTIER_PROPERTIES_FILE": str(other), "OPTION_LMCACHE_AUTO_CONFIG": "true"}
    assert load(env=named).engine.auto is False, "the model's own file comes first"


def test_a_config_file_named_there_counts_from_its_folder(tmp_path):
    (tmp_path / "lm.yaml").write_text("chunk_size: 512\n")
    properties = tmp_path / "serving.properties"
    properties.write_text("option.lmcache_config_file=lm.yaml\n")
    found = load(env={"KVTIER_PROPERTIES_FILE": str(properties)})
    got = (found.engine.chunk_tokens, found.sources["chunk_tokens"])
    assert got == (512, f"LMCache file {tmp_path}/lm.yaml: chunk_size")


def test_with_the_word_each_lmcache_variable_is_read_and_answered_for():
    found = load(env={**DJL, "KVTIER_REPLACE_LMCACHE": "1", "LMCACHE_ENABLE_P2P": "True"}, ranks=2)
    got = (found.ram.bytes_, found.nvme.bytes_, found.nvme.path)
    assert got == (20 * GIB, 200 * GIB, "/tmp/lmcache")
    assert found.sources["ram_bytes"] == "environment LMCACHE_MAX_LOCAL_CPU_SIZE"
    told = [remark.text for remark in found.remarks]
    said = [text.removeprefix("LMCache key ").partition("=")[0] for text in told]
    expected = {name.removeprefix("LMCACHE_").lower() for name in DJL} - {"extra_config"}
    assert sorted(said) == sorted(expected | {"extra_config.use_odirect", "enable_p2p"})
    (warning,) = [remark for remark in found.remarks if remark.level == logging.WARNING]
    assert "enable_p2p=True: has no effect" in warning.text


def test_the_word_must_be_a_flag_and_is_no_key():
    assert [
        replaces_lmcache({"KVTIER_REPLACE_LMCACHE": text}) for text in ("1", "true", "0", "")
    ] == [True, True, False, False]
    with pytest.raises(
        ConfigError, match="KVTIER_REPLACE_LMCACHE='perhaps': expected true or false"
    ):
        replaces_lmcache({"KVTIER_REPLACE_LMCACHE": "perhaps"})
    assert load(env={"KVTIER_REPLACE_LMCACHE": "1", "KVTIER_PROPERTIES_FILE": ""}).sources == {}


def test_lmcaches_connector_settings_are_named_and_not_ours():
    given = {"lmcache_rpc_port": "x", "chunk_tokens": 512}
    assert load(env={"KVTIER_REPLACE_LMCACHE": "1"}, flags=given).engine.chunk_tokens == 512
    with pytest.raises(ConfigError, match="unknown key 'lmcache_rpc_port'"):
        load(env={}, flags=given)


def test_lmis_own_sizes_are_the_most_auto_config_may_take():
    """LMI counts neither the cgroup nor what the disk holds. A smaller size of kvtier's plan wins,
    a larger one not."""
    env = {**DJL, "KVTIER_REPLACE_LMCACHE": "1", "OPTION_LMCACHE_AUTO_CONFIG": "True"}
    given = load(env=env)
    assert given.engine.auto and given.ram.bytes_ == 10 * GIB
    plan = {"ram_bytes": 4 * GIB, "nvme_path": "/tmp/lmcache", "nvme_bytes": 900 * GIB}
    planned = filled(given, plan, "auto-config")
    assert (planned.ram.bytes_, planned.sources["ram_bytes"]) == (4 * GIB, "auto-config")
    assert (planned.nvme.bytes_, planned.nvme.path) == (100 * GIB, "/tmp/lmcache")


def test_a_disk_that_auto_config_leaves_out_is_not_used_unless_its_size_was_given():
    plan = {"ram_bytes": GIB}
    place = {"KVTIER_AUTO": "1", "KVTIER_NVME_PATH": "/dev/shm/x"}
    assert filled(load(env=place), plan, "auto-config").nvme.path is None
    sized = filled(load(env={**place, "KVTIER_NVME_BYTES": "1GiB"}), plan, "auto-config")
    assert (sized.nvme.path, sized.nvme.bytes_) == ("/dev/shm/x", GIB)
    djl = {**DJL, "KVTIER_REPLACE_LMCACHE": "1", "OPTION_LMCACHE_AUTO_CONFIG": "1"}
    assert filled(load(env=djl), plan, "auto-config").nvme.path is None


@pytest.fixture
def factory(monkeypatch):
    """vLLM's registry of connectors with LMCache's in it, without vLLM."""
    known: dict[str, object] = {"LMCacheConnectorV1": "lmcache's"}

    def register_connector(name, module, cls):
        assert name not in known, "vLLM refuses a name twice"
        known[name] = (module, cls)

    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), SimpleNamespace(__path__=[]))
    vars(sys.modules["vllm"])["__version__"] = "0.32.0"
    module = sys.modules[name]
    vars(module)["KVConnectorFactory"] = SimpleNamespace(
        _registry=known, register_connector=register_connector
    )
    monkeypatch.delenv("KVTIER_REPLACE_LMCACHE", raising=False)
    return known


def test_the_plug_in_takes_lmcaches_place_only_when_told(factory, monkeypatch):
    from kvtier.connectors.vllm import register

    ours = ("kvtier.connectors.vllm", "KVTierConnector")
    register()
    assert factory == {"LMCacheConnectorV1": "lmcache's", "KVTierConnector": ours}
    monkeypatch.setenv("KVTIER_REPLACE_LMCACHE", "1")
    register()
    register()
    assert factory == {"LMCacheConnectorV1": ours, "KVTierConnector": ours}


def test_a_misspelt_option_is_told_with_the_nearest(tmp_path):
    """LMI itself says nothing, and the defaults would serve."""
    file = tmp_path / "serving.properties"
    file.write_text("option.lmcache_autoconfig=true\noption.tensor_parallel_degree=1\n")
    env = {
        "KVTIER_PROPERTIES_FILE": str(file),
        "OPTION_LMCACHE_CONFIG_FIL": "/x",
        "OPTION_MODEL_ID": "m",
        "OPTION_LMCACHE_AUTO_CONFIG": "true",
    }
    told = [remark.text for remark in load(env=env).remarks if "not an option" in remark.text]
    assert len(told) == 2
    assert told[0].startswith("option.lmcache_autoconfig is not an option of LMI's")
    assert told[0].endswith("option.lmcache_auto_config is one")
    assert told[1].endswith("OPTION_LMCACHE_CONFIG_FILE is one")
