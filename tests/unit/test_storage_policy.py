"""Policies of jobs: exactly what they use. What a real store makes of them is in tests/torch/test_storage.py."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as some
from iam import allows

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.data.shards import expanded
from hotloop.storage.places import find_places
from hotloop.storage.policy import aws_policy
from hotloop.storage.roles import azure_commands, google_commands

KEY = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
TLS = {"aws_SecureTransport": "true", "s3_TlsVersion": "1.3"}
ENCRYPTED = {"s3_x_amz_server_side_encryption": "aws:kms", "s3_x_amz_server_side_encryption_aws_kms_key_id": KEY}


def job_of(train: str, copy_to: str = "", run_dir: str | None = "runs/mine", val: str = "", **storage: str) -> Job:
    raw: dict[str, Any] = {"data": {"train": train}, "model": {"name": "m"}, "storage": storage, "run": {}}
    raw["checkpoint"] = {"copy_to": copy_to}
    raw["data"] |= {"val": val} if val else {}
    raw["run"] |= {"dir": run_dir} if run_dir else {}
    return parse_job(raw, "job")


def policy_of(job: Job, region: str = "", data_key: str = "") -> dict[str, Any]:
    return aws_policy(find_places(job), job.storage, region, data_key)


def test_a_policy_allows_what_the_job_does_and_nothing_beside_it() -> None:
    found = policy_of(job_of("s3://bucket/data/train", "s3://bucket/models", kms_key=KEY))
    data, models = "arn:aws:s3:::bucket/data/train/a/1.jpg", "arn:aws:s3:::bucket/models/mine/epoch-1/state.pt"
    bucket = "arn:aws:s3:::bucket"
    assert allows(found, "s3:GetObject", data, **TLS)
    assert allows(found, "s3:ListBucket", bucket, s3_prefix="data/train/", **TLS)
    assert allows(found, "s3:ListBucket", bucket, s3_prefix="models/mine/", **TLS)
    for action in ("s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"):
        assert allows(found, action, models, **TLS)
    assert allows(found, "s3:PutObject", models, **TLS, **ENCRYPTED)
    for action in ("kms:GenerateDataKey", "kms:Decrypt"):
        assert allows(found, action, KEY, kms_ViaService="s3.eu-central-1.amazonaws.com")
        assert not allows(found, action, KEY, kms_ViaService="ec2.eu-central-1.amazonaws.com")
        assert not allows(found, action, KEY.replace("1234abcd", "00000000"))
    assert not allows(found, "kms:Encrypt", KEY, kms_ViaService="s3.eu-central-1.amazonaws.com")
    for action, name in (
        ("s3:PutObject", data), ("s3:DeleteObject", data), ("s3:GetObject", f"{bucket}/data/training/1.jpg"),
        ("s3:GetObject", f"{bucket}/models/mine-too/state.pt"), ("s3:GetObjectVersion", data),
        ("s3:PutObjectAcl", models), ("s3:DeleteBucket", bucket), ("s3:PutBucketPolicy", bucket),
    ):  # fmt: skip
        assert not allows(found, action, name, **TLS, **ENCRYPTED), (action, name)
    for prefix in ("", "data/", "models/", "models/mine"):
        assert not allows(found, "s3:ListBucket", bucket, s3_prefix=prefix, **TLS)


@pytest.mark.parametrize(
    "request_",
    [
        {"aws_SecureTransport": "false"},
        {"s3_TlsVersion": "1.2"},
        {"s3_x_amz_server_side_encryption": "AES256"},
        {"s3_x_amz_server_side_encryption_aws_kms_key_id": KEY.replace("1234abcd", "00000000")},
    ],
)
def test_what_is_not_encrypted_as_asked_is_denied(request_: dict[str, str]) -> None:
    """No server here enforces these (SeaweedFS has no s3:TlsVersion, and no headers): by the rules of AWS's pages."""
    job = job_of("data", "s3://bucket/models", kms_key=KEY)
    models = "arn:aws:s3:::bucket/models/mine/state.pt"
    assert allows(policy_of(job), "s3:PutObject", models, **TLS, **ENCRYPTED)
    assert not allows(policy_of(job), "s3:PutObject", models, **{**TLS, **ENCRYPTED, **request_})
    without = {name: value for name, value in {**TLS, **ENCRYPTED}.items() if name not in request_}
    if "s3_x_amz_server_side_encryption" in next(iter(request_)):
        assert not allows(policy_of(job), "s3:PutObject", models, **without)


def test_shards_are_named_as_closely_as_there_is_room() -> None:
    few = policy_of(job_of("s3://bucket/packed/{00..03}.tar"))
    assert few["Statement"][0]["Resource"] == [f"arn:aws:s3:::bucket/packed/0{number}.tar" for number in range(4)]
    many = policy_of(job_of("s3://bucket/packed/train-{000..499}.tar"))
    assert many["Statement"][0]["Resource"] == ["arn:aws:s3:::bucket/packed/train-???.tar"]
    assert all("List" not in one["Sid"] for one in many["Statement"]), "nothing is listed"


@pytest.mark.parametrize("name", ["a*b", "a?b", "a$b", "${*}", "$"])
def test_letters_that_mean_something_in_a_policy_are_letters(name: str) -> None:
    found = policy_of(job_of(f"s3://bucket/{name}", f"s3://other/{name}"))
    assert allows(found, "s3:GetObject", f"arn:aws:s3:::bucket/{name}/1.jpg", **TLS)
    assert allows(found, "s3:ListBucket", "arn:aws:s3:::bucket", s3_prefix=f"{name}/", **TLS)
    for other in ("aXb", "aXYb", "X", "a"):
        assert not allows(found, "s3:GetObject", f"arn:aws:s3:::bucket/{other}/1.jpg", **TLS)
        assert not allows(found, "s3:PutObject", f"arn:aws:s3:::other/{other}/mine/1", **TLS)
        assert not allows(found, "s3:ListBucket", "arn:aws:s3:::bucket", s3_prefix=f"{other}/", **TLS)


