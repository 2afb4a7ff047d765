"""The configuration: sources and their order, parsing, errors, and LMCache's files."""

import logging
import re

import pytest
import yaml

from kvtier.cli.main import main
from kvtier.config import lmcache
from kvtier.config.keys import (
    KEYS,
    REMOVED,
    SECTIONS,
    Config,
    default_ram_bytes,
    describe,
    file_lines,
)
from kvtier.config.load import filled, load
from kvtier.config.values import masked
from kvtier.core.errors import ConfigError
from kvtier.core.terminal import exact_size, parse_size
from kvtier.tiers.nvme.parts import default_bytes

GIB = 2**30
LMI_EXAMPLE = """\
chunk_size: 256
local_disk: "file:///tmp/lmcache/"
max_local_disk_size: 66.0
max_local_cpu_size: 210.0
extra_config: {'use_odirect': True}
"""


def written(folder, text):
    path = folder / "given.yaml"
    path.write_text(text)
    return str(path)


def source_of(config, key):
    return next(row.source for row in describe(config) if row.key == key)


# ---------------------------------------------------------------- sources


def test_without_anything_the_defaults_hold():
    config = load(env={})
    assert config == Config()
    rows = describe(config)
    assert [row.key for row in rows] == list(KEYS) and {row.source for row in rows} == {"default"}
    assert all(row.unit and row.reason for row in rows)


def test_each_source_beats_the_one_before(tmp_path):
    text = "engine: {chunk_tokens: 512, host_engines: 3}\nserver: {timeout_ms: 5}\n"
    file = written(tmp_path, text)
    env = {"KVTIER_CONFIG_FILE": file, "KVTIER_HOST_ENGINES": "4", "KVTIER_SERVER_TIMEOUT_MS": "6"}
    config = load(env=env, flags={"server_timeout_ms": 7, "save_decode": None})
    found = (config.engine.chunk_tokens, config.engine.host_engines, config.server.timeout_ms)
    assert found == (512, 4, 7)
    assert source_of(config, "chunk_tokens") == f"file {file}"
    assert source_of(config, "host_engines") == "environment KVTIER_HOST_ENGINES"
    assert source_of(config, "server_timeout_ms") == "flag"
    assert source_of(config, "save_decode") == "default"


def test_a_file_given_by_name_beats_the_environments(tmp_path):
    given = written(tmp_path, "chunk_tokens: 512\n")
    assert (
        load(
            given, env={"KVTIER_CONFIG_FILE": "/nowhere", "LMCACHE_CONFIG_FILE": "/nowhere"}
        ).engine.chunk_tokens
        == 512
    )


def test_an_empty_file_null_and_an_empty_variable_say_nothing(tmp_path):
    assert load(written(tmp_path, "")) == Config()
    assert load(written(tmp_path, "ram_bytes: null\n"), env={"KVTIER_CHUNK_TOKENS": ""}) == Config()


def test_a_lower_value_is_checked_even_when_a_higher_one_wins(tmp_path):
    with pytest.raises(ConfigError, match="chunk_tokens='many'"):
        load(written(tmp_path, "chunk_tokens: many\n"), env={}, flags={"chunk_tokens": 256})


# ---------------------------------------------------------------- sections


def test_a_file_has_sections_and_each_key_is_in_one(tmp_path):
    assert len(KEYS) <= 36
    text = "\n".join(file_lines((key, None, "a\ncomment") for key in KEYS))
    assert load(written(tmp_path, text)) == Config()
    assert set(yaml.safe_load(text)) == set(SECTIONS)
    text = (
        "nvme: {path: /kv, bytes: 2GiB}\nram:\nadmin: {address: off}\nserver: {address: unix:///s}"
    )
    config = load(written(tmp_path, text))
    assert (config.nvme.path, config.nvme.bytes_) == ("/kv", 2 * GIB)
    assert (config.admin.address, config.server.address) == ("off", "unix:///s")
    assert config.remarks == ()


def test_what_kvtier_writes_it_reads(tmp_path):
    given = load(env={"KVTIER_REDIS_URL": "redis://h:1/0", "KVTIER_NAMESPACE": "on"})
    rows = [(row.key, row.value, row.reason) for row in describe(given)]
    assert load(written(tmp_path, "\n".join(file_lines(rows)))) == given


