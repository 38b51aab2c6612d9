"""`hotloop resolve`."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
from command import Command


def test_what_to_type_is_the_first_line(hotloop: Command) -> None:
    done = hotloop("resolve", "--driver", "535.104", "--gpu", "V100", "--python", "3.11", expect=0)
    assert done.out.splitlines()[0] == "uv pip install torch==2.14.1 torchvision==0.29.1 --torch-backend=cu126"
    assert "driver_verdict: limited" in done.out


def test_json_is_one_object(hotloop: Command) -> None:
    options = ["--driver", "580.95.05", "--gpu", "H100", "--gpu", "A100", "--python", "3.12", "--cuda", "13.0"]
    found = json.loads(hotloop("resolve", *options, "--json", expect=0).out)
    assert (found["torch"], found["cuda"], found["driver_verdict"]) == ("2.15.0", "13.0", "full")
    assert found["python"] == "3.12"
    assert {"cudnn", "nccl", "install", "source", "table_date"} <= set(found)


def test_libraries_are_told_of_builds_that_pip_does_not_take_by_itself(hotloop: Command) -> None:
    found = json.loads(hotloop("resolve", "--driver", "535.104", "--gpu", "V100", "--json", expect=0).out)
    assert (found["cuda"], found["cudnn"], found["nccl"]) == ("12.6", "9.10.2.21", "2.29.3")
    assert "cuDNN and NCCL" in found["source"]


def test_what_was_concluded_and_not_read_is_said(hotloop: Command) -> None:
    found = json.loads(hotloop("resolve", "--driver", "580", "--gpu", "H200", "--json", expect=0).out)
    assert (found["torch"], found["cuda"], found["cudnn"], found["nccl"]) == ("2.15.0", "13.0", "9.26.0.51", "2.30.7")
    assert "cuDNN and NCCL are those of torch 2.15.0 for CUDA 13.2" in found["notes"][0]


def test_cards_with_arm_processors_get_arm_builds(hotloop: Command) -> None:
    of_itself = json.loads(hotloop("resolve", "--driver", "580.95.05", "--gpu", "GH200", "--json", expect=0).out)
    named = hotloop("resolve", "--driver", "580.95.05", "--gpu", "GH200", "--aarch64", "--json", expect=0).out
    assert of_itself == json.loads(named)
    other = json.loads(hotloop("resolve", "--driver", "580.95.05", "--gpu", "H200", "--json", expect=0).out)
    assert (other["processor"], of_itself["processor"]) == ("x86_64", "aarch64")


def test_each_card_without_code_is_named(hotloop: Command) -> None:
    told = hotloop("resolve", "--driver", "580.95.05", "--gpu", "V100", "--gpu", "P100", "--torch", "2.14",
                   "--cuda", "13", expect=1).out  # fmt: skip
    assert "holds no code for Pascal (compute capability 6.0) and Volta (compute capability 7.0)" in told


def test_cards_that_share_no_build_are_told_with_the_build_of_each(hotloop: Command) -> None:
    told = hotloop("resolve", "--driver", "580.95.05", "--gpu", "GTX 1080", "--gpu", "RTX 5090", expect=1).out
    assert "Pascal (compute capability 6.1) has torch 2.14.1 for CUDA 12.6 at the newest" in told
    assert "Blackwell (compute capability 12.0) has torch 2.15.0 for CUDA 13.0 at the newest" in told


def test_the_impossible_is_explained_with_exit_code_1(hotloop: Command) -> None:
    options = ["--driver", "590.44.01", "--gpu", "V100"]
    assert "branch 580 is the last driver for Volta" in hotloop("resolve", *options, expect=1).out
    found = json.loads(hotloop("resolve", *options, "--json", expect=1).out)
    assert len(found["impossible"]) == 1
    assert found["changes"][0]["install"].startswith("uv pip install torch==2.14.1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "RTX 4091"], "no card that the table has"),
        (["--driver", "latest"], '--driver "latest" is no version'),
        (["--driver", "580", "--python", "2.7"], "no version of Python 3"),
        (["--driver", "580", "--python", "py311"], "--python 3.12"),
        (["--driver", "", "--gpu", "H100"], "--driver is empty"),
        (["--gpu", "H100", "--glibc", ""], "--glibc is empty"),
        (["--sm", "hopper"], "no compute capability"),
        (["--gpu", "H100", "--torch", "newest"], "no version"),
    ],
)
def test_bad_input_is_told_in_three_lines(hotloop: Command, options: list[str], message: str) -> None:
    done = hotloop("resolve", *options, expect=2)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 3


def test_without_a_driver_something_has_to_be_named(hotloop: Command) -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert "there is no NVIDIA driver here" in hotloop("resolve", expect=2).err
    else:
        assert hotloop("resolve", expect=0).out


def write_wheel(folder: Path, name: str, version: str, tag: str, requires: list[str], python: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{information}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{information}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        wheel.writestr(f"{information}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip sees: a torch that the table does not know, for this Python and the next, and its torchvision."""
    folder, here = tmp_path / "wheels", sys.version_info.minor
    folder.mkdir()
    cuda = ["cuda-toolkit[cublas]==13.2.2; platform_system == 'Linux'", "nvidia-cudnn-cu13==9.30.0.1", "triton~=3.10.0"]
    for minor in (here, here + 1):
        tag = f"cp3{minor}-cp3{minor}-manylinux_2_28_x86_64"
        write_wheel(folder, "torch", "2.99.0", tag, [*cuda, "nvidia-nccl-cu13==2.40.1"], f">=3.{here}")
        for version, torch in (("0.70.0", "==2.99.0"), ("0.71.0", "==2.99.1")):
            write_wheel(folder, "torchvision", version, tag, [f"torch{torch}"], f">=3.{here}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_new_versions_are_taken_up_from_pips_index(
    hotloop: Command, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = index.parent / "constraints.txt"
    limits.write_text("torch<2.15\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(limits))  # of what is installed here, not of what there is
    options = ["--driver", "595.45.04", "--gpu", "H100", "--json"]
    assert json.loads(hotloop("resolve", *options, expect=0).out)["torch"] == "2.15.0"
    done = hotloop("resolve", *options, "--refresh", expect=0)
    assert done.err.splitlines() == ["torch 2.99.0"]
    found = json.loads(done.out)
    here = sys.version_info.minor
    assert (found["torch"], found["torchvision"], found["cuda"]) == ("2.99.0", "0.70.0", "13.2")
    assert (found["cudnn"], found["nccl"], found["triton"], found["glibc"]) == ("9.30.0.1", "2.40.1", "3.10.0", "2.28")
    assert found["python"] == f"3.{here} to 3.{here + 1}"
    assert "code for cards as of torch 2.15.0" in found["source"]
    assert json.loads(hotloop("resolve", *options, expect=0).out) == found, "it is kept"
    older = json.loads(hotloop("resolve", "--driver", "535.104", "--gpu", "V100", "--json", expect=0).out)
    assert (older["cudnn"], older["nccl"]) == ("9.10.2.21", "2.29.3"), "what the table knew stays"


def test_a_table_that_cannot_be_kept_is_used_once(
    hotloop: Command, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    done = hotloop("resolve", "--driver", "595.45.04", "--gpu", "H100", "--refresh", "--json", expect=0)
    assert json.loads(done.out)["torch"] == "2.99.0"
    assert "the new table is not kept" in done.err


@pytest.mark.parametrize("content", ["", "{}", '{"date": null}', "[1]"])
def test_a_damaged_table_is_passed_over(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hotloop").mkdir()
    (tmp_path / "hotloop/versions.json").write_text(content)
    assert "torch==2.15.0" in hotloop("resolve", "--driver", "595.45.04", "--gpu", "H100", expect=0).out


def test_an_index_that_is_not_there_changes_nothing(
    hotloop: Command, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "elsewhere"))
    done = hotloop("resolve", "--driver", "580", "--gpu", "H100", "--refresh", expect=1)
    assert "pip index torch failed" in done.err
    assert not (index.parent / "cache/hotloop/versions.json").exists()
