"""A real image from what is rendered: built by buildah without a daemon, on a Debian that stands in for the base.

Where pip is configured with a folder that holds a torch for CPUs, the image gets that one, a tenth of the size.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MISSING = [name for name in ("buildah", "mmdebstrap") if not shutil.which(name)]
pytestmark = [
    pytest.mark.buildah,
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # the first builds an image, which downloads and compiles 700 MB beside other tests
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="without root, buildah needs user namespaces that not every machine has"
    ),
]
BASE = "localhost/stand-in:1"
PYTHON = "3.11"
"""Debian 12's."""
MOMENT = "1700000000"


@dataclass(frozen=True)
class Place:
    """Where images are kept, and how commands get there."""

    folder: Path
    environment: dict[str, str]

    def call(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900
        )  # fmt: skip
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def hotloop(self, *arguments: str, code: int = 0) -> str:
        return self.call(sys.executable, "-m", "hotloop", "image", *arguments, code=code)


def cpu_torch() -> Path | None:
    """A wheel of torch without CUDA, in a folder that pip is configured with."""
    folders = map(Path, os.environ.get("PIP_FIND_LINKS", "").split())
    digits = PYTHON.replace(".", "")
    return next((wheel for folder in folders for wheel in sorted(folder.glob(f"torch-*+cpu-cp{digits}-*.whl"))), None)