def test_an_old_flat_name_is_read_and_told_its_new_one_once(tmp_path):
    config = load(written(tmp_path, "server: unix:///s\nnvme_path: /kv\nnvme: {bytes: 1GiB}\n"))
    found = (config.server.address, config.nvme.path, config.nvme.bytes_)
    assert found == ("unix:///s", "/kv", GIB)
    told = [remark.text for remark in config.remarks]
    assert len(told) == 2
    assert "is an old name of server.address" in told[0]
    assert "is an old name of nvme.path" in told[1]


@pytest.mark.parametrize(("text", "message"), [
    ("nvme: {pth: /kv}", "unknown key 'nvme.pth' .* nearest is 'nvme.path'"),
    ("engine: {nvme_path: /kv}", "unknown key 'engine.nvme_path' .* nearest is 'nvme.path'"),
    ("server: {server: 1}", "unknown key 'server.server' .* nearest is 'server.address'"),
    ("nvme_pth: /kv", r"unknown key 'nvme_pth' \(file .*given\.yaml\); the nearest is 'nvme.path'"),
    ("nvme: {threads: 4}", r"'nvme.threads' .* is not a key any more"),
    ("nvme: /kv", "nvme='/kv' .* expected a section .* such as nvme.path"),
    ("nvme: {path: /a}\nnvme_path: /b", "nvme.path and its old name stand in"),
    ("server: [a]", r"server='\(list\)' .* expected unix:///path"),
])  # fmt: skip
def test_a_key_that_is_not_in_its_section_is_an_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, text))


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_says_what_does_it_now(tmp_path, key):
    assert key not in KEYS
    message = f"'{key}' .* is not a key any more: {re.escape(REMOVED[key])}; remove it"
    with pytest.raises(ConfigError, match=message):
        load(env={f"KVTIER_{key.upper()}": "1"})
    with pytest.raises(ConfigError, match=message):
        load(env={}, flags={key: 1})
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, f"{key}: 1\n"))


def test_flags_may_have_sections():
    config = load(env={}, flags={"nvme": {"path": "/kv"}, "ram_bytes": "1GiB"})
    assert (config.nvme.path, config.ram.bytes_) == ("/kv", GIB)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({"KVTIER_CHUNK_TOKEN": "256"}, {}),
        ({}, {"chunk_token": 256}),
        ({"KVTIER_CHUNKTOKENS": "1"}, {}),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(env, flags):
    with pytest.raises(
        ConfigError, match=r"unknown key 'chunk_?tokens?' .* nearest is 'chunk_tokens'"
    ):
        load(env=env, flags=flags)


def test_an_lmcache_key_in_our_file_says_which_variable_to_use(tmp_path):
    with pytest.raises(ConfigError, match="LMCACHE_CONFIG_FILE"):
        load(written(tmp_path, "max_local_cpu_size: 5.0\n"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("ram_bytes", "4 potatoes", "a size such as 4GiB"),
        ("ram_bytes", "50%", "a size such as 4GiB"),
        ("ram_bytes", 0, "a size such as 4GiB"),
        ("ram_bytes", True, "a size such as 4GiB"),
        ("chunk_tokens", 0, "at least 1"),
        ("chunk_tokens", -256, "at least 1"),
        ("chunk_tokens", 2.5, "whole number"),
        ("host_engines", True, "whole number"),
        ("save_decode", "maybe", "true or false"),
        ("nvme_path", "relative/folder", "absolute path"),
        ("server", "http://host:1", "unix:///path"),
        ("namespace", "a b", "letters"),
        ("log_level", "LOUD", "DEBUG"),
    ],
)
def test_a_bad_value_says_given_where_expected_and_what_to_do(key, value, expected):
    with pytest.raises(ConfigError) as raised:
        load(env={}, flags={key: value})
    message = str(raised.value)
    assert message.startswith(f"{key}={value!r} (flag): expected ")
    assert expected in message
    assert message.endswith("correct it or remove it")


