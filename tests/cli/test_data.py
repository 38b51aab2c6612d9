"""`hotloop data`, as a user calls it."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command
from pictures import write_image


def test_a_check_names_what_is_damaged_and_fails(
    hotloop: Command, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_images(each=2)
    (folder / "class0/cut.jpg").write_bytes((folder / "class0/000.png").read_bytes()[:50])
    page = tmp_path / "page.html"
    finished = hotloop("data", "check", str(folder), "--workers", "0", "--page", str(page))
    assert finished.code == 1
    assert "damaged: 1" in finished.out
    assert "cut.jpg: " in finished.out
    assert "cut.jpg" in page.read_text()
    found = json.loads(hotloop("data", "check", str(folder), "--workers", "0", "--json").out)
    assert (found["images"], len(found["damaged"]), found["duplicates"], found["error"]) == (5, 1, [], True)


def test_a_check_of_good_data_is_done(hotloop: Command, make_images: Callable[..., Path]) -> None:
    finished = hotloop("data", "check", str(make_images(each=2)), "--workers", "1")
    assert finished.code == 0
    assert "4 images" in finished.out
    assert "nothing has to be mended" in finished.out
    assert finished.err == ""


def test_of_many_equal_files_some_are_named(hotloop: Command, make_images: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_images(each=2)
    for number in range(20):
        (folder / f"class0/copy{number:02}.png").write_bytes((folder / "class0/000.png").read_bytes())
    lines = hotloop("data", "check", str(folder), "--workers", "0", expect=0).out.splitlines()
    named = lines[lines.index("equal files: 1") + 1]
    assert (named.count("copy"), named.endswith(" = 13 more")) == (7, True)


def test_classes_that_training_or_validation_lacks_are_named(hotloop: Command, tmp_path: Path) -> None:
    for number, name in enumerate(("train/cat", "train/dog", "train/fox", "val/cat", "val/dog", "val/owl")):
        write_image(tmp_path / name / "0.png", number, (40, 40))
    lines = hotloop("data", "check", "train", "val", "--workers", "0", expect=1).out.splitlines()
    assert lines[1:] == [
        "classes of val without an image in train, which is trained: 1", "  owl",
        "classes of train without an image in val: 1", "  fox",
    ]  # fmt: skip
    for name in ("owl", "dog"):
        (tmp_path / f"val/{name}/0.png").unlink()
        (tmp_path / "val" / name).rmdir()
    lines = hotloop("data", "check", "train", "val", "--workers", "0", expect=0).out.splitlines()
    assert lines[0].endswith("3 classes in train, 1 class in val")
    assert lines[1:4] == ["classes of train without an image in val: 2", "  dog", "  fox"]


def test_a_page_that_cannot_be_written_is_an_error(hotloop: Command, make_images: Callable[..., Path]) -> None:
    finished = hotloop("data", "check", str(make_images(each=2)), "--workers", "0", "--page", "/nowhere/page.html")
    assert finished.code == 2
    assert finished.err.startswith("error: no folder /nowhere")
    assert finished.err.count("\n") == 3


@pytest.mark.parametrize("arguments", [("check", "--page", "page.html"), ("pack", "shards")])
def test_a_disk_that_takes_no_more_is_an_error(
    arguments: tuple[str, ...], make_images: Callable[..., Path], tmp_path: Path
) -> None:
    command, *rest = arguments
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", "data", command, str(make_images(each=2)), *rest, "--workers", "0"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
    )  # fmt: skip
    assert done.returncode == 2
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "cause", "fix"]
    assert done.stderr.startswith(f"error: cannot write {rest[-1]}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["images"], "nothing is left of it"


def test_a_folder_that_is_not_there_is_an_error(hotloop: Command) -> None:
    finished = hotloop("data", "check", "nowhere")
    assert finished.code == 2
    assert "no data at nowhere" in finished.err
    assert "--set" not in finished.err, "there is no job"


def test_a_folder_that_is_given_twice_is_an_error(hotloop: Command, make_images: Callable[..., Path]) -> None:
    folder = str(make_images(each=2))
    finished = hotloop("data", "check", folder, folder)
    assert finished.code == 2
    assert finished.err.startswith(f"error: {folder} is given twice")
    assert finished.err.count("\n") == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [("images", "./images/"), ("images", "link"), ("link/../images", "images"), ("s3://b/train", "s3://b/train/")],
)
def test_a_place_that_is_given_twice_by_other_spellings_is_an_error(
    first: str, second: str, hotloop: Command, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(make_images(each=2))
    finished = hotloop("data", "check", first, second, expect=2)
    assert finished.err.startswith(f"error: {second} is given twice, before as {first}\n")
    assert finished.err.count("\n") == 3


def test_files_that_are_passed_over_are_counted_and_named(hotloop: Command, make_images: Callable[..., Path]) -> None:
    folder = make_images(each=2)
    (folder / ".thumbnails").mkdir()
    names = [".thumbnails/a.png", "beside.png", "class0/.b.png", *(f"class1/{number}.heic" for number in range(9))]
    for name in names:
        (folder / name).touch()
    lines = hotloop("data", "check", "./images/", "--workers", "0", expect=0).out.splitlines()
    at = lines.index("passed over: hidden, of another suffix, or in no class folder: 12")
    assert lines[at + 1 : at + 10] == [*(f"  images/{name}" for name in names[:8]), "  and 4 more; --json names them"]
    found = json.loads(hotloop("data", "check", "images", "--workers", "0", "--json", expect=0).out)
    assert (found["passed_over"], found["images"]) == ([f"images/{name}" for name in names], 4)


def test_names_break_no_lines(hotloop: Command, make_images: Callable[..., Path], tmp_path: Path) -> None:
    name = "a\nb\x1b[2J\udcff é.png"
    (make_images(each=2) / "class0" / name).write_bytes(b"")
    line = r"  images/class0/a\nb\x1b[2J\udcff é.png: the file is empty"
    assert line in hotloop("data", "check", "images", "--workers", "0", expect=1).out.splitlines()
    assert line in hotloop("data", "pack", "images", "shards", "--workers", "0", expect=1).out.splitlines()
    found = json.loads(hotloop("data", "check", "images", "--workers", "0", "--json", expect=1).out)
    assert found["damaged"][0]["path"] == f"images/class0/{name}"


def test_the_most_pixels_are_said(hotloop: Command, make_images: Callable[..., Path]) -> None:
    make_images("images", each=4)
    make_images("images", classes=1, each=1, size=20)
    for command in (("check", "images"), ("pack", "images", "shards")):
        done = hotloop("data", *command, "--workers", "0", "--max-pixels", "256", expect=1)
        line = "  images/class0/000.png: 20 x 20 is 400 pixels; the limit is 256 (max_pixels)"
        assert line in done.out.splitlines()


def test_shards_do_not_become_a_class_of_what_they_are_made_of(
    hotloop: Command, make_images: Callable[..., Path]
) -> None:
    folder = make_images()
    failed = hotloop("data", "pack", str(folder), str(folder / "shards"), expect=2)
    assert "lies inside of" in failed.err
    assert not (folder / "shards").exists()


def test_shards_are_not_packed_into_object_storage(hotloop: Command, make_images: Callable[..., Path]) -> None:
    failed = hotloop("data", "pack", str(make_images()), "s3://bucket/shards", expect=2)
    assert "s3://bucket/shards is in object storage" in failed.err
    assert not Path("s3:").exists()


def test_packed_images_can_be_checked(hotloop: Command, make_images: Callable[..., Path], tmp_path: Path) -> None:
    folder, shards = str(make_images(each=3)), str(tmp_path / "shards")
    would = hotloop("data", "pack", folder, shards, "--dry-run")
    assert "6 images" in would.out
    assert not Path(shards).exists()
    assert hotloop("data", "pack", folder, shards, "--workers", "1").code == 0
    found = json.loads(hotloop("data", "check", shards, "--workers", "0", "--json").out)
    assert (found["images"], found["error"]) == (6, False)
    again = hotloop("data", "pack", folder, shards)
    assert (again.code, again.err.count("\n")) == (2, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_packing_that_is_ended_leaves_nothing(
    number: signal.Signals, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_images(each=2)
    large = write_image(folder / "class0/large.jpg", 1, (2000, 2000))
    for copy in range(2000):  # half a minute's work
        os.link(large, folder / f"class0/{copy}.jpg")
    command = [sys.executable, "-m", "hotloop", "data", "pack", str(folder), str(tmp_path / "shards"), "--workers", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    ) as child:  # it hears them also where these tests run under nohup
        while not (tmp_path / ".shards.tmp").exists() and child.poll() is None:
            time.sleep(0.05)
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (128 + number, "")
    assert list(tmp_path.iterdir()) == [folder]
