"""The least that a job needs, in AWS's words: actions, names and conditions of a policy, made from the places it uses.

Which right a request needs: "Required permissions for Amazon S3 API operations"; which condition: "Actions,
resources, and condition keys for Amazon S3" (AWS Service Authorization Reference).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.job import StorageSection
from hotloop.storage.encryption import Encryption, encryption
from hotloop.storage.places import Place, common_beginning

Statement = dict[str, Any]

_PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}
_WRITE = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
_MOST_NAMES = 20
"""Of single objects in a policy, which has room for some thousand letters; more are named by what is common to them."""


def aws_policy(places: Sequence[Place], storage: StorageSection, region: str, data_key: str = "") -> dict[str, Any]:
    """A policy for a role or user that trains this job, and does nothing else.

    Args:
        places: those on AWS, one at least.
        region: of the buckets; settles the partition where no key does.
        data_key: ARN of the key that data is encrypted with, if it is another than that of the job.

    Raises:
        InputError: a key is not named by its ARN, or the store cannot be asked for that encryption.
    """
    written = [place for place in places if place.writes]
    asked = encryption(storage, written[0].url) if written else Encryption(key=storage.kms_key)
    partition = _partition(asked.key or data_key, region)
    arns = {place: _arns(place, partition) for place in places}
    read = [arn for place, names in arns.items() if not place.writes for arn in names]
    write = [arn for place, names in arns.items() if place.writes for arn in names]
    statements = [
        *_lists(places, partition),
        _allow("ReadData", ["s3:GetObject"], read),
        _allow("KeepCheckpoints", _WRITE, write),
        *_keys(asked.key, data_key, bool(written), bool(read)),
        *_denials(places, partition, storage.tls),
        *_encrypted(asked, write),
    ]
    return {"Version": "2012-10-17", "Statement": [one for one in statements if one["Resource"]]}


def _allow(sid: str, actions: list[str], resources: Iterable[str], condition: Statement | None = None) -> Statement:
    found = {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": list(dict.fromkeys(resources))}
    return {**found, "Condition": condition} if condition else found


def _arns(place: Place, partition: str) -> list[str]:
    base = f"arn:{partition}:s3:::{place.bucket}/"
    if not place.names:
        return [f"{base}{_literal(place.prefix)}*"]
    if len(place.names) <= _MOST_NAMES:
        return [f"{base}{_literal(name)}" for name in place.names]
    ending = common_beginning(tuple(name[::-1] for name in place.names))[::-1]
    if len({len(name) for name in place.names}) > 1:
        return [f"{base}{_literal(place.prefix)}*{_literal(ending)}"]
    varied = len(place.names[0]) - len(place.prefix) - len(ending)
    return [f"{base}{_literal(place.prefix)}{'?' * varied}{_literal(ending)}"]


def _lists(places: Sequence[Place], partition: str) -> list[Statement]:
    """A statement a bucket: what is listed is always one folder, and what it is called is in the request."""
    found = []
    for number, bucket in enumerate(dict.fromkeys(place.bucket for place in places if not place.names), 1):
        listed = [place for place in places if place.bucket == bucket and not place.names]
        prefixes = [
            _literal(one.prefix) + ("*" if one.writes and not one.prefix.endswith("/") else "") for one in listed
        ]
        condition = {"StringLike": {"s3:prefix": list(dict.fromkeys(prefixes))}} if all(prefixes) else None
        arn = f"arn:{partition}:s3:::{bucket}"
        found.append(_allow(f"List{number}", ["s3:ListBucket"], [arn], condition))
    return found


def _keys(key: str, data_key: str, writes: bool, reads: bool) -> list[Statement]:
    """S3 asks the key in the name of who writes and reads; GenerateDataKey is what it encrypts with, never Encrypt."""
    rights: dict[str, list[str]] = {}
    if key and (writes or reads):
        rights[key] = ["kms:Decrypt", *(["kms:GenerateDataKey"] if writes else [])]
    if data_key and reads:
        rights.setdefault(data_key, ["kms:Decrypt"])
    return [_key(number, arn, actions) for number, (arn, actions) in enumerate(rights.items(), 1)]


def _key(number: int, arn: str, actions: list[str]) -> Statement:
    parts = arn.split(":")
    if len(parts) != 6 or parts[0] != "arn" or parts[2] != "kms" or not parts[5].startswith("key/"):
        cause = "a policy grants rights to a key by its ARN"
        fix = f"aws kms describe-key --key-id {arn} --query KeyMetadata.Arn"
        raise InputError(f"{arn} is no ARN of a key", cause, fix)
    through = [f"s3.{parts[3]}.amazonaws.com", *([f"s3.{parts[3]}.amazonaws.com.cn"] if parts[1] == "aws-cn" else [])]
    return _allow(f"UseKey{number}", actions, [arn], {"StringEquals": {"kms:ViaService": through}})


def _denials(places: Sequence[Place], partition: str, tls: str) -> list[Statement]:
    buckets = dict.fromkeys(f"arn:{partition}:s3:::{place.bucket}" for place in places)
    everything = [arn for bucket in buckets for arn in (bucket, f"{bucket}/*")]
    return [
        _deny("DenyWithoutTls", "s3:*", everything, {"Bool": {"aws:SecureTransport": "false"}}),
        _deny("DenyOldTls", "s3:*", everything, {"NumericLessThan": {"s3:TlsVersion": tls}}),
    ]


def _encrypted(asked: Encryption, write: list[str]) -> list[Statement]:
    """Of requests without that header too: what is not there is not equal."""
    header = "s3:x-amz-server-side-encryption"
    found = [_deny("DenyOtherEncryption", "s3:PutObject", write, {"StringNotEquals": {header: asked.kind}})]
    if asked.key:
        condition = {"StringNotEquals": {f"{header}-aws-kms-key-id": asked.key}}
        found.append(_deny("DenyOtherKeys", "s3:PutObject", write, condition))
    return found if asked.kind else []


def _deny(sid: str, action: str, resources: list[str], condition: Statement) -> Statement:
    return {"Sid": sid, "Effect": "Deny", "Action": action, "Resource": resources, "Condition": condition}


def _literal(name: str) -> str:
    """`*`, `?` and `$` of a name itself, which mean something in a policy."""
    return "".join(f"${{{letter}}}" if letter in "*?$" else letter for letter in name)


def _partition(key: str, region: str) -> str:
    if key.startswith("arn:"):
        return key.split(":")[1]
    return next((partition for start, partition in _PARTITIONS.items() if region.startswith(start)), "aws")
