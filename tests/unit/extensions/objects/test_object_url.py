"""``object_url``: what is understood, what is refused in which words, and that no secret is
shown."""

import pytest

from kvtier.config.keys import Config, describe
from kvtier.config.load import load
from kvtier.core.errors import ConfigError
from kvtier.extensions.objects.url import ObjectUrl, masked, parse

SECRET = "5ec3e75ec3e75ec3e7"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://bucket", ObjectUrl("s3", "bucket", "")),
        ("S3://my.bucket-1/a/b=c/", ObjectUrl("s3", "my.bucket-1", "a/b=c")),
        ("gs://bucket/prefix", ObjectUrl("gs", "bucket", "prefix")),
        ("az://container/prefix", ObjectUrl("az", "container", "prefix")),
    ],
)
def test_what_is_understood(text, found):
    assert parse(text) == found
    assert parse(found.label) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "",
            (
                "the scheme is not one of s3, gs or az; expected s3://bucket/prefix, "
                "gs://bucket/prefix or az://container"
            ),
        ),
        ("bucket/prefix", "the scheme is not one of s3, gs or az"),
        ("s3:/bucket", "the scheme is not one of s3, gs or az"),
        ("gcs://bucket", "the scheme is not one of s3, gs or az"),
        ("https://minio:9000/bucket", "write s3://bucket/prefix and set AWS_ENDPOINT_URL"),
        ("redis://host:6379", "a Redis is given as redis_url"),
        (
            f"s3://key:{SECRET}@bucket/prefix",
            "credentials, region and endpoint come from the environment",
        ),
        (
            f"s3://bucket/prefix?secret={SECRET}",
            "credentials, region and endpoint come from the environment",
        ),
        (f"s3://key:{SECRET}", "the bucket's name has"),
        ("s3://", "the bucket's name has"),
        ("s3://bucket//a", "the prefix cannot be used"),
        ("s3://bucket/a/../b", "the prefix cannot be used"),
        ("s3://bucket/a b", "the prefix cannot be used"),
        (f"s3://bucket/{'a' * 513}", "the prefix cannot be used"),
    ],
)
def test_what_is_refused_and_in_which_words(text, words):
    with pytest.raises(ConfigError, match=words) as raised:
        load(
            env={"KVTIER_OBJECT_URL": text} if text else {},
            flags=None if text else {"object_url": text},
        )
    assert SECRET not in str(raised.value) and SECRET not in masked(text)


def test_a_url_is_shown_as_it_is_and_a_size_needs_it():
    config = load(env={"KVTIER_OBJECT_URL": "s3://bucket/prefix", "KVTIER_OBJECT_BYTES": "2TiB"})
    assert (config.value("object_url"), config.value("object_bytes")) == (
        "s3://bucket/prefix",
        2 << 40,
    )
    assert (
        next(row.value for row in describe(config) if row.key == "object_url")
        == "s3://bucket/prefix"
    )
    with pytest.raises(ConfigError, match="object_bytes=4096 has no effect without object_url"):
        Config().with_keys(object_bytes=4096)
