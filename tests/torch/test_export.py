"""A run's model leaves as it was validated: in every form, compared, with the same inputs made of the same files."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pictures import write_image
from PIL import Image
from runs import TOKENS_JOB
from safetensors import safe_open
from tiny import Regression
from torch import Tensor, nn

from hotloop import Checkpointer, HotloopError, InputError, train_job
from hotloop.core.job_file import load_job, parse_job
from hotloop.core.machine import read_machine
from hotloop.data.image_list import find_images
from hotloop.export import check, exporting, onnx_file
from hotloop.export.artefact import MANIFEST, beside, load, verify
from hotloop.export.exporting import Wanted, export
from hotloop.export.images import find_files, read_image
from hotloop.export.manifest import Latency
from hotloop.export.predict import onnx_forward, open_classifier, probabilities
from hotloop.export.program import capture, package_forward, save_package
from hotloop.export.source import Source, Trained, flat, named_run, open_source, open_weights
from hotloop.train.observer import Observer

Make = Callable[..., Path]


class Silent(Observer):
    def on(self, event: object) -> None:
        pass


@pytest.fixture(autouse=True)
def one_measurement_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_SECONDS", 0.0)


def trained(folder: Path, images: Path, **changes: Any) -> Path:
    """The directory of a run over small images; `changes` are of its job, "train__ema" say."""
    raw: dict[str, Any] = {
        "name": "small", "device": "cpu",
        "task": {"image_size": 16},
        "data": {"train": str(images), "val": str(images), "batch_size": 4, "workers": 0},
        "model": {"name": "tiny:cnn"},
        "train": {"epochs": 2},
        "optimizer": {"learning_rate": 0.05},
        "log": {"tensorboard": False, "report": False},
        "run": {"dir": str(folder)},
    }  # fmt: skip
    for key, value in changes.items():
        section, name = key.split("__")
        raw.setdefault(section, {})[name] = value
    train_job(parse_job(raw, "job"), read_machine(), Silent())
    return folder


def opened(run: Path, *overrides: str, weights: Any = "auto", warn: Callable[[str], None] = lambda _: None) -> Source:
    return open_source(*named_run(str(run), run.parent), overrides, weights, warn)


def weights_of(run: Path, *overrides: str, warn: Callable[[str], None] = lambda _: None) -> Trained:
    return open_weights(*named_run(str(run), run.parent), overrides, "auto", warn)


def pictures(folder: Path) -> Path:
    """Class folders with all that a decoder has to tell apart."""
    for number, mode in enumerate(("RGB", "L", "LA", "P", "RGBA", "1", "CMYK", "I;16")):
        file = (
            folder / f"class{number % 2}" / (f"{mode[0]}{number}.jpg" if mode == "CMYK" else f"{mode[0]}{number}.png")
        )
        write_image(file, number, size=(61, 40))
        if mode == "I;16":
            grey = np.random.default_rng(0).integers(0, 2**16, (40, 61), dtype=np.uint16)
            Image.fromarray(grey).save(file)
        else:
            Image.open(file).convert(mode).save(file)
    turned = Image.Exif()
    turned[0x0112] = 6
    write_image(folder / "class0/turned.jpg", 9, size=(200, 120), exif=turned)
    write_image(folder / "class1/flat.webp", 10, size=(300, 7))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs over ten pictures, with averaged weights; nothing in it is changed."""
    folder = tmp_path_factory.mktemp("export")
    return trained(folder / "run", pictures(folder / "pictures"), train__ema=0.5, task__center_crop=0.8)


def images_of(run: Path) -> Path:
    return Path(load_job(run / "job.toml").data.train)


def inputs(source: Source, count: int) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in source.arguments(next(source.batches(count)))]