@pytest.mark.parametrize("key", ["nvme_bytes", "redis_bytes", "redis_ttl_s"])
def test_a_key_that_would_have_no_effect_is_an_error(key):
    with pytest.raises(
        ConfigError, match=f"{key}=4096 has no effect without (nvme_path|redis_url)"
    ):
        load(env={}, flags={key: 4096})


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is not YAML"), ("- a\n- b\n", "found list")]
)
def test_a_file_that_is_no_mapping_is_an_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, text))


@pytest.mark.parametrize("variable", [
    "KVTIER_CONFIG_FILE", "LMCACHE_CONFIG_FILE", "OPTION_LMCACHE_CONFIG_FILE",
    "KVTIER_PROPERTIES_FILE",
])  # fmt: skip
def test_a_named_file_that_is_missing_is_an_error(variable):
    with pytest.raises(ConfigError, match=r"'/nowhere/x.yaml' cannot be read"):
        load(env={variable: "/nowhere/x.yaml"})


def test_a_kubernetes_service_called_kvtier_is_no_configuration():
    links = {
        "KVTIER_SERVICE_HOST": "10.0.0.1",
        "KVTIER_SERVICE_PORT": "7000",
        "KVTIER_SERVICE_PORT_METRICS": "9000",
        "KVTIER_PORT": "tcp://10.0.0.1:7000",
        "KVTIER_PORT_7000_TCP_ADDR": "10.0.0.1",
        "KVTIER_SERVER_PORT": "tcp://10.0.0.1:7000",
    }
    assert load(env=links) == Config()


def test_passwords_are_shown_nowhere():
    config = load(env={}, flags={"redis_url": "redis://me:s3:c@ret@host:6379/0"})
    assert config.value("redis_url") == "redis://me:s3:c@ret@host:6379/0"
    shown = next(row.value for row in describe(config) if row.key == "redis_url")
    assert shown == "redis://me:***@host:6379/0"
    assert masked("unix:///run/r.sock?password=s3cret&db=1") == "unix://:***@/run/r.sock?db=1"
    assert masked("unix:///run/kvtier.sock") == "unix:///run/kvtier.sock"
    assert masked("tcp://host:7000") == "tcp://host:7000"
    with pytest.raises(ConfigError) as raised:
        load(env={}, flags={"redis_url": "http://:s3cret@host"})
    assert "s3cret" not in str(raised.value)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * GIB),
        ("4Gi", 4 * GIB),
        ("4 gib", 4 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("512MB", 512_000_000),
        ("512M", 512_000_000),
        ("64k", 64_000),
        ("2TiB", 2 * 2**40),
        ("1048576", 1 << 20),
        ("4096B", 4096),
        (1 << 30, 1 << 30),
        (2097152.0, 2 << 20),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_size(exact_size(size)) == size


@pytest.mark.parametrize("given", [64, "64", "1048575", "3"])
def test_a_small_size_without_a_unit_is_an_error_everywhere(given, tmp_path):
    """LMCache's max_local_cpu_size: 64 is GB. In a file, the environment and a flag as typed."""
    said = re.escape(f"{given} is {given} bytes: write {given}GiB, or {given}B for bytes")
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"ram:\n  bytes: {given}\n")
    with pytest.raises(ConfigError, match=said):
        load(file)
    with pytest.raises(ConfigError, match=said):
        load(env={"KVTIER_RAM_BYTES": str(given)})
    with pytest.raises(ConfigError, match=said):
        load(flags={"ram_bytes": str(given)}, env={})
    assert load(flags={"ram_bytes": 64}, env={}).ram.bytes_ == 64, "a program's number is exact"
    lmcache_file = tmp_path / "lmcache.yaml"
    lmcache_file.write_text(f"max_local_cpu_size: {given}\n")
    assert load(env={"LMCACHE_CONFIG_FILE": str(lmcache_file)}).ram.bytes_ == int(given) << 30
    with pytest.raises(SystemExit):
        main(["plan", "--ram", str(given)])


def test_a_small_size_that_is_written_is_read_again():
    (section, _, line) = file_lines([("slot_bytes", 4096, "a comment")])
    assert (section, line) == ("server:", '  bytes: "4096B"') or line.endswith('"4096B"')


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("YES", True), ("1", True), ("off", False), (False, False)]
)
def test_flags(word, value):
    assert load(env={}, flags={"save_decode": word}).engine.save_decode is value