def test_a_run_without_a_directory_keeps_to_names_of_its_job() -> None:
    found = policy_of(job_of("data", "s3://bucket/models", run_dir=None))
    assert allows(found, "s3:PutObject", "arn:aws:s3:::bucket/models/job-20260101-120000/state.pt", **TLS)
    assert allows(found, "s3:ListBucket", "arn:aws:s3:::bucket", s3_prefix="models/job-20260101-120000/", **TLS)
    assert not allows(found, "s3:PutObject", "arn:aws:s3:::bucket/models/other/state.pt", **TLS)


@pytest.mark.parametrize(
    ("region", "partition"),
    [("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov"), ("eu-west-1", "aws"), ("", "aws")],
)
def test_regions_have_partitions(region: str, partition: str) -> None:
    assert f"arn:{partition}:s3:::bucket/x/*" in json.dumps(policy_of(job_of("s3://bucket/x"), region))


def test_data_may_have_a_key_of_its_own() -> None:
    other = KEY.replace("1234abcd", "99999999")
    through = "s3.eu-central-1.amazonaws.com"
    found = policy_of(job_of("s3://bucket/x", "s3://bucket/y", kms_key=KEY), data_key=other)
    assert allows(found, "kms:Decrypt", other, kms_ViaService=through)
    assert not allows(found, "kms:GenerateDataKey", other, kms_ViaService=through)
    reads = policy_of(job_of("s3://bucket/x", kms_key=KEY))
    assert not allows(reads, "kms:GenerateDataKey", KEY, kms_ViaService=through), "nothing is written"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (job_of("x", "s3://b/c", kms_key="1234abcd"), "no ARN of a key"),
        (job_of("x", "s3://b/c", kms_key="alias/mine"), "not their aliases"),
        (job_of("x", "s3://b/c", kms_key=KEY, encryption="aes256"), "without kms"),
        (job_of("x", "gs://b/c", kms_key=KEY), "does not go with gs://b/c"),
        (job_of("x", "/disk/c"), "no place in object storage"),
        (job_of("s3://"), "has no bucket"),
    ],
)
def test_what_cannot_be_granted_is_refused(job: Job, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        policy_of(job)
    assert refused.value.fix


def test_a_secret_in_place_of_where_it_is_is_not_repeated() -> None:
    for value in ("AGE-SECRET-KEY-1QQQ", "file:AGE-SECRET-KEY-1QQQ", "hunter2"):
        with pytest.raises(InputError) as refused:
            job_of("x", client_key=value)
        assert value.removeprefix("file:") not in str(refused.value)


def test_google_and_azure_get_conditions_for_the_same_prefixes() -> None:
    job = job_of("gs://bucket/data", "gs://bucket/models", val="gs://bucket/val-{0..3}.tar")
    google = "\n".join(google_commands(find_places(job)))
    for condition in (json.loads(line) for line in google.splitlines() if line.startswith("{")):
        assert "projects/_/buckets/bucket/objects/" in condition["expression"]
    assert 'startsWith("models/mine/")' in google.replace("\\", "")
    assert 'resource.name == "projects/_/buckets/bucket/objects/val-3.tar"' in google.replace("\\", "")
    assert "setIamPolicy" not in google
    azure = "\n".join(azure_commands(find_places(job_of("az://box/data", "az://box/it's"))))
    assert azure.count("containers/box") == 2
    assert "--https-only true" in azure
    assert "data/" in azure


NAMES = some.text("ab*?$ü.-", min_size=1, max_size=4)
PATHS = some.lists(NAMES, max_size=3).map("/".join)


@run(max_examples=60)
@given(PATHS, PATHS, some.booleans(), PATHS, some.integers(0, 30))
def test_no_policy_grants_anything_outside_its_prefixes(
    data: str, models: str, has_run: bool, other: str, shards: int
) -> None:
    val = f"s3://one/{data}/{{00..{shards:02}}}.tar".replace("{{", "{") if shards else ""
    if data.endswith((".tar", ".tar/")) or "{" in data:
        return
    job = job_of(f"s3://one/{data}", f"s3://two/{models}", "runs/mine" if has_run else None, val)
    found = policy_of(job)
    below = f"{data.strip('/')}/" if data.strip("/") else ""
    kept = f"{models.strip('/')}/" if models.strip("/") else ""
    kept += "mine/" if has_run else "job-"
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:PutObjectAcl"):
        for name in (other, f"{other}/x", f"{below}{other}", f"{kept}{other}", "x", f"{data}x"):
            reads = action == "s3:GetObject"
            there = name in expanded(val.removeprefix("s3://one/")) if val else False
            assert allows(found, action, f"arn:aws:s3:::one/{name}", **TLS) == (
                reads and (name.startswith(below) or there)
            ), name
            writes = action != "s3:PutObjectAcl"
            assert allows(found, action, f"arn:aws:s3:::two/{name}", **TLS) == (writes and name.startswith(kept)), name
            assert not allows(found, action, f"arn:aws:s3:::three/{name}", **TLS)
    for prefix in (other, f"{other}/", "", "x/"):
        assert allows(found, "s3:ListBucket", "arn:aws:s3:::one", s3_prefix=prefix, **TLS) == (
            prefix == below or not below
        )
        one = allows(found, "s3:ListBucket", "arn:aws:s3:::two", s3_prefix=prefix, **TLS)
        assert one == (prefix == kept if has_run else prefix.startswith(kept))