def test_onnx_computes_what_pytorch_does_for_any_batch(run: Path, tmp_path: Path) -> None:
    source = opened(run)
    manifest = export(source, Wanted("onnx", tmp_path / "model.onnx"))
    assert manifest.agreement
    assert manifest.agreement.max_abs_error <= 1e-5
    assert (manifest.agreement.random, manifest.agreement.real) == (8, 10)
    assert manifest.inputs[0].shape == ("batch", 3, 16, 16)
    assert [(one.engine, one.batch) for one in manifest.latency] == [
        (engine, batch) for batch in (1, 32) for engine in ("pytorch", "onnxruntime")
    ]
    forward = onnx_forward(tmp_path / "model.onnx")
    for size in (1, 3, 33):
        images = np.random.default_rng(size).standard_normal((size, 3, 16, 16), np.float32)
        assert np.abs(forward([images])[0] - source.eager([images])[0]).max() < 1e-5
    origin = manifest.origin
    assert (origin.epoch, origin.step, origin.weights) == (2, 6, "averaged"), "what the run validates"
    assert origin.metrics.keys() == {"val_loss", "val_accuracy"}
    measured = source.measured(forward, 100)
    assert measured["accuracy"] == pytest.approx(origin.metrics["val_accuracy"])
    assert measured["loss"] == pytest.approx(origin.metrics["val_loss"], rel=1e-5)
    assert str(Path(__file__).parents[1]).encode() not in (tmp_path / "model.onnx").read_bytes(), "nobody's paths"


def test_a_checkpoint_and_its_weights_can_be_named(run: Path) -> None:
    averaged, model = opened(run), opened(run, weights="model")
    weights = [next(source.model.parameters()) for source in (averaged, model)]
    assert not torch.equal(*weights)
    first, last = sorted((run / "checkpoints").iterdir())
    assert [opened(path).origin.step for path in (first, last)] == [3, 6]


def test_predict_sees_what_the_validation_sees_bit_for_bit(run: Path) -> None:
    source = opened(run)
    settings = source.images
    assert settings
    ready = torch.cat([batch["images"] for batch in source.batches(100)]).numpy()
    files = list(find_files([str(images_of(run))]))
    listed = find_images(str(images_of(run)))
    assert files == [listed.path(number) for number in range(len(listed))]
    made = np.stack([read_image(file, settings) for file in files])
    assert len(made) == 10
    assert made.dtype == ready.dtype
    assert (made == ready).all()


