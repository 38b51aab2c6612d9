"""An exported classifier on files, without torch: what cannot be read does not stop the rest."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exported import CLASSES, IMAGES, write_model
from pictures import write_image
from PIL import Image

from hotloop.core.errors import DamagedSample, HotloopError, InputError
from hotloop.export.artefact import UnverifiedModel
from hotloop.export.images import find_files, normalised, read_image
from hotloop.export.manifest import Port
from hotloop.export.predict import Classifier, open_classifier, probabilities


@pytest.fixture
def classifier(tmp_path: Path) -> Classifier:
    return open_classifier(write_model(tmp_path / "model.onnx"))


def test_bright_and_dark_are_told_apart(classifier: Classifier, make_images: Callable[..., Path]) -> None:
    files = list(find_files([str(make_images())]))
    found = list(classifier.predict(files, top=2, batch=5))
    assert [one.path for one in found] == files
    assert [one.classes[0][0] for one in found] == [Path(file).parent.name for file in files]
    assert all(sum(share for _, share in one.classes) == pytest.approx(1) for one in found)
    assert [one.classes for one in classifier.predict(files, top=2, batch=1)] == [one.classes for one in found]


def test_what_cannot_be_read_is_named_and_the_rest_goes_on(
    classifier: Classifier, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    good = str(make_images() / "class0/000.png")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.png").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.png")
    write_image(tmp_path / "huge.png", 1, size=(1001, 1000))
    names = ["text.jpg", "empty.png", "pipe.png", "huge.png", "absent.png"]
    paths = [good, *(str(tmp_path / name) for name in names), "a\0b", "/dev/zero", good]
    for batch in (1, 3, 100):
        found = list(classifier.predict(paths, batch=batch))
        assert [one.path for one in found] == paths
        assert [bool(one.reason) for one in found] == [False, *[True] * 7, False]
        assert found[0].classes == found[-1].classes


def test_files_are_found_in_folders_and_by_patterns(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.png", "deep/c.webp", "[odd].png"):
        write_image(tmp_path / name, 1)
    (tmp_path / "notes.txt").write_text("")
    found = [os.path.relpath(file, tmp_path) for file in find_files([str(tmp_path)])]
    assert found == ["[odd].png", "a.png", "b.JPG", "deep/c.webp"]
    patterns = [str(tmp_path / "*.png"), str(tmp_path / "[odd].png"), str(tmp_path / "*.gif")]
    assert [Path(file).name for file in find_files(patterns)] == ["[odd].png", "a.png", "[odd].png", "*.gif"]


def test_an_image_of_the_models_size_is_taken_whole_where_arrays_were(tmp_path: Path) -> None:
    file = write_image(tmp_path / "a.png", 3, size=(16, 16))
    pixels = np.asarray(Image.open(file).convert("RGB"))
    exact = type(IMAGES)(**{**vars(IMAGES), "keep_exact": True})
    assert (read_image(str(file), exact) == normalised(pixels, exact)).all()
    assert (read_image(str(file), IMAGES) != normalised(pixels, IMAGES)).any(), "otherwise the middle is cut out"
    with pytest.raises(DamagedSample):
        read_image(str(tmp_path), exact)


def test_what_is_no_classifier_is_told(tmp_path: Path) -> None:
    tokens = write_model(tmp_path / "a.onnx", images=None, classes=(), inputs=(Port("tokens", "int64", ("batch", 8)),))
    with pytest.raises(InputError, match=r"no image classifier[\s\S]*tokens"):
        open_classifier(tokens)
    for kind, words in (("safetensors", "no program"), ("tensorrt", "TensorRT"), ("torch", "without a key")):
        with pytest.raises(InputError, match=words):
            open_classifier(write_model(tmp_path / "b.onnx", kind=kind))
    broken = write_model(tmp_path / "c.onnx", classes=CLASSES)
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(UnverifiedModel):
        open_classifier(broken)


def test_a_file_that_onnxruntime_cannot_read_is_told_in_three_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("exported.onnx_bytes", lambda: b"no model")
    with pytest.raises(HotloopError, match="onnxruntime cannot run the model") as caught:
        open_classifier(write_model(tmp_path / "model.onnx"))
    assert len(str(caught.value).splitlines()) == 3


def test_probabilities_do_not_overflow() -> None:
    found = probabilities(np.array([[1e4, 0, -1e4], [0, 0, 0]], np.float32))
    assert found.sum(axis=1) == pytest.approx([1, 1])
    assert found[0, 0] == 1