def test_default_sizes_leave_the_host_its_own():
    assert default_ram_bytes(8 * GIB) == 2 * GIB
    assert default_ram_bytes(1024 * GIB) == 32 * GIB
    assert default_bytes(100 * GIB) == 50 * GIB
    assert default_bytes(4096 * GIB) == 256 * GIB


# ---------------------------------------------------------------- LMCache's files


@pytest.mark.parametrize("variable", ["LMCACHE_CONFIG_FILE", "OPTION_LMCACHE_CONFIG_FILE"])
def test_lmis_example_file_is_understood(tmp_path, variable):
    config = load(env={variable: written(tmp_path, LMI_EXAMPLE)}, ranks=4)
    assert (config.engine.chunk_tokens, config.nvme.path) == (256, "/tmp/lmcache")
    assert (config.ram.bytes_, config.nvme.bytes_) == (4 * 210 * GIB, 4 * 66 * GIB)
    told = [remark.text for remark in config.remarks]
    assert len(told) == 5
    assert (
        f"LMCache key max_local_cpu_size=210.0 -> ram_bytes={840 * GIB} (210 GiB per worker x 4 "
        "worker(s))" in told
    )
    assert any("extra_config.use_odirect=True" in line for line in told)
    assert source_of(config, "ram_bytes").endswith(": max_local_cpu_size")


def test_our_file_and_variables_beat_lmcaches(tmp_path):
    (tmp_path / "lmcache.yaml").write_text(LMI_EXAMPLE)
    lmcache_file = str(tmp_path / "lmcache.yaml")
    assert (
        load(
            env={"LMCACHE_CONFIG_FILE": lmcache_file, "KVTIER_CHUNK_TOKENS": "512"}
        ).engine.chunk_tokens
        == 512
    )
    config = load(
        written(tmp_path, "engine: {chunk_tokens: 128}\n"),
        env={"LMCACHE_CONFIG_FILE": lmcache_file},
    )
    assert (config.engine.chunk_tokens, config.nvme.path) == (128, None)
    (remark,) = config.remarks
    assert f"LMCACHE_CONFIG_FILE={lmcache_file} is not read" in remark.text


