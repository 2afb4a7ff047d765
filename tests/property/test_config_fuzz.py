"""Whatever stands in a configuration file or variable: a Config or a ConfigError, never anything
else."""

import string
from contextlib import suppress

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier.config.keys import KEYS, describe
from kvtier.config.load import load
from kvtier.core.errors import ConfigError

FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
LMCACHES = (
    "chunk_size",
    "max_local_cpu_size",
    "local_disk",
    "max_local_disk_size",
    "remote_url",
    "extra_config",
    "save_decode_cache",
    "blocking_timeout_secs",
    "cache_policy",
    "nixl_backends",
    "enable_p2p",
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.dates(),
    st.binary(),
    st.sampled_from(
        [
            "4GiB",
            "9" * 400,
            "1" + "0" * 400 + "TiB",
            "redis://:p@h",
            "/a",
            "unix:///s",
            "auto",
            "off",
        ]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
YAMLISH = st.text(
    alphabet=string.ascii_lowercase[:6] + "0129.-_:,[]{}&*!|>'\"#%@`?~<=\n\t \\\x00\x85é",
    max_size=80,
)


def outcome(path, text, variable):
    path.write_bytes(text)
    try:
        config = load(env={variable: str(path)})
    except ConfigError:
        return None
    assert len(describe(config)) == len(KEYS)
    return config


@pytest.mark.parametrize("variable", ["KVTIER_CONFIG_FILE", "LMCACHE_CONFIG_FILE"])
@given(
    text=st.one_of(
        st.binary(max_size=80),
        YAMLISH.map(str.encode),
        YAMLISH.map(lambda end: b"ram_bytes: " + end.encode()),
    )
)
@example(text=b"ram_bytes: 2001-99-99")
@example(text=b"ram_bytes: !!int x")
@example(text=b"ram_bytes: !!bool x")
@example(text=b"ram_bytes: !!timestamp x")
@example(text=b"ram_bytes: " + b"9" * 5000)
@example(text=b"a: " + b"[" * 3000)
@example(text=b"&a a: *a")
@example(text=b"a: &b {c: *b}")
@FUZZ
def test_any_text_is_a_configuration_or_an_error_of_the_operator(tmp_path, variable, text):
    outcome(tmp_path / "fuzzed.yaml", text, variable)


@given(content=st.dictionaries(st.sampled_from([*KEYS, "ram_byte"]), VALUES, max_size=4))
@example(content={"ram_bytes": "9" * 400})
@FUZZ
def test_any_value_of_any_key_is_read_or_refused(tmp_path, content):
    config = outcome(
        tmp_path / "fuzzed.yaml", yaml.safe_dump(content).encode(), "KVTIER_CONFIG_FILE"
    )
    assert config is None or "ram_byte" not in content


@given(content=st.dictionaries(st.sampled_from(LMCACHES), VALUES, max_size=4))
@FUZZ
def test_any_value_of_lmcaches_keys_too(tmp_path, content):
    outcome(tmp_path / "fuzzed.yaml", yaml.safe_dump(content).encode(), "LMCACHE_CONFIG_FILE")


@given(
    values=st.dictionaries(
        st.sampled_from([f"KVTIER_{key.upper()}" for key in KEYS]), st.text(), max_size=3
    )
)
@FUZZ
def test_any_text_of_any_variable_too(values):
    with suppress(ConfigError):
        load(env=values)
