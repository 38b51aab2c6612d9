import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.errors import InputError
from hotloop.core.job import FORMAT, Job
from hotloop.core.job_file import known_keys, load_job, parse_job, starter_toml

SMALL = {"data": {"train": "images"}, "model": {"name": "resnet18"}}


def job_file(folder: Path, text: str) -> Path:
    file = folder / "job.toml"
    file.write_text(text)
    return file


def test_a_job_of_two_keys_has_a_value_for_every_other() -> None:
    job = parse_job(SMALL, "job.toml")
    assert (job.data.batch_size, job.train.epochs, job.checkpoint.every, job.task.name) == (64, 10, "auto", "images")


def test_a_job_survives_being_written() -> None:
    job = parse_job({**SMALL, "checkpoint": {"every": "7 steps"}, "task": {"name": "mine:Task"}}, "job.toml")
    assert parse_job(tomllib.loads(job.to_toml()), "again") == job


def test_the_starter_file_is_a_job_with_every_key() -> None:
    text = starter_toml()
    job = parse_job(tomllib.loads(text), "starter")
    assert job.optimizer.arguments == {"momentum": 0.9}
    assert all(f"{key.rsplit('.', 1)[-1]} = " in text for key in known_keys())
    assert all(len(line.split("  # ", 1)[1]) > 5 for line in text.splitlines() if " = " in line and line[0] != "#")


def test_the_schema_describes_every_key() -> None:
    schema = json.dumps(Job.model_json_schema())
    assert all(json.dumps(description)[1:-1] in schema for description in known_keys().values())


@pytest.mark.parametrize(
    ("raw", "what", "cause", "fix"),
    [
        ({"data": {"train": "a", "batchsize": 2}}, "unknown key data.batchsize", "data.batch_size", "rename"),
        (
            {"epochs": 3},
            "unknown key epochs",
            "train.epochs",
            "train.epochs; in a file: epochs in [train]",
        ),
        (
            {"ranks": {"parallel": "tp"}},
            "unknown key ranks.parallel",
            "parallel",
            "in a file: parallel above all tables",
        ),
        ({"model": {"name": "m", "num_classes": 4}}, "model.num_classes", "table of its own", "arguments: num_classes"),
        ({"model": {"name": "m", "nams": "m"}}, "unknown key model.nams", "model.name", "rename it to model.name"),
        ({"preemption": {"signal": "USR1"}}, "unknown key preemption.signal", "keys of [preemption] are ", "schema"),
        ({"augment": {"flip": 1}}, "unknown key augment", "task.augment", "in a file: [task.augment]"),
        ({"task": {"augment": {"flp": 1}}}, "unknown key task.augment.flp", "task.augment.flip", "rename"),
        ({"qqqqqqqqqq": 1}, "unknown key qqqqqqqqqq", "no key has a name like it", "schema"),
        ({"data": {"batch_size": 2}}, "data.train is missing", "no default", "--set data.train="),
        ({"data": {"trian": "a"}}, "unknown key data.trian", "data.train", "rename it to data.train"),
        ({"data": {"train": "a", "batch_size": 0}}, "data.batch_size = 0", "greater than 0", "samples a batch"),
        ({"train": {"epochs": "many"}}, 'train.epochs = "many"', "valid integer", "passes over"),
        ({"checkpoint": {"every": "7 foos"}}, 'checkpoint.every = "7 foos"', "amount and a unit", "1 epoch"),
        ({"task": {"name": "imags"}}, 'unknown task "imags"', "images", "task.name"),
        ({"precision": "bf17"}, 'precision = "bf17"', "'bf16'", "precision"),
        ({"task": {"augment": {"crop_scale": [0.9, 0.1]}}}, "crop_scale", "must not be more", "share of the image"),
        ({"version": FORMAT + 1}, f"format {FORMAT + 1}", "newer version", "pip install --upgrade hotloop"),
        ({"name": "a/b"}, 'name = "a/b"', "pattern", "name of the run"),
        ({"schedule": {"warmup": "30 s"}}, 'schedule.warmup = "30 s"', "is a time", "linear warm-up"),
        ({"schedule": {"every": "5 min"}}, 'schedule.every = "5 min"', "is a time", "30 epochs"),
        ({"ranks": {"timeout": "2 steps"}}, 'ranks.timeout = "2 steps"', "is no time", "600 s"),
        ({"checkpoint": {"interruption": "2 epochs"}}, 'interruption = "2 epochs"', "is no time", "expected between"),
        ({"ranks": {"timeout": "ten"}}, 'ranks.timeout = "ten"', 'unit: "90 s", "5 min" or "2 h"', "600 s"),
        ({"ranks": {"timeout": "25 h"}}, 'ranks.timeout = "25 h"', "more than 24 h", "600 s"),
        ({"preemption": {"every": 1e300}}, "preemption.every = 1e+300", "less than or equal to 3600", "two looks"),
        ({"checkpoint": 3}, "checkpoint = 3", "it is a table, of every, ", "--set checkpoint.every=VALUE"),
        ({"checkpoint": {"every": "-3 steps"}}, 'every = "-3 steps"', "must be more than 0", "1 epoch"),
        ({"preemption": {"address": "foo"}}, 'preemption.address = "foo"', "pattern", "http://"),
        ({"schedule": {"every": "often"}}, 'every = "often"', 'unit: "500 steps" or "1 epoch"', "30 epochs"),
        ({"task": {"name": "tokens", "vocabulary": 1}}, "task.vocabulary = 1", "greater than", "50304"),
    ],
)
def test_what_is_wrong_is_said_in_three_lines(raw: dict[str, object], what: str, cause: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_job({**SMALL, **raw}, "job.toml")
    error = caught.value
    assert what in error.what
    assert cause in error.cause
    assert fix in error.fix
    assert str(error).count("\n") == 2
    assert error.exit_code == 2


def test_set_lays_values_over_the_file(tmp_path: Path) -> None:
    file = job_file(tmp_path, 'model.name = "resnet18"\n[data]\ntrain = "a"\n')
    job = load_job(file, ["train.epochs=3", "data.train=b c", "checkpoint.every=30 s", "data.on_corrupt='raise'"])
    assert (job.train.epochs, job.data.train, str(job.checkpoint.every)) == (3, "b c", "30 s")
    assert job.data.on_corrupt == "raise"


@pytest.mark.parametrize("override", ["train.epochs", "=3", "train..epochs=3", "name.first=3"])
def test_a_set_that_cannot_be_meant_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(InputError, match="--set"):
        load_job(job_file(tmp_path, 'name = "x"\n'), [override])


@pytest.mark.parametrize(
    ("content", "cause"), [(b"a = ", "Invalid value"), (b"\xff\xfe\x00", "utf-8"), (b"a = 1\na = 2", "overwrite")]
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_job(file)
    assert cause in caught.value.cause


def test_an_absent_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no job file"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(InputError, match="is a folder"):
        load_job(tmp_path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_no_value_breaks_validation(value: object) -> None:
    for key in ("task", "data", "checkpoint", "version", "precision"):
        try:
            parse_job({**SMALL, key: value}, "job.toml")
        except InputError as error:
            assert str(error).count("\ncause: ") == 1


def test_the_fix_for_a_job_that_is_not_there_writes_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("mine")
    with pytest.raises(InputError) as told:
        load_job(tmp_path / "jop.toml")
    assert "the nearest is job.toml" in told.value.cause
    assert told.value.fix == f"hotloop job init > {tmp_path}/jop.toml"
