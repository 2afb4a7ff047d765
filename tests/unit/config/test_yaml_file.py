"""Configuration files: nothing is taken twice, and no file costs more than its size."""

import pytest

from kvtier.config.load import load
from kvtier.config.yaml_file import MOST_BYTES, MOST_LEVELS, MOST_NODES, read_yaml
from kvtier.core.errors import ConfigError

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "kvtier.yaml"


def refusal(file, text):
    """By either kind of file, as an operator names it."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as ours:
        load(file, env={})
    with pytest.raises(ConfigError) as lmcaches:
        load(env={"LMCACHE_CONFIG_FILE": str(file)})
    assert str(ours.value) == str(lmcaches.value)
    assert str(file) in str(ours.value)
    return str(ours.value)


@pytest.mark.parametrize(("text", "words"), [
    ("ram_bytes: 1GiB\n# big\nauto: on\nram_bytes: 64GiB\n",
     "line 4: the key 'ram_bytes' stands in line 1"),
    ("1: a\n'1': b\n", "line 2: the key '1' stands in line 1"),
    ("true: a\nTrue: b\n", "line 2: the key 'True' stands in line 1"),
    ("extra_config:\n  use_gds: true\n  use_gds: false\n",
     "line 3: the key 'use_gds' stands in line 2"),
    ("extra_config: {a: 1, a: 2}\n", "line 1: the key 'a' stands in line 1"),
    ("a: &x {b: 1}\nc:\n  <<: *x\n  <<: *x\n", "line 4: the key '<<' stands in line 3"),
])  # fmt: skip
def test_a_key_that_stands_twice_is_refused_with_both_lines(file, text, words):
    assert words in refusal(file, text)
    assert "remove one of them" in refusal(file, text)


def test_a_key_of_a_merged_mapping_may_be_given_anew(file):
    file.write_text("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\n")
    assert read_yaml(file) == {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 100_000, "a: " + "{" * 100_000, "- " * 100_000, "? " * 100_000]
)
def test_levels_are_bounded_before_the_rest_is_read(file, text):
    """Without the bound such a file takes PyYAML hours."""
    assert f"line 1: more than {MOST_LEVELS} levels" in refusal(file, text)


def test_levels_up_to_the_bound_are_read(file):
    deep = MOST_LEVELS - 2
    file.write_text("a: " + "[" * deep + "1" + "]" * deep)
    assert "a" in read_yaml(file)
    assert f"more than {MOST_LEVELS} levels" in refusal(
        file, "a: " + "[" * (deep + 1) + "1" + "]" * (deep + 1)
    )


def test_what_aliases_stand_for_is_counted(file):
    assert f"line 5: more than {MOST_NODES:,} values, counting what aliases stand for" in refusal(
        file, LAUGHS
    )


@pytest.mark.parametrize("text", ["a: &b {c: *b}", "&a b: &c [*c]"])
def test_an_alias_of_what_it_lies_in_is_refused(file, text):
    assert "line 1: an alias inside of what it stands for" in refusal(file, text)


def test_values_up_to_the_bound_are_read_and_a_few_aliases_with_them(file):
    file.write_text("a: &a [1, 2]\nb: *a\nc: [" + "1," * (MOST_NODES - 11) + "]")
    assert read_yaml(file)["b"] == [1, 2]
    assert "values" in refusal(file, "a: &a [1, 2]\nb: *a\nc: [" + "1," * (MOST_NODES - 10) + "]")


def test_a_file_of_another_size_than_a_configuration_is_not_parsed(file):
    file.write_bytes(b"#" * MOST_BYTES)
    assert read_yaml(file) == {}
    assert f"more than {MOST_BYTES:,} bytes" in refusal(file, b"#" * (MOST_BYTES + 1))


def test_a_file_without_an_end_is_not_read_to_its_end():
    with pytest.raises(ConfigError, match="more than"):
        read_yaml("/dev/zero")


SECRET = "s3cr3t-of-the-operator"


@pytest.mark.parametrize(
    "text",
    [
        f"redis_url: 'redis://u:{SECRET}@h/0\n",
        f"redis_url: redis://u:{SECRET}@h/0: x\n",
        f"redis_url: redis://u:{SECRET}@h/0\n ram_bytes: 1\n",
        f"redis_url: *{SECRET}",
        f"redis_url: !{SECRET} x",
        f"redis_url: !!int {SECRET}",
        f"redis_url: [redis://u:{SECRET}@h/0\n",
        f"redis_url: @{SECRET}",
        f'redis_url: "\\{SECRET}"',
        f"redis_url: {{{SECRET}: 1, {SECRET}",
    ],
)
def test_an_error_names_the_line_and_does_not_quote_it(file, text):
    told = refusal(file, text)
    assert "is not YAML: " in told
    assert SECRET not in told