def test_predict_says_what_the_model_says(run: Path, tmp_path: Path) -> None:
    source = opened(run)
    sign = Ed25519PrivateKey.generate()
    images = np.concatenate([batch["images"] for batch in source.batches(100)])
    expected = probabilities(source.eager([images])[0])
    files = list(find_files([str(images_of(run))]))
    for kind, name in (("onnx", "model.onnx"), ("torch", "model.pt2")):
        export(source, Wanted(kind, tmp_path / name, check=False, sign=sign))  # type: ignore[arg-type]
        classifier = open_classifier(tmp_path / name, sign.public_key())
        found = [dict(one.classes) for one in classifier.predict(files, top=2)]
        assert [[one[name] for name in source.classes] for one in found] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_what_less_precise_files_cost_is_stated(run: Path, tmp_path: Path, precision: Any) -> None:
    source = opened(run)
    manifest = export(source, Wanted("onnx", tmp_path / "model.onnx", precision))
    assert manifest.agreement
    assert manifest.agreement.tolerance is None
    assert manifest.agreement.before["accuracy"] == source.measured(source.eager, 100)["accuracy"]
    forward = onnx_forward(tmp_path / "model.onnx")
    assert manifest.agreement.after == source.measured(forward, 100)
    types = {one.data_type for one in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert {"fp16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}[precision] in types
    real = inputs(source, 16)
    assert 0 < np.abs(forward(real)[0] - source.eager(real)[0]).max() <= manifest.agreement.max_abs_error < 0.3
    assert forward(real)[0].dtype == np.float32


def test_a_package_runs_in_torch_and_holds_nobodys_paths(run: Path, tmp_path: Path) -> None:
    source = opened(run)
    manifest = export(source, Wanted("torch", tmp_path / "model.pt2"))
    assert manifest.agreement
    assert manifest.agreement.max_abs_error <= 1e-6
    content = load(tmp_path / "model.pt2")[1][0]
    real = inputs(source, 3)
    assert np.abs(package_forward(content)(real)[0] - source.eager(real)[0]).max() <= 1e-6
    assert str(Path(__file__).parents[1]).encode() not in content
    program, _ = capture(source, source.arguments(next(source.batches(2))))
    with pytest.raises(OSError, match="No space left"):
        save_package(program, Path("/dev/full"))


def test_weights_are_written_bit_for_bit(run: Path, tmp_path: Path) -> None:
    source = opened(run)
    manifest = export(weights_of(run), Wanted("safetensors", tmp_path / "model.safetensors"))
    assert manifest.agreement
    assert manifest.agreement.max_abs_error == 0
    assert (manifest.classes, manifest.images) == (source.classes, source.images)
    assert (manifest.inputs, manifest.outputs) == ((), ()), "there is no program"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["class0", "class1"]
        for name, tensor in source.model.state_dict().items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_weights_need_no_data(run: Path, tmp_path: Path) -> None:
    told: list[str] = []
    absent = [f"data.{split}={tmp_path}/absent" for split in ("train", "val")]
    trained = weights_of(run, *absent, warn=told.append)
    assert told == [f"no data at {tmp_path}/absent: names of classes are left out"]
    manifest = export(trained, Wanted("safetensors", tmp_path / "model.safetensors"))
    assert (manifest.classes, manifest.origin) == ((), opened(run).origin)
    assert (trained.state.keys(), trained.images) == (opened(run).model.state_dict().keys(), opened(run).images)
    with pytest.raises(InputError, match="which holds no program"):
        open_classifier(tmp_path / "model.safetensors")
    weights_of(run, f"data.train={pictures(tmp_path / 'other') / 'class0'}/..", warn=told.append)
    assert len(told) == 1, "the same data elsewhere"
    (tmp_path / "other/class0/R0.png").unlink()
    weights_of(run, f"data.train={tmp_path}/other", warn=told.append)
    assert "has changed since the run" in told[1]


def test_a_language_model_takes_any_number_of_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 400).astype(np.uint16))
    (tmp_path / "job.toml").write_text(TOKENS_JOB.replace("tokens.npy", f"{tmp_path}/tokens.npy"))
    train_job(load_job(tmp_path / "job.toml", [f"run.dir={tmp_path}/run", "train.epochs=1"]), read_machine(), Silent())
    source = opened(tmp_path / "run")
    manifest = export(source, Wanted("onnx", tmp_path / "model.onnx"))
    assert manifest.inputs[0].shape == ("batch", "tokens")
    forward = onnx_forward(tmp_path / "model.onnx")
    for shape in ((1, 1), (3, 5), (2, 16)):
        tokens = np.random.default_rng(1).integers(0, 64, shape)
        assert np.abs(forward([tokens])[0] - source.eager([tokens])[0]).max() < 1e-5
    assert source.measured(forward, 100)["loss"] == pytest.approx(manifest.origin.metrics["val_loss"], rel=1e-4)
    with pytest.raises(InputError, match="no image classifier"):
        open_classifier(tmp_path / "model.onnx")


def of_eight(vocabulary: int, context: int) -> nn.Module:
    """Takes eight tokens at a time and no other number."""
    return nn.Sequential(
        nn.Embedding(vocabulary, 4), nn.Unflatten(1, (2, 4)), nn.Flatten(1, 2), nn.Linear(4, vocabulary)
    )


def test_a_model_of_one_number_of_tokens_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 100).astype(np.uint16))
    (tmp_path / "job.toml").write_text(TOKENS_JOB.replace("tokens.npy", f"{tmp_path}/tokens.npy"))
    changes = ["task.context=8", "train.epochs=1", f"model.name={__name__}:of_eight", "model.arguments={}"]
    train_job(load_job(tmp_path / "job.toml", [f"run.dir={tmp_path}/run", *changes]), read_machine(), Silent())
    source = opened(tmp_path / "run")
    manifest = export(source, Wanted("onnx", tmp_path / "model.onnx"))
    assert manifest.inputs[0].shape == ("batch", 8)
    measured = source.measured(onnx_forward(tmp_path / "model.onnx"), 100)
    assert measured["loss"] == pytest.approx(manifest.origin.metrics["val_loss"], rel=1e-4)


