"""`hotloop image`, but for what needs an engine: tests/engines builds."""

import json
import os
import re
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Command

FOR = ("--driver", "580", "--gpu", "H200")
DEFAULT_BUILD = (*FOR, "--torch", "2.14", "--cuda", "13.0")
"""One that lies on the index that pip uses; others lie elsewhere."""


@pytest.fixture
def path() -> Iterator[None]:
    """For tests that change PATH."""
    before = os.environ["PATH"]
    yield
    os.environ["PATH"] = before


def stand_in(folder: Path, name: str, script: str) -> None:
    """An engine whose words are known."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_render_prints_a_dockerfile_or_one_object(hotloop: Command) -> None:
    found = json.loads(hotloop("image", "render", *FOR, "--json", expect=0).out)
    assert {"dockerfile", "tag", "versions"} <= found.keys()
    assert found["tag"] == "pytorch-cuda-base:v2.15.0-cuda13.0-ubuntu24.04"
    assert found["versions"]["torch"] == "2.15.0"
    printed = hotloop("image", "render", *FOR, "--timestamp", "7", expect=0).out
    assert printed == hotloop("image", "render", *FOR, "--timestamp", "7", expect=0).out
    assert printed.startswith(f"# {found['tag']}\n")


@pytest.mark.slow
def test_render_writes_a_folder_that_the_check_has_nothing_against(hotloop: Command, tmp_path: Path) -> None:
    options = (
        "--with",
        "tensorboard",
        "--package",
        "einops>=0.8",
        "--timestamp",
        "1700000000",
        "--apptainer",
        "--devcontainer",
    )
    done = json.loads(hotloop("image", "render", *DEFAULT_BUILD, *options, "--output", "out", "--json", expect=0).out)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        {name.split("/")[0] for name in done["files"]}
    )
    locked = (tmp_path / "out/requirements.lock").read_text()
    assert "einops==" in locked
    assert locked.count("==") < locked.count("--hash=sha256:")
    assert "://" not in locked, "no address of an index"
    assert "--index" not in locked
    found = json.loads(hotloop("image", "check", "out/Dockerfile", "--driver", "580.95", "--json", expect=0).out)
    assert found == {"findings": []}
    bill = json.loads(hotloop("image", "sbom", "out/requirements.lock", "--timestamp", "0", expect=0).out)
    assert {"torch", "einops"} <= {one["name"] for one in bill["components"]}


@pytest.mark.slow
def test_extensions_are_locked_as_source_and_all_else_as_wheels(hotloop: Command, tmp_path: Path) -> None:
    hotloop("image", "render", *DEFAULT_BUILD, "--extension", "docopt==0.6.2", "--output", "out", expect=0)
    assert "docopt==0.6.2" in (tmp_path / "out/extensions.lock").read_text()
    assert "docopt" not in (tmp_path / "out/requirements.lock").read_text()
    hotloop("image", "check", "out/Dockerfile", expect=0)
    done = hotloop("image", "render", *DEFAULT_BUILD, "--package", "docopt==0.6.2", "--output", "other", expect=1)
    assert "uv finds no packages for this image" in done.err
    assert "what has no wheel is an --extension" in done.err
    assert not (tmp_path / "other").exists()


def test_check_tells_what_is_wrong(hotloop: Command, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN pip install torch==2.14.1 numpy\nENV API_KEY=abc\n")
    out = hotloop("image", "check", "Dockerfile", "--driver", "535", expect=1).out
    for id in ("image-base-latest", "image-root", "image-secret-in-env", "image-driver-floor", "DL3042"):
        assert f"[{id}]" in out
    assert "✗ line 1: " in out
    assert "DL3006" not in out, "it says the same as image-base-latest"
    (tmp_path / "Dockerfile").write_text("FROM debian:13\nUSER 1000\n")
    assert "2 notes" in hotloop("image", "check", "Dockerfile", expect=0).out


def test_build_prints_what_each_engine_would_be_told(hotloop: Command, tmp_path: Path, path: None) -> None:
    for name in ("docker", "podman", "buildah"):
        stand_in(tmp_path / "bin", name, "exit 0")
    os.environ["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    text = hotloop("image", "render", *FOR, "--timestamp", "1700000000", expect=0).out
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "pip.conf").write_text("[global]\n")
    tag = "pytorch-cuda-base:v2.15.0-cuda13.0-ubuntu24.04"
    for engine, verb in {"docker": "docker build", "podman": "podman build", "buildah": "buildah bud"}.items():
        out = hotloop("image", "build", ".", "--print", "--engine", engine, "--pip-config", "pip.conf", expect=0).out
        assert out.startswith(verb)
        assert f"--tag {tag} " in out
        assert f"--secret=id=pip.conf,src={tmp_path}/pip.conf" in out
        assert ("--timestamp 1700000000" in out) == ("--format docker" in out) == (engine != "docker")
    assert hotloop("image", "build", ".", "--print", "--tag", "a:1", expect=0).out.startswith("docker build")


def test_run_prints_gpus_mounts_limits_and_user(hotloop: Command, tmp_path: Path, path: None) -> None:
    for name in ("docker", "podman", "buildah"):
        stand_in(tmp_path / "bin", name, "exit 0")
    os.environ["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    options = ("--mount", ".:/workspace:ro", "--env", "A=1", "--user", "1000:1000", "--print")
    docker = hotloop("image", "run", "a:1", "--gpus", "0,1", *options, "--", "python", "train.py", expect=0).out
    for part in (
        "device=0,1", f"--volume={tmp_path}:/workspace:ro", "--env=A=1", "--shm-size=8g", "--ulimit=memlock=-1",
        "--read-only", "--user=1000:1000", "--cap-drop=ALL", "a:1 python train.py\n",
    ):  # fmt: skip
        assert part in docker
    assert "--volume=hotloop-cache:" in docker
    other = hotloop("image", "run", "a:1", "--user", "2000:2000", "--print", expect=0).out
    assert "--tmpfs=/home/hotloop/.cache" in other, "the volume is user 1000's"
    podman = hotloop("image", "run", "a:1", "--engine", "podman", "--gpus", "all", "--print", expect=0).out
    assert "--device=nvidia.com/gpu=all" in podman
    files, processes = (int(re.findall(rf"--ulimit={name}=(\d+):", podman)[0]) for name in ("nofile", "nproc"))
    assert files == resource.getrlimit(resource.RLIMIT_NOFILE)[1], "podman starts nothing where it would be more"
    assert processes <= int(Path("/proc/sys/kernel/pid_max").read_text())
    assert "--read-only" not in hotloop("image", "run", "a:1", "--writable", "--print", expect=0).out
    buildah = hotloop("image", "run", "a:1", "--engine", "buildah", *options, "--", "python", expect=0).out
    assert buildah.startswith("sh -c ")


@pytest.mark.slow
def test_what_an_engine_does_not_start_is_bad_input_in_its_own_words(
    hotloop: Command, tmp_path: Path, path: None
) -> None:
    stand_in(tmp_path / "bin", "docker", "exit 1")
    stand_in(tmp_path / "bin", "podman", "printf 'Trying a...\\nError: a:1: no such image\\nSee help\\n' >&2; exit 125")
    os.environ["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    for verb in ("verify", "sbom", "check"):
        said = hotloop("image", verb, "a:1", "--engine", "podman", expect=2).err.splitlines()
        assert (len(said), said[1]) == (3, "cause: Error: a:1: no such image")
        assert "docker's daemon does not answer" in hotloop("image", verb, "a:1", "--engine", "docker", expect=2).err
    assert "names no variable" in hotloop("image", "run", "a:1", "--engine", "podman", "--env", "=x", expect=2).err


def test_the_exit_code_of_run_is_the_commands(hotloop: Command, tmp_path: Path, path: None) -> None:
    stand_in(tmp_path / "bin", "podman", "exit 75")
    os.environ["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    hotloop("image", "run", "a:1", "--engine", "podman", "--", "x", expect=75)
    (tmp_path / "Dockerfile").write_text("FROM a:1\n")
    assert (
        "podman did not build a:1" in hotloop("image", "build", ".", "--engine", "podman", "--tag", "a:1", expect=1).err
    )


def test_verify_shows_what_the_doctor_finds_inside(hotloop: Command, tmp_path: Path, path: None) -> None:
    finding = {"id": "no-gpu", "level": "error", "title": "There is no GPU", "evidence": "0 GPUs", "fix": "--gpus all"}
    stand_in(tmp_path / "bin", "podman", f"echo '{json.dumps({'findings': [finding], 'machine': {}})}'; exit 1")
    os.environ["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    assert "[no-gpu]" in hotloop("image", "verify", "a:1", "--engine", "podman", expect=1).out
    assert json.loads(hotloop("image", "verify", "a:1", "--engine", "podman", "--json", expect=1).out)["findings"]
    stand_in(tmp_path / "bin", "podman", "echo no such image >&2; exit 1")
    assert "no such image" in hotloop("image", "verify", "a:1", "--engine", "podman", expect=1).err


def test_an_image_is_outdated(hotloop: Command, tmp_path: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    try:
        (tmp_path / "requirements.lock").write_text("torch==2.14.0 \\\n    --hash=sha256:00\nnumpy==2.4.6\n")
        done = hotloop("image", "outdated", "requirements.lock", expect=1)
        assert "torch 2.14.0 has the patch 2.14.1" in done.out
        assert "no advisories are here" in done.err
        events = [{"introduced": "0"}, {"fixed": "2.4.7"}]
        affected = {
            "package": {"ecosystem": "PyPI", "name": "numpy"},
            "ranges": [{"type": "ECOSYSTEM", "events": events}],
        }
        with zipfile.ZipFile(tmp_path / "osv.zip", "w") as archive:
            archive.writestr("a.json", json.dumps({"id": "TEST-1", "summary": "open", "affected": [affected]}))
        assert "1 advisories" in hotloop("image", "advisories", "--source", "osv.zip", expect=0).out
        found = json.loads(hotloop("image", "outdated", "requirements.lock", "--json", expect=1).out)
        assert found["due"] is True
        assert [one["id"] for one in found["advisories"]] == ["TEST-1"]
        (tmp_path / "requirements.lock").write_text("torch==2.14.1\nnumpy==2.4.7\n")
        assert hotloop("image", "outdated", "requirements.lock", expect=0).out == "nothing is due\n"
        (tmp_path / "cache" / "hotloop" / "osv-pypi.zip").unlink()
        assert "were not looked for" in hotloop("image", "outdated", "requirements.lock", expect=0).out
    finally:
        del os.environ["XDG_CACHE_HOME"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("render", *FOR, "--base", "arch"), "--base arch is not known"),
        (("render", *FOR, "--base", "debian12", "--python", "3.13"), "--base debian12 has no Python 3.13"),
        (("render", *FOR, "--package", "a b"), "is no requirement"),
        (("render", *FOR, "--extension", "flash-attn"), "names no version"),
        (("render", *FOR, "--apptainer"), "--apptainer writes a file"),
        (("render", "--gpu", "RTX 4091"), "is no card"),
        (("check", "."), "fix:   hotloop image check ./Dockerfile"),
        (("sbom", "."), "fix:   name ./requirements.lock"),
        (("build", "nowhere", "--engine", "buildah"), "cannot read nowhere/Dockerfile"),
        (("run", "a:1", "--gpus", "two"), '--gpus "two" names no GPUs'),
        (("run", "a:1", "--mount", "data"), "has no target"),
        (("run", "a:1", "--mount", "./data:/data"), "there is no ./data"),
        (("run", "a:1", "--shm-size", "much"), "is no size"),
        (("run", "a:1", "--user", "me"), "is no number"),
        (("check", "nowhere/Dockerfile"), "cannot read nowhere/Dockerfile"),
        (("check", "nowhere/Dockerfile", "--driver", "new"), "is no version"),
        (("sbom", "nowhere.lock"), "cannot read nowhere.lock"),
        (("outdated", "nowhere.lock"), "cannot read nowhere.lock"),
    ],
)
def test_bad_input_is_refused_in_three_lines(arguments: tuple[str, ...], message: str, hotloop: Command) -> None:
    done = hotloop("image", *arguments, expect=2)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 3
    assert done.out == ""


def test_without_an_engine_it_says_what_to_install(hotloop: Command, tmp_path: Path, path: None) -> None:
    os.environ["PATH"] = str(tmp_path / "empty")
    done = hotloop("image", "run", "a:1", expect=2)
    assert "there is no docker, podman or buildah here" in done.err
    assert "apt-get install buildah" in done.err


def test_where_nothing_fits_nothing_is_written(hotloop: Command, tmp_path: Path) -> None:
    done = hotloop("image", "render", "--driver", "590.44.01", "--gpu", "V100", "--output", "out", expect=1)
    assert "no torch fits" in done.err
    assert not (tmp_path / "out").exists()
