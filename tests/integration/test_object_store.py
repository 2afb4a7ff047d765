"""The object tier as its page switches it on: `kvtier config`, `doctor` and `serve` in front of a
real S3 server."""

import json
import os
import re
import sys
from itertools import product
from pathlib import Path

import pytest

from kvtier.core.lookup import Progress
from kvtier.testing import content
from kvtier.tiers.away.whole_objects import ObjectForm
from tests import command
from tests.admin_server import administered
from tests.child_process import wait_for
from tests.integration.test_secrets import secret_file
from tests.memory_bucket import beside
from tests.model_configs import MODELS
from tests.s3_proxy import Answer, S3Proxy
from tests.s3_server import SECRET, S3Server, moto_python, operated
from tests.server_process import LAYOUT, SLOT, at_rest, attached, load, run, save
from tests.stores import assembled

ROOT = Path(__file__).parents[2]
SEALED = {"ram_bytes": 16 * SLOT, "object_url": "s3://bucket/sealed", "object_bytes": 1 << 20}


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        yield server


def snippet():
    (block,) = re.findall(
        r"```bash\n(export KVTIER_OBJECT_URL=.*?)```",
        (ROOT / "deploy/TIERS.md").read_text(),
        re.DOTALL,
    )
    return str(block)


def ran(script, environment):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {"PATH": path, "PYTHONPATH": ROOT, "KVTIER_RAM_BYTES": "64MiB", "COLUMNS": "400"}
    return command.ran(["bash", "-c", script], command.bare(**environment | more))


def doctor(script):
    return script.replace("kvtier doctor", f"{sys.executable} -m kvtier doctor --no-engine")


@pytest.mark.slow
def test_the_readmes_lines_switch_it_on_and_leave_nothing_behind(server):
    done = ran(doctor(snippet()), server.environment)
    rows = [line for line in done.stdout.splitlines() if "object" in line]
    assert any(
        "s3://bucket/prefix: written, read, listed and deleted; 2 TiB are ours" in row
        for row in rows
    ), done
    assert any("self-test object" in row and "ok" in row for row in rows), done.stdout
    assert SECRET not in done.stdout + done.stderr
    with operated(server.environment):
        assert list(beside().listed("prefix")) == []


def test_a_server_that_can_never_use_it_does_not_start(server, tmp_path):
    script = f"{sys.executable} -m kvtier serve --listen unix://{tmp_path}/s.sock"
    given = {"KVTIER_OBJECT_URL": "s3://nowhere", "KVTIER_ADMIN": "off"}
    done = ran(script, server.environment | given)
    assert done.returncode != 0
    assert "there is no such bucket; make it, or correct object_url" in done.stderr


LARGE = MODELS["qwen2.5-72b"]
"""On CPUs it is slow to compute, so that a bucket pays."""


@pytest.mark.parametrize("more", [[], ["--no-measure"]])
def test_the_plan_shows_what_a_hit_from_it_is_worth(server, tmp_path, more):
    (line,) = re.findall(
        r"^kvtier plan .* --object .*$", (ROOT / "deploy/TIERS.md").read_text(), re.MULTILINE
    )
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    words = line.partition("#")[0].replace("kvtier", f"{sys.executable} -m kvtier", 1)
    words = words.replace("DIR", str(tmp_path))
    script = " ".join([words, "--gpu none --ram 1100GiB --disk-speed 2GB/s", *more])
    done = ran(script, server.environment)
    rows = {row.split()[0]: row for row in done.stdout.splitlines() if row.startswith("object")}
    assert "s3://bucket/prefix: written, read, listed and deleted" in rows["object_url"], done
    assert "2 TiB" in rows["object_bytes"]
    told = "assumed for a bucket in this region" if more else "measured"
    assert told in rows["object_latency_ms"]
    worth = "object_break_even_tokens" in rows
    assert worth and told in rows["object_break_even_tokens"]
    with operated(server.environment):
        assert list(beside().listed("prefix")) == [], "nothing is left behind"