@pytest.mark.parametrize("side", [16, 20])
def test_images_in_arrays_are_seen_as_the_validation_sees_them(tmp_path: Path, side: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, side, side, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(6) % 2, classes=["cat", "dog"])
    source = opened(trained(tmp_path / "run", tmp_path / "a.npz", train__epochs=1, task__center_crop=0.8))
    assert source.images
    assert source.classes == ("cat", "dog")
    ready = torch.cat([batch["images"] for batch in source.batches(100)]).numpy()
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / f"{number}.png")
        difference = np.abs(read_image(str(tmp_path / f"{number}.png"), source.images) - ready[number]).max()
        assert difference == 0 if side == 16 else difference <= 1.01 / 255 / 0.224  # torchvision resizes those


class Named(nn.Module):
    """Takes two inputs, one by name, and returns two by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"prediction": self.linear(inputs) * scale, "scaled": inputs * scale}


class TwoInputs(Regression):
    """A task that calls its model in its own way."""

    def model(self) -> nn.Module:
        return Named()

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = model(batch["inputs"], scale=batch["targets"] * 0 + 2)["prediction"]
        return outputs


def custom(folder: Path, task: str) -> Path:
    job = {"device": "cpu", "task": {"name": task}, "data": {"train": "made", "batch_size": 4, "workers": 0},
           "model": {"name": "made"}, "train": {"epochs": 1}, "log": {"tensorboard": False, "report": False},
           "optimizer": {"learning_rate": 0.01}, "run": {"dir": str(folder)}}  # fmt: skip
    train_job(parse_job(job, "job"), read_machine(), Silent())
    return folder


def test_a_task_of_ones_own_is_exported_as_it_calls_its_model(tmp_path: Path) -> None:
    source = opened(custom(tmp_path / "run", f"{__name__}:TwoInputs"))
    manifest = export(source, Wanted("onnx", tmp_path / "model.onnx"))
    assert [one.name for one in manifest.inputs] == ["inputs", "scale"]
    assert manifest.outputs == ("prediction", "scaled")
    forward = onnx_forward(tmp_path / "model.onnx")
    assert source.measured(forward, 10)["loss"] == pytest.approx(source.measured(source.eager, 10)["loss"], rel=1e-5)


class Fixed(nn.Linear):
    """Knows of batches of two alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(2, 1))


