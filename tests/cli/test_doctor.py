"""`hotloop doctor` as a command."""

import json
import os
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from command import Command
from recordings import RECORDINGS, changed

from hotloop.doctor.deep import Set, _of_the_host, _run
from hotloop.doctor.read import Reader, by_processes
from hotloop.doctor.record import Rate


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A faulty machine in a file."""
    monkeypatch.chdir(tmp_path)
    faulty = changed(RECORDINGS["H200"], {"gpus.0.ecc_uncorrected": 7, "limits.shm_bytes": 64 << 20})
    file = tmp_path / "machine.json"
    file.write_text(faulty.model_dump_json())
    return file


def test_a_machine_is_read_and_saved_and_examined_elsewhere(hotloop: Command, tmp_path: Path) -> None:
    here = hotloop("doctor", "--json", "--save", str(tmp_path / "here.json"), timeout=120)
    assert here.code in (0, 1)
    found = json.loads(here.out)
    assert found["machine"]["torch"]["version"]
    assert found["machine"]["system"]["kernel"]
    again = hotloop("doctor", "--machine", str(tmp_path / "here.json"), "--json", expect=here.code)
    assert json.loads(again.out) == found
    assert set(found["findings"][0]) >= {"id", "level", "title", "evidence", "fix"}


def test_a_missing_pillow_is_no_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _of_the_host() == ("decode", "disk")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert _of_the_host() == ("disk",)


def test_findings_are_grouped_with_a_fix_each(hotloop: Command, saved: Path) -> None:
    told = hotloop("doctor", "--machine", str(saved), expect=1).out
    lines = told.splitlines()
    assert "✓ Driver  580.159.04, CUDA up to 13.0" in lines
    card = next(
        place for place, line in enumerate(lines) if line.startswith("✗ GPUs  2 x NVIDIA H200 (sm_90, 140.4 GiB")
    )
    assert "[gpu-ecc]" in lines[card + 1]
    assert "7 uncorrected errors" in lines[card + 2]
    assert "fix: " in lines[card + 3]
    assert "shm-small" in told
    assert lines[-1].startswith("1 error, 1 warning")
    assert "the program that met it was ended" not in told
    assert "the program that met it was ended" in hotloop("doctor", "-v", "--machine", str(saved), expect=1).out


def test_folders_of_data_are_timed(hotloop: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/shard").write_bytes(os.urandom(80 << 20))
    done = hotloop("doctor", "--data", str(tmp_path / "data"), "--json", timeout=120)
    folder = next(one for one in json.loads(done.out)["machine"]["folders"] if one["role"] == "data")
    assert folder["read_bytes_per_second"] > 1e6


@pytest.mark.slow
def test_probes_of_the_host_run_without_a_gpu(hotloop: Command) -> None:
    done = hotloop("doctor", "--deep", "--json", timeout=300)
    rates = {rate["name"]: rate for rate in json.loads(done.out)["machine"]["rates"]}
    assert rates["JPEG decoding on one processor"]["value"] > 1
    assert rates["JPEG decoding on one processor"]["expected"] == 527
    assert rates["disk, reading"]["source"]
    assert "trying disk" in done.err


def tensorflow_probe(monkeypatch: pytest.MonkeyPatch, before: Path | None = None) -> list[Rate]:
    """What it finds, with a folder that Python looks into first."""
    if before:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(before), os.environ.get("PYTHONPATH")])))
    return _run(Set("-", ("tensorflow",)), lambda _: None)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("tensorflow"), reason="TensorFlow is not installed")
def test_tensorflow_starts_and_computes_without_a_gpu(hotloop: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [(rate.name, rate.value, rate.error) for rate in tensorflow_probe(monkeypatch)] == [
        ("GPUs that TensorFlow sees", 0.0, "")
    ]
    read = json.loads(hotloop("doctor", "--json", timeout=120).out)["machine"]
    assert read["tensorflow"]["version"] == next(
        version for name, version in read["packages"].items() if name.startswith("tensorflow")
    )


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("tensorflow"), reason="TensorFlow is not installed")
def test_a_tensorflow_that_computes_wrongly_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader(tmp_path, "sitecustomize", "from importlib import import_module\nimport sys\n" + WRONG_PRODUCT)
    found = tensorflow_probe(monkeypatch, tmp_path)
    assert found[-1].error.startswith("wrong result of TensorFlow's product")


WRONG_PRODUCT = """
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "tensorflow":
            sys.meta_path.remove(self)
            tensorflow = import_module("tensorflow")
            right = tensorflow.linalg.matmul
            tensorflow.linalg.matmul = lambda a, b: right(a, b) * 1.01
            return tensorflow.__spec__