@pytest.fixture(scope="module")
def wheels() -> Iterator[str]:
    """The address of that folder; the build sees no other files of this machine."""
    wheel = cpu_torch()
    if wheel is None:
        yield ""
        return

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """No line for each request."""

    handler = functools.partial(Quiet, directory=str(wheel.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A store of images of its own, with the base in it."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "tmp").mkdir()
    store = f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/store"\n'
    (folder / "storage.conf").write_text(store)
    wheel = cpu_torch()
    environment = {
        **os.environ, "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "BUILDAH_ISOLATION": "chroot",
        "TMPDIR": str(folder / "tmp"), **({"UV_FIND_LINKS": str(wheel.parent)} if wheel else {}),
    }  # fmt: skip
    made = Place(folder, environment)
    try:
        made.call("mmdebstrap", "--quiet", "--variant=apt", "bookworm", "base.tar")
        (folder / "base.containerfile").write_text("FROM scratch\nADD base.tar /\n")
        made.call("buildah", "bud", "--tag", BASE, "--file", "base.containerfile", str(folder))
        yield made
    finally:
        made.call("buildah", "rm", "--all")
        made.call("buildah", "rmi", "--all", "--force")
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def secrets(place: Place, wheels: str) -> list[str]:
    """How pip reaches an index here, for the build alone."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    known = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    lines = ["[global]", "# not for layers", "cert = /etc/ssl/certs/ca-certificates.crt"]
    lines += [f"index-url = {known}"] if known else []
    lines += [f"find-links = {wheels}"] if wheels else []
    (place.folder / "pip.conf").write_text("\n".join(lines) + "\n")
    bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    return ["--pip-config", "pip.conf", *(["--certificates", bundle] if bundle else [])]


def render(place: Place, folder: str, *options: str) -> str:
    wheel = cpu_torch()
    torch = re.findall(r"torch-([\d.]+)", wheel.name)[0] if wheel else "2.14"
    wanted = ("--driver", "580", "--gpu", "H200", "--torch", torch, "--cuda", "13.0")
    done = place.hotloop("render", *wanted, "--base", BASE, "--python", PYTHON, "--timestamp", MOMENT,
                         "--source", "https://example.org/project", "--output", folder, *options, "--json")  # fmt: skip
    return str(json.loads(done)["tag"])


@pytest.fixture(scope="module")
def image(place: Place, secrets: list[str]) -> str:
    tag = render(place, "image")
    assert place.hotloop("build", "image", "--engine", "buildah", *secrets) == f"{tag}\n"
    return tag


def inside(place: Place, image: str, *command: str, options: tuple[str, ...] = (), code: int = 0) -> str:
    return place.hotloop("run", image, "--engine", "buildah", *options, "--", *command, code=code)


@pytest.fixture(scope="module")
def digits(place: Place) -> Path:
    """The demo, with a network that needs no torchvision: there is none for a torch without CUDA."""
    folder = place.folder / "digits"
    make = REPOSITORY / "examples/digits/make_images.py"
    place.call(sys.executable, str(make), str(folder / "examples/digits/images"))
    shutil.copy(REPOSITORY / "examples/digits/job.toml", folder)
    shutil.copy(REPOSITORY / "tests/support/tiny.py", folder)
    return folder


def test_it_trains_the_digits_as_a_user_without_privileges(place: Place, image: str, digits: Path) -> None:
    settings = "--set model.name=tiny:cnn --set train.epochs=2 --set run.dir=/tmp/run"
    script = f"id -u; id -g; echo $USER $HOME; hotloop train job.toml {settings}"
    out = inside(place, image, "sh", "-c", script, options=("--mount", f"{digits}:/workspace:ro"))
    assert out.splitlines()[:3] == ["1000", "1000", "hotloop /home/hotloop"]
    assert "finished after" in out
    assert float(re.findall(r"val_accuracy ([\d.]+)", out)[0]) > 0.2


def test_torch_compiles_on_the_cpu_inside(place: Place, image: str) -> None:
    code = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).tolist())"
    assert inside(place, image, "python", "-c", code) == "[1.0, 1.0, 1.0]\n"


def test_another_user_may_write_into_the_caches(place: Place, image: str) -> None:
    """Mounted over, they keep the mode that they have in the image: docker's and podman's runc sees to it."""
    out = inside(place, image, "sh", "-c", "stat -c %a ~/.cache && touch ~/.cache/a", options=("--user", "1234:1234"))
    assert out == "1777\n"


def test_exit_codes_pass_through_the_entry_point(place: Place, image: str) -> None:
    inside(place, image, "sh", "-c", "exit 75", code=75)


def test_labels_user_and_health_check(place: Place, image: str) -> None:
    config = json.loads(place.call("buildah", "inspect", "--type", "image", image))["Docker"]["config"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.created"] == "2023-11-14T22:13:20Z"
    assert labels["org.opencontainers.image.source"] == "https://example.org/project"
    assert (labels["hotloop.cuda"], labels["hotloop.python"]) == ("13.0", PYTHON)
    assert config["User"] == "1000:1000"
    assert config["Healthcheck"]["Test"] == ["CMD", "hotloop", "doctor"]
    assert config["Entrypoint"] == ["/usr/bin/tini", "-g", "--"]
    assert place.hotloop("check", image, "--engine", "buildah", "--driver", "580.95") == "nothing found\n"


def test_its_size(place: Place, image: str) -> None:
    """Of the same packages NVIDIA's image for PyTorch is 20 GB."""
    size = json.loads(place.call("buildah", "images", "--json", image))[0]["size"]
    number, unit = size.split()
    assert float(number) * {"MB": 1, "GB": 1000}[unit] < (2500 if cpu_torch() else 8000)


def test_nothing_of_the_build_is_left(place: Place, image: str) -> None:
    named = " -o ".join(["-name pip.conf", "-name '*.whl'", "-name '*.deb'", "-path /root/.cache"])
    script = f"find / -xdev '(' {named} ')' -print 2> /dev/null"
    out = inside(place, image, "sh", "-c", f"{script}; ls /var/log", options=("--user", "0:0"))
    assert [line for line in out.splitlines() if "ensurepip" not in line and "/share/python-wheels" not in line] == []


def test_the_doctor_a_bill_and_a_plan_of_the_image(place: Place, image: str) -> None:
    found = json.loads(place.hotloop("verify", image, "--engine", "buildah", "--json"))
    assert "no-gpu" in {one["id"] for one in found["findings"]}
    names = {one["name"] for one in json.loads(place.hotloop("sbom", image, "--engine", "buildah"))["components"]}
    assert {"torch", "torchvision", "hotloop"} <= names
    plan = json.loads(place.hotloop("outdated", image, "--engine", "buildah", "--json", code=1))
    assert any("days old" in reason for reason in plan["reasons"]), "it says that it is of 2023"


def test_building_again_gives_the_same_layers(place: Place, image: str, secrets: list[str]) -> None:
    """Of the same folder, rendered again, nothing of the first build at hand."""
    render(place, "again")
    place.hotloop("build", "again", "--engine", "buildah", "--no-cache", "--tag", "again:1", *secrets)
    layers = [
        json.loads(place.call("buildah", "inspect", "--type", "image", tag))["OCIv1"]["rootfs"]["diff_ids"]
        for tag in (image, "again:1")
    ]
    assert layers[0] == layers[1]
    assert len(layers[0]) > 2