def test_lmcaches_variables_count_only_beside_its_file(tmp_path):
    variables = {
        "LMCACHE_CHUNK_SIZE": "512",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2.5",
        "LMCACHE_TRACK_USAGE": "false",
    }
    variables["LMCACHE_EXTRA_CONFIG"] = '{"use_odirect": true}'
    assert load(env=variables) == Config()
    config = load(env={**variables, "LMCACHE_CONFIG_FILE": written(tmp_path, LMI_EXAMPLE)})
    assert (config.engine.chunk_tokens, config.ram.bytes_) == (512, 5 * GIB // 2)
    assert source_of(config, "chunk_tokens") == "environment LMCACHE_CHUNK_SIZE"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("local_cpu: false", "kvtier has it always on"),
        ("local_cpu: true", "as in kvtier"),
        ("cache_policy: LFU", "kvtier has 'lru' only"),
        ("cache_policy: LRU", "as in kvtier"),
        ("remote_serde: cachegen", "kvtier has 'naive' only"),
        ("save_unfull_chunk: true", "not needed"),
        ("lookup_timeout_ms: 3000", "not needed"),
        ("numa_mode: auto", "not needed"),
        ("enable_lazy_memory_allocator: true", "not needed"),
        ("enable_p2p: true", "enable_p2p=True: has no effect"),
        ("enable_p2p: false", "enable_p2p=False: off, as in kvtier"),
        ("nixl_backends: [UCX]", "has no effect"),
        ("extra_config: {use_odirect: false}", "use_odirect=False: kvtier has it always on"),
        ("extra_config: {enable_nixl_storage: true}", "has no effect"),
        ("extra_config: {lookup: 1}", "extra_config.lookup=1: has no effect"),
        ("chunk_sise: 256", "chunk_sise=256: not a key of LMCache's"),
        ("max_local_disk_size: 10", "not used: local_disk names no place"),
        ("max_local_cpu_size: 0", "kvtier's default for ram_bytes holds"),
        ("remote_url: null", "null: kvtier's default holds"),
        ("remote_url: ''", "off, as in kvtier when redis_url is not set"),
        ("local_device: cpu", "as in kvtier"),
        ("local_device: cuda", "kvtier has 'cpu' only"),
        ("remote_url: mooncakestore://h:1", "kvtier's Mooncake tier is mooncake.url"),
        ("remote_url: host", "kvtier has no such remote tier"),
        ("remote_url: redis://h1:1,h2:2", "redis:// names one host; several are redis-cluster://"),
    ],
)
def test_no_lmcache_key_is_ignored_in_silence(tmp_path, line, told):
    config = load(env={"LMCACHE_CONFIG_FILE": written(tmp_path, line)})
    assert config == Config()
    (remark,) = config.remarks
    assert told in remark.text
    lost = "only|always on|has no effect|not used|no such|names one|not a key|tier is"
    assert (remark.level == logging.WARNING) is bool(re.search(lost, told))


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("remote_url: redis://u:p@h:6379/1", "redis_url", "redis://u:p@h:6379/1"),
        ("remote_url: rediss://h:6379", "redis_url", "rediss://h:6379"),
        ("remote_url: resp://h:6379", "redis_url", "redis://h:6379"),
        ("remote_url: valkey://h:6379", "redis_url", "redis://h:6379"),
        ("remote_url: unix:///run/redis.sock", "redis_url", "unix:///run/redis.sock"),
        ("remote_url: file:///mnt/kv", "nvme_path", "/mnt/kv"),
        ("remote_url: fs:///mnt/kv/", "nvme_path", "/mnt/kv"),
        ("local_disk: /mnt/kv", "nvme_path", "/mnt/kv"),
        ("local_disk: file://mnt/kv/", "nvme_path", "/mnt/kv"),
        ("local_disk: file:///a/,file:///b/", "nvme_path", "/a,/b"),
        ("local_disk: [/a, /b]", "nvme_path", "/a,/b"),
        ("save_decode_cache: false", "save_decode", False),
        ("blocking_timeout_secs: 10", "load_timeout_ms", 10_000),
    ],
)
def test_lmcache_keys_that_have_one_of_ours(tmp_path, line, key, value):
    assert load(env={"LMCACHE_CONFIG_FILE": written(tmp_path, line)}).value(key) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("remote_url: file:///", "an absolute folder"),
        ("local_disk: relative", "an absolute folder"),
        ("max_local_cpu_size: lots", "a number of GiB per worker"),
        ("max_local_cpu_size: -1", "a number of GiB per worker"),
        ("extra_config: '{'", "expected a JSON object"),
        ("extra_config: [1]", "expected a mapping"),
        ("chunk_size: many", "chunk_tokens='many'"),
    ],
)
def test_lmcache_values_that_cannot_be_had_are_errors(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        load(env={"LMCACHE_CONFIG_FILE": written(tmp_path, line)})


@pytest.mark.parametrize("given", ["[" * 100_000, '{"a":' * 100_000])
def test_lmcaches_extra_config_of_endless_levels_is_an_error_in_words(given):
    with pytest.raises(ConfigError, match="extra_config: JSON of too many levels"):
        lmcache.translate({"extra_config": given}, 1)


@pytest.mark.parametrize("variable", ["OPTION_LMCACHE_CONFIG_FILE", "KVTIER_CONFIG_FILE"])
@pytest.mark.parametrize("there", [True, False])
def test_auto_config_beside_a_manual_file_is_an_error_that_names_both(variable, there, tmp_path):
    file = tmp_path / "sizes.yaml"
    if there:
        file.write_text("chunk_size: 256\n" if "LMCACHE" in variable else "ram_bytes: 1GiB\n")
    with pytest.raises(
        ConfigError, match=f"OPTION_LMCACHE_AUTO_CONFIG asks .* the file {file} sets"
    ):
        load(env={"OPTION_LMCACHE_AUTO_CONFIG": "true", variable: str(file)})


@pytest.mark.parametrize("switch", ["OPTION_LMCACHE_AUTO_CONFIG", "KVTIER_AUTO"])
def test_auto_config_beside_lmcaches_own_variable_warns_and_takes_the_sizes(switch, tmp_path):
    file = written(
        tmp_path,
        "chunk_size: 512\nmax_local_cpu_size: 7\nlocal_disk: /kv\nmax_local_disk_size: 9\n",
    )
    config = load(env={switch: "true", "LMCACHE_CONFIG_FILE": file})
    assert config.engine.auto and (config.engine.chunk_tokens, config.nvme.path) == (512, "/kv")
    assert (config.ram.bytes_, config.nvme.bytes_) == (None, None)
    (warning,) = [remark.text for remark in config.remarks if remark.level == logging.WARNING]
    assert (
        f"{switch} asks for auto-config and environment LMCACHE_CONFIG_FILE names {file}" in warning
    )
    by_hand = load(env={switch: "false", "LMCACHE_CONFIG_FILE": file})
    assert (by_hand.ram.bytes_, by_hand.nvme.bytes_) == (7 * GIB, 9 * GIB)


def test_a_missing_file_beside_auto_config_names_the_conflict():
    with pytest.raises(
        ConfigError,
        match=r"KVTIER_AUTO asks for auto-config .*/none.yaml.*LMCACHE_CONFIG_FILE.*not there",
    ):
        load(env={"KVTIER_AUTO": "1", "LMCACHE_CONFIG_FILE": "/none.yaml"})


@pytest.mark.parametrize("variable", ["KVTIER_AUTO", "OPTION_LMCACHE_AUTO_CONFIG"])
def test_auto_config_beside_a_file_of_ours_without_sizes_fills_them_in(variable, tmp_path):
    """Such as one that names the servers of an engine's hosts."""
    file = tmp_path / "kvtier.yaml"
    file.write_text("nvme: {path: /kv}\nram: {bytes: }\nserver: {address: 'unix:///run/s'}\n")
    config = load(env={variable: "true", "KVTIER_CONFIG_FILE": str(file)})
    assert config.engine.auto and (config.nvme.path, config.server.address) == (
        "/kv",
        "unix:///run/s",
    )
    planned = filled(config, {"ram_bytes": 5, "nvme_path": "/kv", "nvme_bytes": 7}, "plan")
    assert (planned.ram.bytes_, planned.nvme.bytes_) == (5, 7)
    file.write_text("nvme: {path: /kv, bytes: 1GiB}\n")
    with pytest.raises(ConfigError, match=f"{variable} asks .* the file {file} sets sizes by hand"):
        load(env={variable: "true", "KVTIER_CONFIG_FILE": str(file)})
    file.write_text("nvme: {pathh: /kv}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'nvme\.pathh'"):
        load(env={variable: "true", "KVTIER_CONFIG_FILE": str(file)})


def test_auto_in_the_file_itself_is_its_own_wish(tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text("auto: true\nram_bytes: 1GiB\n")
    assert load(file, env={}).engine.auto


def test_auto_config_fills_only_what_nobody_set():
    config = filled(
        load(env={"KVTIER_RAM_BYTES": "1GiB"}), {"ram_bytes": 5, "chunk_tokens": 3}, "plan"
    )
    assert (config.ram.bytes_, config.engine.chunk_tokens) == (2**30, 3)
    assert config.sources["chunk_tokens"] == "plan"


SECRET = "s3cr3t-0123456789abcdef"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVTIER_REDIS_URL", f"redis:/user:{SECRET}@host"),
        ("KVTIER_REDIS_URL", f"user:{SECRET}@host:6379"),
        ("KVTIER_ENCRYPTION_KEY_FILE", SECRET),
        ("KVTIER_SERVER_TOKEN_FILE", SECRET),
        ("LMCACHE_EXTRA_CONFIG", f'{{"password": "{SECRET}"'),
        ("LMCACHE_EXTRA_CONFIG", f'["{SECRET}"]'),
    ],
)
def test_an_error_does_not_show_what_may_be_a_secret(variable, value):
    with pytest.raises(ConfigError) as error:
        load(env={variable: value, "KVTIER_REPLACE_LMCACHE": "1"})
    assert SECRET not in str(error.value)


def test_an_error_shows_a_file_that_is_none_and_cuts_what_is_long():
    with pytest.raises(ConfigError, match="server_token_file='token'"):
        load(env={"KVTIER_SERVER_TOKEN_FILE": "token"})
    with pytest.raises(ConfigError) as error:
        load(env={"KVTIER_POLICY": "x" * 100_000})
    assert len(str(error.value)) < 1000
