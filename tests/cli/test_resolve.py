"""`hotloop resolve`."""

import json

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
