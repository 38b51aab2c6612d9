"""Images into shards and back."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pictures import write_image
from PIL import Image

from hotloop.core.errors import InputError
from hotloop.data import pack
from hotloop.data.image_list import ImageList, find_images
from hotloop.data.pack import PackSettings, pack_images


def contents(images: ImageList) -> dict[bytes, str]:
    return {images.read(number): images.classes[images.label(number)] for number in range(len(images))}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_goes_in_comes_out(make_images: Callable[..., Path], tmp_path: Path, workers: int) -> None:
    images = find_images(str(make_images(classes=3, each=5)))
    looked: list[int] = []
    packed = pack_images(images, tmp_path / "shards", PackSettings(), workers, looked.append)
    assert (packed.images, packed.shards, sum(looked)) == (15, ["000000.tar"], 15)
    back = find_images(str(tmp_path / "shards"))
    assert contents(back) == contents(images)
    assert back.classes == images.classes
    labels = [back.label(number) for number in range(15)]
    assert labels != sorted(labels), "the classes are mixed"
    assert packed.size_bytes == sum(file.stat().st_size for file in (tmp_path / "shards").iterdir())


def test_the_bytes_depend_on_images_and_settings_alone(make_images: Callable[..., Path], tmp_path: Path) -> None:
    images = find_images(str(make_images(classes=2, each=6)))
    made = []
    for number, workers in enumerate((0, 1, 3)):
        pack_images(images, tmp_path / str(number), PackSettings(side=5, shard_bytes=8000), workers)
        made.append({file.name: file.read_bytes() for file in (tmp_path / str(number)).iterdir()})
    assert made[0] == made[1] == made[2]
    assert len(made[0]) > 1, "several shards"
    pack_images(images, tmp_path / "other", PackSettings(side=5, shard_bytes=8000, seed=1), 0)
    assert made[0] != {file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()}


def test_large_images_are_resized_and_small_ones_stay(tmp_path: Path) -> None:
    write_image(tmp_path / "in/a/large.png", 1, (300, 200))
    write_image(tmp_path / "in/b/small.png", 2, (40, 30))
    images = find_images(str(tmp_path / "in"))
    pack_images(images, tmp_path / "out", PackSettings(side=50), 0)
    back = find_images(str(tmp_path / "out"))
    sizes = set()
    for number in range(2):
        with Image.open(io.BytesIO(back.read(number))) as image:
            sizes.add((image.format, min(image.size)))
    assert sizes == {("JPEG", 50), ("PNG", 30)}


def test_damaged_images_are_left_out_and_named(make_images: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_images(classes=2, each=2)
    (folder / "class0/cut.png").write_bytes((folder / "class0/000.png").read_bytes()[:-30])
    (folder / "class0/empty.png").write_bytes(b"")
    packed = pack_images(find_images(str(folder)), tmp_path / "out", PackSettings(), 0)
    assert packed.images == 4
    assert sorted(Path(one.path).name for one in packed.damaged) == ["cut.png", "empty.png"]
    assert len(find_images(str(tmp_path / "out"))) == 4


def test_webdatasets_own_readers_find_a_number(make_images: Callable[..., Path], tmp_path: Path) -> None:
    pack_images(find_images(str(make_images(classes=2, each=1))), tmp_path / "out", PackSettings(), 0)
    with tarfile.open(tmp_path / "out/000000.tar") as tar:
        names = tar.getnames()
        assert names[:3] == ["000000000.png", "000000000.cls", "000000000.json"]
        file = tar.extractfile(names[1])
        assert file
        assert file.read() in (b"0", b"1")


def test_a_folder_with_something_in_it_stays_as_it_is(make_images: Callable[..., Path], tmp_path: Path) -> None:
    images = find_images(str(make_images(classes=2, each=1)))
    pack_images(images, tmp_path / "out", PackSettings(), 0)
    before = (tmp_path / "out/000000.tar").read_bytes()
    with pytest.raises(InputError, match="is not empty"):
        pack_images(images, tmp_path / "out", PackSettings(), 0)
    assert (tmp_path / "out/000000.tar").read_bytes() == before


def test_what_a_link_leads_to_is_filled(make_images: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "out").symlink_to("large-disk")
    pack_images(find_images(str(make_images(classes=2, each=1))), tmp_path / "out", PackSettings(), 0)
    assert (tmp_path / "out").is_symlink()
    assert [file.name for file in (tmp_path / "large-disk").iterdir()] == ["000000.tar"]


def test_two_do_not_pack_into_one_folder(make_images: Callable[..., Path], tmp_path: Path) -> None:
    images, out = find_images(str(make_images(classes=2, each=3))), tmp_path / "out"

    def second(done: int) -> None:
        with pytest.raises(InputError, match="another process packs into"):
            pack_images(images, out, PackSettings(side=4), 0)

    assert pack_images(images, out, PackSettings(), 0, second).images == 6
    assert contents(find_images(str(out))) == contents(images)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_the_folder_one_is_in_is_refused(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = find_images(str(make_images(classes=2, each=1)))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for name in (".", str(tmp_path / "out")):
        with pytest.raises(InputError, match="is the folder that you are in"):
            pack_images(images, Path(name), PackSettings(), 0)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_that_looks_like_all_of_it(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    images = find_images(str(make_images(classes=2, each=8)))
    adding = pack._add
    count = 0

    def fails(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count > 10:
            raise error
        adding(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pack, "_add", fails)
    with pytest.raises(type(error)):
        pack_images(images, tmp_path / "deep/out", PackSettings(shard_bytes=6000), 0)
    assert list((tmp_path / "deep").iterdir()) == []


def test_every_format_that_is_trained_on_can_be_packed(tmp_path: Path) -> None:
    for number, name in enumerate(("a.tif", "b.ppm", "c.pgm", "really_a_tiff.jpg")):
        (tmp_path / f"in/{number % 2}").mkdir(parents=True, exist_ok=True)
        kind = {"b.ppm": "PPM", "c.pgm": "PPM"}.get(name, "TIFF")
        Image.new("RGB", (20, 20), (number, 50, 90)).save(tmp_path / f"in/{number % 2}/{name}", format=kind)
    images = find_images(str(tmp_path / "in"))
    packed = pack_images(images, tmp_path / "out", PackSettings(), 0)
    assert (packed.images, packed.damaged) == (4, [])
    out = find_images(str(tmp_path / "out"))
    assert sorted(out.read(number) for number in range(4)) == sorted(images.read(number) for number in range(4))


def test_classes_keep_their_numbers(tmp_path: Path) -> None:
    for number, label in enumerate(("1", "2", "10", "cat ")):
        write_image(tmp_path / f"in/{label}/a.png", number)
    images = find_images(str(tmp_path / "in"))
    pack_images(images, tmp_path / "out", PackSettings(), 0)
    assert find_images(str(tmp_path / "out")).classes == images.classes