def test_the_plan_says_why_a_bucket_is_left_out_or_away(server, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    plan = f"{sys.executable} -m kvtier plan --no-measure --ram 1100GiB --model {tmp_path}"
    for where, environment, why in (
        ("s3://nowhere", server.environment, "cannot be used (object store s3://nowhere"),
        ("s3://bucket", S3Server().environment, "away now (object store s3://bucket cannot be"),
    ):
        done = ran(f"{plan} --object {where}", environment)
        named = ("object ", "object_url")
        (row,) = [row for row in done.stdout.splitlines() if row.startswith(named)]
        assert why in row, done
        assert SECRET not in done.stdout + done.stderr
    done = ran(f"{plan} --object http://{SECRET}/x", {})
    assert done.returncode == 2 and "write s3://bucket/prefix" in done.stderr
    assert SECRET not in done.stdout + done.stderr


PUT_RULE = """
import json, sys, boto3
from botocore.config import Config
s3 = boto3.client("s3", endpoint_url=sys.argv[1], config=Config(connect_timeout=5, read_timeout=10))
rule = json.load(open(sys.argv[2]))
s3.put_bucket_lifecycle_configuration(Bucket="bucket", LifecycleConfiguration=rule)
print(json.dumps(s3.get_bucket_lifecycle_configuration(Bucket="bucket")["Rules"]))
"""


def test_the_lifecycle_rule_is_one_and_is_for_what_a_tier_writes(server):
    file = ROOT / "deploy" / "objects" / "lifecycle.json"
    assert "file://deploy/objects/lifecycle.json" in (ROOT / "deploy/OPERATIONS.md").read_text()
    python, environment = moto_python(), os.environ | server.environment
    done = command.ran([python, "-I", "-c", PUT_RULE, server.endpoint, str(file)], environment)
    assert done.returncode == 0, done.stderr
    (rule,) = json.loads(done.stdout)
    prefix = rule["Filter"]["Prefix"]
    assert ObjectForm("prefix", bytes(8)).folder.startswith(prefix)
    assert rule["Status"] == "Enabled" and rule["Expiration"]["Days"] > 0
    assert rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] == 1


KEPT: dict[str, object] = {"nvme_path": None, "nvme_bytes": None, "patient": True}
KEPT |= {"object_url": "s3://bucket/purge", "object_bytes": 1 << 20}


@pytest.fixture
def emptied(server):
    server.reset()
    return server


def kept(server):
    with operated(server.environment):
        return len(list(beside().listed("purge")))


def test_a_clear_of_everything_reaches_what_other_hosts_wrote(emptied):
    server = emptied
    with (
        operated(server.environment),
        administered(**KEPT) as one,
        administered(**KEPT) as other,
        attached(one.access(namespace="acme")) as here,
        attached(other.access(namespace="else")) as there,
    ):
        save(here, run(1, 4))
        save(there, run(2, 3))
        at_rest(here)
        at_rest(there)
        assert kept(server) == 7
        done = one.clear(everything=True)
        assert (done["complete"], done["untouched"], kept(server)) == (True, [], 0)
        assert here.lookup(run(1, 4)).progress == Progress(0, 0)


def test_a_clear_of_a_tenant_takes_its_own_and_leaves_the_others(emptied):
    server = emptied
    with (
        operated(server.environment),
        administered(**KEPT) as one,
        attached(one.access(namespace="acme")) as acme,
        attached(one.access(namespace="else")) as other,
    ):
        save(acme, run(1, 4))
        save(other, run(2, 3))
        wait_for(lambda: one.metric("kvtier_held_chunks", tier="object") == 7, "all is known")
        (row,) = [row for row in one.cli("stats").stdout.splitlines() if row.startswith("object")]
        assert row.split()[1] == "7", row
        done = one.clear(namespace="acme")
        assert (done["complete"], done["untouched"], kept(server)) == (True, [], 3)


def test_what_a_clear_could_not_delete_is_owed_and_deleted_later(emptied):
    with (
        S3Proxy(emptied) as proxy,
        operated(proxy.environment),
        administered(**KEPT) as one,
        attached(one.access(namespace="acme")) as client,
    ):
        save(client, run(1, 4))
        at_rest(client)  # its writer has been told of what is in the bucket
        assert kept(emptied) == 4
        proxy.refuse = lambda *_: Answer(500)
        done = one.clear(everything=True)
        assert not done["complete"] and done["owed_deletes"] == 4
        proxy.well()

        def gone():
            save(client, run(2, 1))
            client.invalidate(run(2, 1))
            return kept(emptied) <= 1

        wait_for(gone, "the bucket answers, and gets its deletes")


def test_chunks_of_a_server_with_a_key_are_sealed_and_another_key_meets_none(server, tmp_path):
    def store(key):
        more = {"encryption_key_file": secret_file(tmp_path, "key", key)} if key else {}
        return assembled(LAYOUT, **SEALED, **more)

    def objects():
        return sorted(name for name, _, _ in bucket.listed("sealed"))

    keys = run(1, 3)
    with operated(server.environment):
        bucket = beside()
        one = store("0a" * 32)
        save(one, keys)
        wait_for(lambda: len(objects()) == 3, "all is in the bucket")
        one.close()
        for name, key in product(objects(), keys):
            (size,) = {size for _, size, _ in bucket.listed("sealed")}
            lies = bytes(bucket.get(name, size) or b"")
            assert bytes(content(key, SLOT)[:64]) not in lies and len(lies) > SLOT
        again = store("0a" * 32)
        assert load(again, keys) == ["object"] * 3
        again.close()
        for other in ("0b" * 32, None):
            stranger = store(other)
            assert load(stranger, keys) == []
            stranger.invalidate(keys)
            stranger.close()
        assert len(objects()) == 3, "and deletes none"