class Deciding(nn.Linear):
    """Decides by what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:  # the line that is named
            return x
        return super().forward(x)


class Unknown(nn.Linear):
    """Uses what ONNX does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.special.bessel_j0(x))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Fixed, "its batch is 2"),
        (Deciding, r"depends on its inputs' values: test_export.py, line \d+: if x.sum\(\) > 1e6"),
        (Unknown, r"ONNX has nothing for the operation \w+\.bessel_j0"),
    ],
)
def test_what_cannot_be_exported_is_named(
    model: type[nn.Module], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = opened(custom(tmp_path / "run", "tiny:Regression"))
    odd = model(1, 1).eval().requires_grad_(False)
    with pytest.raises(InputError, match=words) as caught:
        export(replace(source, model=odd), Wanted("onnx", tmp_path / "out" / "model.onnx"))
    assert len(str(caught.value).splitlines()) == 3
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(InputError, match="it returns Tensor, str"):
        flat((torch.zeros(1), "text"))
    assert capfd.readouterr() == ("", "")


def test_an_opset_that_is_not_is_told(run: Path, tmp_path: Path) -> None:
    source = opened(run)
    with pytest.raises(InputError, match="--opset 99 is not supported"):
        export(source, Wanted("onnx", tmp_path / "model.onnx", opset=99))
    assert export(source, Wanted("onnx", tmp_path / "model.onnx", opset=18, check=False)).opset == 18
    with pytest.raises(InputError, match="versions of ONNX's operators"):
        export(source, Wanted("torch", tmp_path / "model.pt2", opset=18))
    with pytest.raises(InputError, match="fp32 alone"):
        export(source, Wanted("safetensors", tmp_path / "model.safetensors", "int8"))
    if find_spec("tensorrt") is None:
        with pytest.raises(InputError, match="tensorrt is not installed here"):
            export(source, Wanted("tensorrt", tmp_path / "model.engine"))


def test_outputs_that_differ_are_no_model(run: Path, tmp_path: Path) -> None:
    source = opened(run)

    def wrong(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [output + 1e-3 for output in source.eager(arrays)]

    with pytest.raises(
        HotloopError, match=r"differ from PyTorch's by 0.001; 0.0001 is allowed[\s\S]*10 real"
    ) as caught:
        check.compare(source, wrong, "fp32", 1e-4, 100)
    assert caught.value.exit_code == 1
    for odd in (lambda a: [source.eager(a)[0][:, :1]], lambda a: [source.eager(a)[0] * np.nan]):
        with pytest.raises(HotloopError, match="computes something else"):
            check.compare(source, odd, "int8", 1e-4, 100)
    assert check.compare(source, wrong, "fp16", 1e-4, 100).max_abs_error == pytest.approx(1e-3, rel=0.01)
    with pytest.raises(HotloopError, match="differ from PyTorch's"):
        export(source, Wanted("onnx", tmp_path / "strict.onnx", tolerance=-1.0))
    assert not [name for name in os.listdir(tmp_path) if "strict" in name]


def test_weights_that_give_nan_are_told_as_such(run: Path) -> None:
    source = opened(run)
    next(source.model.parameters()).fill_(np.nan)
    with pytest.raises(HotloopError, match=r"in PyTorch already\nfix:   name an earlier checkpoint"):
        check.compare(source, source.eager, "fp32", 1e-4, 10)


def test_large_weights_lie_beside_and_are_read_from_memory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beyond 2 GB, from 1 byte on."""
    plain = trained(tmp_path / "wide", images_of(run), model__name="tiny:wide", train__epochs=1)
    with pytest.raises(InputError, match="has no averaged weights"):
        opened(plain, weights="averaged")
    source = opened(plain)
    monkeypatch.setattr(onnx_file.write_onnx, "__defaults__", (1,))
    manifest = export(source, Wanted("onnx", tmp_path / "model.onnx"))
    assert [one.name for one in manifest.files] == ["model.onnx", "model.onnx.data"]
    _, (program, data) = load(tmp_path / "model.onnx")
    forward = onnx_forward(program, {"model.onnx.data": data})
    real = inputs(source, 4)
    (tmp_path / "model.onnx.data").unlink()
    assert np.abs(forward(real)[0] - source.eager(real)[0]).max() < 1e-5
    with pytest.raises(InputError, match="fp32 alone"):
        export(source, Wanted("onnx", tmp_path / "small.onnx", "int8"))


def test_runs_that_cannot_be_exported_are_told(run: Path, make_images: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run "):
        opened(tmp_path / "nothing")
    with pytest.raises(InputError, match="--set data"):
        opened(run, f"data.train={tmp_path}/absent")
    with pytest.raises(InputError, match="does not fit the job's model"):
        opened(run, f"data.train={make_images('more', classes=3)}", f"data.val={tmp_path}/more")
    told: list[str] = []
    opened(run, f"data.train={make_images('moved', each=3)}", f"data.val={tmp_path}/moved", warn=told.append)
    assert "has changed since the run" in told[0]
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("epoch-*"))
    with pytest.raises(InputError, match="no checkpoint at"):
        opened(bare)
    Checkpointer(bare / "checkpoints").save({"model": {"a": torch.zeros(1)}, "step": 1}, 1)
    with pytest.raises(InputError, match="another loop"):
        opened(bare)


def test_a_full_disk_in_the_middle_leaves_the_older_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = opened(run), tmp_path / "model.onnx"
    export(source, Wanted("onnx", out, check=False))

    def full(*_: object) -> tuple[Latency, ...]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, "time_both", full)
    with pytest.raises(HotloopError, match="cannot write"):
        export(source, Wanted("onnx", out, "int8", replace=True))
    assert verify(out).manifest.precision == "fp32"
    assert not (tmp_path / ".model.onnx.unfinished").exists()
    assert beside(out, MANIFEST).exists()
