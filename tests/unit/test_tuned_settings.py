"""What there is to tune, and the file that says what was found."""

import os
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="pip install 'hotloop[tune]'")

from hotloop.core.environment import for_training
from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.tuning import DONE, ProcessSettings, Settings, Trial, Tuning
from hotloop.tune.settings import job_settings, read_job_settings
from hotloop.tune.space import Surroundings, job_space


@pytest.fixture
def job() -> Job:
    return parse_job({"device": "cpu", "data": {"train": "images"}, "model": {"name": "resnet18"}}, "job")


def names(job: Job, place: Surroundings) -> set[str]:
    return {knob.name for knob in job_space(job, place, read=True, images=True)}


def test_what_a_machine_lacks_is_not_searched(job: Job) -> None:
    alone = names(job, Surroundings(8, gpu=False))
    assert "speed.keep_memory" in alone
    of_gpus = {"speed.activations", "expandable_segments", "speed.graph", "data.decode"}
    assert not of_gpus & alone
    assert of_gpus <= names(job, Surroundings(8, gpu=True))
    assert names(job, Surroundings(8, gpu=False, nodes=True)) - alone == {"numa"}
    own = names(job, Surroundings(8, gpu=True, allocator=False))
    assert names(job, Surroundings(8, gpu=True)) - own == {"expandable_segments"}


def found(best: Settings) -> Tuning:
    return Tuning(("job.toml",), best, 2.0, 1.0, 0.0, True, (Trial(best, DONE, 1.0),), 2, 9.0, "done")


@pytest.mark.parametrize(
    ("best", "keys", "process"),
    [
        ({"threads": 4, "numa": True, "expandable_segments": False}, [], ProcessSettings(4, True, False)),
        ({"threads": 0, "numa": False, "expandable_segments": True}, [], ProcessSettings()),
        ({"speed.activations": "blocks", "numa": True}, ['speed.activations="blocks"'], ProcessSettings(numa=True)),
    ],
)
def test_what_was_found_is_what_is_read(
    job: Job, tmp_path: Path, best: Settings, keys: list[str], process: ProcessSettings
) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text(job_settings(found(best), job))
    assert read_job_settings(file) == (keys, process)


def test_a_process_has_the_variables_of_its_settings() -> None:
    given = for_training({**os.environ, **ProcessSettings(threads=3, expandable_segments=False).environment})
    assert given["OMP_NUM_THREADS"] == "3"
    assert given["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    assert ProcessSettings().environment == {}


@pytest.mark.parametrize(
    "line", ['threads = "two"', "threads = -1", "numa = 2026-01-01", "nmua = true", "threads = 1.5"]
)
def test_settings_of_a_process_that_are_none_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text(f"[job]\n[process]\n{line}\n")
    with pytest.raises(InputError, match=r"process\.") as refused:
        read_job_settings(file)
    assert line.partition(" ")[0] in str(refused.value)


def test_settings_of_a_process_are_a_table(tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text("process = 3\n[job]\n")
    with pytest.raises(InputError, match="process = 3"):
        read_job_settings(file)
