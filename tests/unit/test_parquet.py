"""Images in Parquet files: any order, exact, and clear words for files that are otherwise."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from hotloop.core.errors import DamagedSample, InputError
from hotloop.data import parquet as own
from hotloop.data.image_list import find_images
from hotloop.data.images import CenterCrop, ImageFiles
from hotloop.data.loader import Loaders, LoaderSettings
from hotloop.data.pack import PackSettings, pack_images


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(file: Path, rows: int = 12, group: int = 5, first: int = 0, **columns: Any) -> Path:
    """As Hugging Face writes an image data set, unless other columns are given."""
    images = [{"bytes": picture(first + row), "path": f"{row}.png"} for row in range(rows)]
    table = pyarrow.table(columns or {"image": images, "label": [(first + row) % 3 for row in range(rows)]})
    if not columns:
        features = {"label": {"names": ["cat", "ant", "bee"], "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(exist_ok=True)
    parquet.write_table(table, file, row_group_size=group)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(2):
        write(tmp_path / "data" / f"train-{number}.parquet", first=12 * number)
    return tmp_path / "data"


@pytest.mark.parametrize("location", ["", "train-{0..1}.parquet"])
def test_every_image_is_found_with_its_class(folder: Path, location: str) -> None:
    images = find_images(str(folder / location))
    assert images.classes == ("cat", "ant", "bee"), "numbered as the file says"
    assert len(images) == 24
    for number in np.random.default_rng(0).permutation(24).tolist():
        assert images.read(number) == picture(number)
        assert images.label(number) == number % 3
    assert images.path(13).endswith("train-1.parquet/1")
    assert find_images(str(folder / location)).fingerprint() == images.fingerprint()


def test_a_file_of_plain_columns(tmp_path: Path) -> None:
    columns = {
        "jpg": [picture(row) for row in range(6)],
        "label": ["b", "a"] * 3,
        "caption": ["-"] * 6,
        "width": [8] * 6,
    }
    images = find_images(str(write(tmp_path / "one.parquet", **columns)))
    assert images.classes == ("a", "b")
    assert [images.label(number) for number in range(6)] == [1, 0] * 3
    assert images.read(4) == picture(4)


def test_numbers_without_names_are_in_their_order(tmp_path: Path) -> None:
    file = write(tmp_path / "one.parquet", jpg=[picture(row) for row in range(3)], label=[10, 9, 2])
    assert find_images(str(file)).classes == ("2", "9", "10")


def test_workers_read_them(folder: Path) -> None:
    files = ImageFiles(find_images(str(folder)), 8, CenterCrop(1.0), 10**6)
    with Loaders([(files, LoaderSettings(6, shuffle=True))], 2) as (loader,):
        seen = sorted(index for batch in loader.batches() for index in batch.indices)
    assert seen == list(range(24))
    assert not loader.damages


def test_they_can_be_packed(folder: Path, tmp_path: Path) -> None:
    packed = pack_images(find_images(str(folder)), tmp_path / "shards", PackSettings(), 0)
    back = find_images(str(tmp_path / "shards"))
    assert packed.images == 24
    assert {back.read(number) for number in range(24)} == {picture(number) for number in range(24)}


def test_a_row_without_an_image_is_a_damaged_sample(tmp_path: Path) -> None:
    file = write(tmp_path / "one.parquet", jpg=[picture(0), None, b"", picture(3)], label=[0, 1, 0, 1])
    images = find_images(str(file))
    for number in (1, 2):
        with pytest.raises(DamagedSample, match="empty"):
            images.read(number)
    assert images.read(3) == picture(3)


def test_damage_is_one_of_samples(folder: Path) -> None:
    file = folder / "train-0.parquet"
    content = bytearray(file.read_bytes())
    content[200:400] = bytes(200)
    file.write_bytes(content)
    images = find_images(str(folder))
    refused = 0
    for number in range(12):
        try:
            images.read(number)
        except DamagedSample:
            refused += 1
    assert 0 < refused <= 5, "one row group"
    assert images.read(20) == picture(20)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": [0, 1]}, "no clear column of images"),
        ({"a": [b"1", b"2"], "b": [b"1", b"2"], "label": [0, 1]}, "a, b could be"),
        ({"image": [b"1", b"2"]}, "no clear column of labels"),
        ({"image": [b"1", b"2"], "x": [0, 1]}, "no clear column of labels"),
        ({"image": [b"1", b"2"], "label": [0.5, 1.5], "id": [0, 1]}, "label is of type double"),
        ({"image": [b"1", b"2"], "label": [[0], [1]], "id": [0, 1]}, "label is of type list"),
        ({"image": [b"1", b"2"], "label": [0, 1], "target": [0, 1]}, "label, target could be"),
        ({"image": [b"1", b"2"], "label": [0, None]}, 'label of row 1 is ""'),
        ({"image": [b"1", b"2", b"3"], "label": [0, 1, -1]}, 'label of row 2 is "-1"'),
        ({"image": [b"1", b"2"], "label": [0, 0]}, "1 class"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_images(str(write(tmp_path / "one.parquet", **columns)))


def test_a_number_that_means_no_class(tmp_path: Path) -> None:
    file = write(tmp_path / "one.parquet")
    table = parquet.read_table(file)
    bad = table.set_column(1, "label", pyarrow.array([7] * 12)).replace_schema_metadata(table.schema.metadata)
    parquet.write_table(bad, file)
    with pytest.raises(InputError, match='label of row 0 is "7"'):
        find_images(str(file))


def test_what_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(InputError, match=r"no\.parquet cannot be read"):
        find_images(str(tmp_path / "no.parquet"))
    (tmp_path / "mixed").mkdir()
    for name in ("a.tar", "a.parquet"):
        (tmp_path / "mixed" / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"\.tar and \.parquet"):
        find_images(str(tmp_path / "mixed"))
    monkeypatch.setattr(own, "_MOST_BYTES", 100)
    with pytest.raises(InputError, match="row_group_size=100"):
        find_images(str(write(tmp_path / "large.parquet")))


def test_files_whose_classes_differ_are_refused(folder: Path) -> None:
    write(folder / "train-1.parquet", jpg=[picture(1)], label=[0])
    with pytest.raises(InputError, match="other classes"):
        find_images(str(folder))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (pyarrow.array(["b", "a"] * 2, pyarrow.large_string()), ("a", "b")),
        (pyarrow.array(["b", "a"] * 2).dictionary_encode(), ("a", "b")),
        (pyarrow.array([True, False] * 2), ("0", "1")),
        (pyarrow.array([1, 0] * 2, pyarrow.uint8()), ("0", "1")),
    ],
)
def test_kinds_of_labels(tmp_path: Path, labels: Any, classes: tuple[str, ...]) -> None:
    file = write(tmp_path / "one.parquet", jpg=[picture(row) for row in range(4)], label=labels, id=list(range(4)))
    images = find_images(str(file))
    assert images.classes == classes
    assert [images.label(number) for number in range(4)] == [1, 0, 1, 0]


def test_a_file_that_is_replaced_is_found_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "one.parquet", jpg=[picture(0), picture(1)], label=["a", "b"])
    old = find_images(str(file))
    assert old.read(0) == picture(0)
    write(tmp_path / "new.parquet", jpg=[picture(2), picture(3)], label=["x", "y"]).replace(file)
    assert find_images(str(file)).classes == ("x", "y")
    assert find_images(str(file)).read(0) == picture(2)
    for place, seed in (("here", 5), ("there", 7)):
        monkeypatch.chdir(
            write(tmp_path / place / "d.parquet", jpg=[picture(seed), picture(1)], label=["a", "b"]).parent
        )
        assert find_images("d.parquet").read(0) == picture(seed)


def test_a_file_whose_rows_lie_in_another_order_by_now_has_damaged_samples(tmp_path: Path) -> None:
    file = write(tmp_path / "one.parquet", jpg=[picture(0), picture(1)], label=["a", "b"])
    images = find_images(str(file))
    assert images.read(0) == picture(0)
    write(tmp_path / "new.parquet", jpg=[picture(1), picture(0)], label=["b", "a"]).replace(file)
    with pytest.raises(DamagedSample, match="changed after it was listed"):
        images.read(0)


def test_a_file_with_fewer_rows_than_before_has_damaged_samples(tmp_path: Path) -> None:
    file = write(tmp_path / "one.parquet", jpg=[picture(row) for row in range(6)], label=[0, 1] * 3)
    images = find_images(str(file))
    write(file, jpg=[picture(9)], label=[0])
    with pytest.raises(DamagedSample):
        images.read(4)


def test_names_of_classes_are_for_numbers_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "one.parquet")
    table = parquet.read_table(file)
    parquet.write_table(table.set_column(1, "label", pyarrow.array(["x", "y"] * 6)), file)
    assert find_images(str(file)).classes == ("x", "y")


def test_files_of_several_sets_are_not_one(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "data" / f"{name}.parquet")
    with pytest.raises(InputError) as refused:
        find_images(str(tmp_path / "data"))
    assert "test, train" in refused.value.what
    assert len(find_images(f"{tmp_path}/data/train-{{00000..00001}}-of-00002.parquet")) == 24


def test_validation_may_name_more_classes_than_it_has(folder: Path, tmp_path: Path) -> None:
    images = find_images(str(folder), classes=("ant", "bee", "cat"))
    assert [images.label(number) for number in range(3)] == [2, 0, 1]
    file = write(tmp_path / "val.parquet", rows=2)
    assert [find_images(str(file), classes=("ant", "cat")).label(number) for number in range(2)] == [1, 0]
    with pytest.raises(InputError, match='label "bee"'):
        find_images(str(folder), classes=("ant", "cat"))
