"""`hotloop export` and `hotloop predict` as a user types them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command
from exported import write_model
from runs import read_until

SUPPORT = Path(__file__).parents[1] / "support"
JOB = """
task = {{ name = "images", image_size = 16 }}
data = {{ train = "{folder}", val = "{folder}", batch_size = 4 }}
model = {{ name = "tiny:cnn" }}
train = {{ epochs = 6 }}
optimizer = {{ learning_rate = 0.1 }}
log = {{ tensorboard = false, report = false }}
run = {{ dir = "runs/bright" }}
"""


@pytest.mark.slow
def test_a_run_is_exported_verified_and_used(
    tmp_path: Path, hotloop: Command, make_images: Callable[..., Path]
) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(folder=make_images()))
    hotloop("train", "job.toml", expect=0)
    hotloop("export", "key", "release.key", expect=0)
    made = json.loads(hotloop("export", "bright", "--sign", "release.key", "--json", expect=0).out)
    model = Path(made["file"])
    assert model == tmp_path / "runs/bright/export/model.onnx"
    assert made["bytes"] == model.stat().st_size
    assert made["max_abs_error"] < 1e-4
    assert made["latency_ms"] > 0
    verified = json.loads(hotloop("export", "verify", str(model), "--key", "release.key.pub", "--json", expect=0).out)
    assert (verified["verified"], verified["trusted"], verified["checked"]) == (True, True, ["hashes", "signature"])
    assert verified["manifest"]["origin"]["metrics"].keys() == {"val_loss", "val_accuracy"}
    told = json.loads(hotloop("predict", str(model), "images", "--key", "release.key.pub", "--json", expect=0).out)
    names = [Path(one["path"]).parent.name for one in told["images"]]
    assert len(names) == 16
    assert [one["classes"][0]["class"] for one in told["images"]] == names
    again = hotloop("export", "bright", expect=2)
    assert "is there already" in again.err
    assert "--force" in again.err
    interrupted(tmp_path, model)
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    refused = hotloop("export", "verify", str(model), "--json", expect=1)
    assert json.loads(refused.out)["verified"] is False
    assert refused.err.startswith(f"error: {model} was changed\ncause: its SHA-256 is")
    assert hotloop("predict", str(model), "images", expect=1).out == ""
    (tmp_path / "images").rename(tmp_path / "moved")
    alone = hotloop("export", "bright", "--to", "safetensors", expect=0)
    assert "read back: the same bits" in alone.out
    assert "images: names of classes are left out" in alone.err


def interrupted(folder: Path, model: Path) -> None:
    """SIGKILL in the middle of another export leaves the model as it is; what else it leaves, the next one removes."""
    command = [sys.executable, "-m", "hotloop", "export", "bright", "--force"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    before = {file.name: file.read_bytes() for file in model.parent.iterdir()}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as child:
        read_until(child, "hotloop: comparing")
        child.kill()
    assert {file.name: file.read_bytes() for file in model.parent.iterdir() if file.is_file()} == before
    assert (model.parent / ".model.onnx.unfinished").is_dir()


def test_predict_names_what_it_cannot_read(tmp_path: Path, hotloop: Command, make_images: Callable[..., Path]) -> None:
    write_model(tmp_path / "model.onnx")
    make_images(each=2)
    done = hotloop("predict", "model.onnx", "images", "absent.jpg", "images/class1/*.png", "--top", "1", expect=1)
    assert [line.split()[0] for line in done.out.splitlines()] == [
        f"images/class{label}/00{number}.png" for label, number in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1))
    ]
    assert done.out.splitlines()[0].split()[1] == "class0"
    assert done.err.splitlines() == [
        "absent.jpg: cannot be read: No such file or directory", "1 file of 7 could not be read",
    ]  # fmt: skip
    (tmp_path / "nothing").mkdir()
    beside = hotloop("predict", "model.onnx", "images", "nothing", expect=1)
    assert beside.err.splitlines()[0] == "nothing: cannot be read: a folder without images"
    assert "no file absent.onnx" in hotloop("predict", "absent.onnx", "images", expect=2).err
    assert "a private key" in key_given(tmp_path, hotloop, "release.key")
    assert "is not signed" in key_given(tmp_path, hotloop, "release.key.pub")


def key_given(folder: Path, hotloop: Command, name: str) -> str:
    """What is said where a key is given for an unsigned model."""
    if not (folder / "release.key").exists():
        hotloop("export", "key", "release.key", expect=0)
    return hotloop("predict", "model.onnx", "images", "--key", name, expect=1 if name.endswith(".pub") else 2).err


def test_a_secret_comes_from_a_file_or_the_environment(
    tmp_path: Path, hotloop: Command, make_images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hotloop("export", "key", "--secret", "secret", expect=0)
    text = (tmp_path / "secret").read_text().strip()
    write_model(tmp_path / "model.onnx.enc", secret=bytes.fromhex(text))
    make_images(each=1)
    monkeypatch.setenv("MODEL_SECRET", text)
    shown = [hotloop("predict", "model.onnx.enc", "images", "--decrypt", place, expect=0).out
             for place in ("secret", "env:MODEL_SECRET")]  # fmt: skip
    assert shown[0] == shown[1] != ""
    refused = hotloop("predict", "model.onnx.enc", "images", expect=2)
    assert "--decrypt" in refused.err
    monkeypatch.setenv("MODEL_SECRET", text[:-1])
    odd = hotloop("predict", "model.onnx.enc", "images", "--decrypt", "env:MODEL_SECRET", expect=2)
    assert text[:-1] not in odd.out + odd.err


@pytest.mark.parametrize("tolerance", ["nan", "inf"])
def test_a_tolerance_that_nothing_exceeds_is_refused(hotloop: Command, tolerance: str) -> None:
    refused = hotloop("export", "latest", "--tolerance", tolerance, expect=2)
    assert f"'{tolerance}' is no number" in refused.err


@pytest.mark.parametrize(("absent", "command"), [("onnxruntime", "predict"), ("cryptography", "export")])
def test_what_is_not_installed_is_said_in_three_lines(
    tmp_path: Path, hotloop: Command, monkeypatch: pytest.MonkeyPatch, absent: str, command: str
) -> None:
    (tmp_path / f"{absent}.py").write_text(f"raise ModuleNotFoundError('no {absent}', name='{absent}')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    write_model(tmp_path / "model.onnx")
    arguments = ["predict", "model.onnx", "a.jpg"] if command == "predict" else ["export", "key", "release.key"]
    finished = hotloop(*arguments, expect=2)
    assert [line.split(":")[0] for line in finished.err.splitlines()] == ["error", "cause", "fix"]
    assert f"{absent} is not installed" in finished.err
    assert 'pip install "hotloop[export]"' in finished.err


@pytest.mark.parametrize("command", ["export", "storage"])
def test_a_key_that_cannot_be_written_is_told_in_words_of_its_command(
    tmp_path: Path, hotloop: Command, command: str
) -> None:
    (tmp_path / "file").touch()
    refused = hotloop(command, "key", "file/release.key", expect=2)
    assert refused.err.splitlines()[2] == f"fix:   a part of that path is a file; hotloop {command} key FILE"
    absent = hotloop(command, "key", "absent/release.key", expect=2).err.splitlines()[2]
    assert absent == f"fix:   make that folder first, or see that its disk is mounted; hotloop {command} key FILE"
