"""`hotloop explain` as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import Command

LOGS = Path(__file__).parents[1] / "logs"
OOM = str(LOGS / "composed/convnext_oom_torch113.log")
H200 = str(Path(__file__).parents[1] / "support/machines/h200.json")


def test_the_cause_is_told_with_its_line_and_what_to_type(hotloop: Command) -> None:
    told = hotloop("explain", OOM, "--machine", H200, expect=0).out
    assert told.startswith("The GPU's memory is too small for what the job asks [cuda-out-of-memory]")
    assert "CUDA out of memory. Tried to allocate 864.00 MiB" in told
    assert "  fix: smaller batch" in told


def test_json_has_the_first_cause_first(hotloop: Command) -> None:
    log = str(LOGS / "composed/srun_label_one_rank_oom_torch20.log")
    found = json.loads(hotloop("explain", log, "--no-machine", "--json", expect=0).out)
    assert found["causes"][0]["id"] == "cuda-out-of-memory"
    assert {"id", "confidence", "evidence", "fix"} <= set(found["causes"][0])
    assert found["causes"][0]["evidence"][0]["line"] > 1
    assert found["lines"] > 100


def test_a_line_within_a_message_is_told_with_its_place_there(hotloop: Command) -> None:
    log = str(LOGS / "provoked/json_logger_traceback.log")
    found = json.loads(hotloop("explain", log, "--no-machine", "--json", expect=0).out)
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x11552 and 7200x10)"
    assert found["causes"][0]["evidence"] == [{"line": 7, "message_line": 24, "text": error}]
    assert found["lines"] == 8
    assert f"line 7, line 24 of its message: {error}" in hotloop("explain", log, "--no-machine", expect=0).out


def test_a_log_that_ended_well_has_no_cause(hotloop: Command) -> None:
    log = str(LOGS / "composed/slurm_retries_then_completed.log")
    assert hotloop("explain", log, "--no-machine", expect=0).out.startswith("no cause of a failure in ")


def test_this_machine_is_read_only_if_it_can_tell_of_the_cause(hotloop: Command, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("OSError: [Errno 28] No space left on device: 'a.pt'\n")
    found = json.loads(hotloop("explain", str(tmp_path / "log"), "--json", timeout=120, expect=0).out)
    assert found["causes"][0]["id"] == "disk-full"


def test_standard_input_is_read() -> None:
    with Path(OOM).open("rb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "hotloop", "explain", "-", "--no-machine", "--json"],
            stdin=log, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
    assert json.loads(done.stdout)["causes"][0]["id"] == "cuda-out-of-memory"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.log", b"", "is empty"),
        ("core", b"\x7fELF\0\1\2\3" * 4000, "is no text"),
        ("absent.log", None, "cannot read"),
        (".", None, "cannot read"),
    ],
)
def test_what_is_no_log_is_told_in_three_lines(
    hotloop: Command, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    failed = hotloop("explain", str(tmp_path / name), expect=2)
    assert said in failed.err
    assert len(failed.err.strip().splitlines()) == 3


def test_a_log_that_may_not_be_read_is_told(hotloop: Command, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir(mode=0)
    failed = hotloop("explain", str(tmp_path / "log/a"), expect=2)
    assert "cannot read" in failed.err
    both = hotloop("explain", OOM, "--machine", H200, "--no-machine", expect=2)
    assert "exclude each other" in both.err
    assert "cannot read" in hotloop("explain", OOM, "--machine", "absent.json", expect=2).err


def test_several_logs_are_not_guessed_at(hotloop: Command, tmp_path: Path) -> None:
    assert "2 logs were named" in hotloop("explain", OOM, OOM, expect=2).err
    (tmp_path / "trace_rank_0").write_bytes(b"\x80\x04}\x94.")
    assert "no dump of the flight recorder" in hotloop("explain", str(tmp_path / "trace_rank_0"), expect=2).err