sys.meta_path.insert(0, Finder())
"""
BLIND = """
import os
from types import SimpleNamespace as Space
os.write(2, b"E0000 00:00:1 1 gpu_device.cc:2343] Cannot dlopen some GPU libraries. Please make sure\\n")
config = Space(list_physical_devices=lambda kind: [], list_logical_devices=lambda kind: [])
test = Space(is_built_with_cuda=lambda: True)
"""
"""What TensorFlow answers where its CUDA libraries are missing; with a GPU it has not run here."""


@pytest.mark.parametrize(
    ("module", "said", "error"),
    [
        (BLIND, "Cannot dlopen some GPU libraries. Please make sure", ""),
        ("raise ImportError('libtensorflow_framework.so.2: no such file')", None, "ImportError: libtensorflow_fram"),
        ("import os\nos.abort()", None, "its process ended with code -6"),
    ],
)
def test_a_tensorflow_that_does_not_work_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, said: str | None, error: str
) -> None:
    reader(tmp_path, "tensorflow", module)
    found = tensorflow_probe(monkeypatch, tmp_path)
    assert [rate.said for rate in found if rate.value is not None] == ([said] if said else [])
    assert found[-1].error.startswith(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x7fELF\x00\xff", "is no record of a machine"),
        (b"", "is no record of a machine"),
        (b"[" * 100_000, "is no record of a machine"),
        (b'{"findings": []}', "it has no format"),
        (b'{"format": 99}', "has format 99"),
        (b'{"format": 1, "gpus": [{"index": 0}]}', "gpus.0.name"),
        (b'{"format": 1, "colour": "red"}', "colour"),
    ],
)
def test_files_that_are_no_machine_are_told_in_three_lines(
    hotloop: Command, tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "m.json").write_bytes(content)
    failed = hotloop("doctor", "--machine", str(tmp_path / "m.json"), expect=2)
    assert said in failed.err
    assert len(failed.err.strip().splitlines()) == 3


@pytest.mark.slow
def test_options_that_do_not_go_together_are_told(hotloop: Command, saved: Path) -> None:
    assert "--deep needs the machine itself" in hotloop("doctor", "--deep", "--machine", str(saved), expect=2).err
    assert "is no folder" in hotloop("doctor", "--data", "nowhere", expect=2).err
    assert "cannot write" in hotloop("doctor", "--machine", str(saved), "--save", "/no/where.json", expect=2).err
    assert "cannot read" in hotloop("doctor", "--machine", "absent.json", expect=2).err


def test_no_secret_is_read(hotloop: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9", "TF_VAR_pass": "hunter2", "NCCL_AUTH": "hunter2",
        "TORCH_X": "ghp_" + 36 * "a", "CUDA_PROXY": "https://ml:hunter2@proxy", "TORCH_TOKEN": "hunter2",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    done = hotloop("doctor", "--json", timeout=120)
    assert json.loads(done.out)["machine"]["environment"]["OMP_NUM_THREADS"] == "2"
    for value in secrets.values():
        assert value not in done.out


def test_bytes_that_are_no_text_are_saved_as_something_else(hotloop: Command, tmp_path: Path) -> None:
    monkey = {**os.environ, "LD_LIBRARY_PATH": os.fsdecode(b"/opt/\xff")}
    command = [sys.executable, "-m", "hotloop", "doctor", "--save", str(tmp_path / "m.json"), "--json"]
    done = subprocess.run(command, env=monkey, capture_output=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    hotloop("doctor", "--machine", str(tmp_path / "m.json"))


def reader(folder: Path, name: str, text: str) -> None:
    """A module that stands among the readers."""
    (folder / f"{name}.py").write_text(text)


def test_a_reading_that_hangs_or_crashes_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader(
        tmp_path,
        "sitecustomize",
        f"""
import hotloop.doctor.readers as readers
readers.__path__.append({str(tmp_path)!r})
""",
    )
    reader(tmp_path, "stuck", "import time\ndef read(): time.sleep(600)")
    reader(tmp_path, "crashed", "import os\ndef read(): os.abort()")
    reader(tmp_path, "fine", "def read(): return {'a': 1}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = time.monotonic()
    asked = {"stuck": Reader("stuck", seconds=2.0), "crashed": Reader("crashed"), "fine": Reader("fine")}
    found, failed = by_processes(asked)
    assert found == {"fine": {"a": 1}}
    assert failed["stuck"] == "no answer within 2 s"
    assert "ended with code -6" in failed["crashed"]
    assert time.monotonic() - started < 30


def test_a_probe_that_crashes_costs_itself_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!{sys.executable}
import os, sys
sys.argv = ["", *sys.argv[4:]]
from hotloop.doctor.probing import probes
probes.PROBES = {{"first": lambda gpu: iter([("first", 1.0, "")]), "crash": lambda gpu: os.abort(),
                  "wrong": lambda gpu: probes._equal("it", probes.tensor(1.0), probes.tensor(2.0), 0),
                  "last": lambda gpu: iter([])}}
from torch import tensor
probes.tensor = tensor
from hotloop.doctor.probing.__main__ import main
main(sys.argv[1], sys.argv[2:])
""")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    said: list[str] = []
    rates = {rate.name: rate for rate in _run(Set("-", ("first", "crash", "wrong", "last")), said.append)}
    assert said == ["first", "crash", "wrong", "last"]
    assert rates["first"].value == 1.0
    assert rates["crash"].error == "its process ended with code -6"
    assert rates["wrong"].error.startswith("wrong result of it")
    assert rates["last"].error == ""
