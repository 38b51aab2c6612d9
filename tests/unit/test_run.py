import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from hotloop.core.compare import compare_runs
from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.machine import read_machine
from hotloop.core.run import Result, Run, find_run, list_runs, open_run, require_run_place

NOW = datetime(2026, 11, 21, 9, 30)


def job(root: Path, **keys: object) -> Job:
    return parse_job(
        {"data": {"train": "a"}, "model": {"name": "m"}, "name": "digits", "run": {"root": str(root), **keys}}, "job"
    )


def result(run: Run, **changes: object) -> Result:
    plain = Result("finished", run.name, {"val_accuracy": 0.5}, 2, 20, 100.0, 0.25, 3.0)
    return Result(**{**plain.__dict__, **changes})  # type: ignore[arg-type]


def written(root: Path, records: list[dict[str, object]], now: datetime = NOW, **train: object) -> Run:
    asked = job(root)
    asked = asked.model_copy(update={"train": asked.train.model_copy(update=train)})
    run = open_run(asked, now)
    run.write_start(asked, read_machine())
    run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_each_start_makes_a_directory_and_latest_points_to_it(tmp_path: Path) -> None:
    first, second = open_run(job(tmp_path), NOW), open_run(job(tmp_path), NOW)
    assert (first.name, second.name) == ("digits-20261121-093000", "digits-20261121-093000-2")
    assert (tmp_path / "latest").resolve() == second.directory


def test_a_given_directory_is_used_again_and_latest_points_to_it_inside_the_root(tmp_path: Path) -> None:
    assert open_run(job(tmp_path, dir=str(tmp_path / "mine")), NOW).directory == tmp_path / "mine"
    assert open_run(job(tmp_path, dir=str(tmp_path / "mine")), NOW).directory == tmp_path / "mine"
    assert os.readlink(tmp_path / "latest") == "mine"
    open_run(job(tmp_path, dir=str(tmp_path / "else/where")), NOW)
    assert not (tmp_path / "else/latest").exists()


def test_a_place_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        open_run(job(tmp_path, dir=str(tmp_path / "file")), NOW)
    assert str(tmp_path / "file") in caught.value.what
    assert "run.dir" in caught.value.fix


def test_a_place_is_refused_before_anything_is_made_as_a_start_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/thesis.tex").write_text("")
    before = sorted(tmp_path.rglob("*"))
    require_run_place(job(tmp_path))
    require_run_place(job(tmp_path / "new/root"))
    require_run_place(job(tmp_path, dir=str(tmp_path / "new/run")))
    assert sorted(tmp_path.rglob("*")) == before
    for place in ("file", "file/run", "others"):
        asked = job(tmp_path, dir=str(tmp_path / place))
        with pytest.raises(InputError) as early:
            require_run_place(asked)
        with pytest.raises(InputError) as late:
            open_run(asked, NOW)
        assert (early.value.what, early.value.fix) == (late.value.what, late.value.fix)


@pytest.mark.parametrize("left", ["starts.jsonl", ".writable", ".lock", ".machine.json.123.tmp", ".starts.jsonl.7.tmp"])
def test_a_start_that_was_killed_at_once_is_made_again(tmp_path: Path, left: str) -> None:
    place = tmp_path / "mine"
    run = open_run(job(tmp_path, dir=str(place)), NOW)
    (place / left).write_text("")
    assert not run.exists
    assert open_run(job(tmp_path, dir=str(place)), NOW).directory == place
    (place / "job.toml").write_text("a user's own")
    with pytest.raises(InputError, match="is not empty and no run"):
        open_run(job(tmp_path, dir=str(place)), NOW)


def test_a_run_is_held_by_one_process_and_its_status_shows_it(tmp_path: Path) -> None:
    run = written(tmp_path, [])
    assert run.status() == "interrupted"
    code = f"""
from pathlib import Path
from hotloop.core.run import Run
with Run(Path({str(run.directory)!r})).locked():
    print("held", flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert run.status() == "running"
        with pytest.raises(InputError, match="is in use"), run.locked():
            pass
        other.communicate(b"\n", timeout=20)
    with run.locked():
        pass
    run.write_result(result(run))
    assert run.status() == "finished"


def test_metrics_survive_a_line_that_was_cut_off_and_can_be_rewound(tmp_path: Path) -> None:
    run = written(tmp_path, [{"step": step} for step in (1, 2, 3)])
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    with run.metrics_file.open("ab") as file:
        file.write(b"\x00\xff")
    assert [record["step"] for record in run.metrics()] == [1, 2, 3]
    run.rewind_metrics(2)
    assert run.metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_runs_are_listed_and_found(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    run = written(tmp_path, [])
    (tmp_path / "notes").mkdir()
    assert [found.name for found in list_runs(tmp_path)] == [run.name]
    for text in (run.name, "latest", str(run.directory)):
        assert find_run(text, tmp_path).directory == run.directory
    with pytest.raises(InputError, match="no run nothing"):
        find_run("nothing", tmp_path)


def curve(losses: list[float], accuracy: float) -> list[dict[str, object]]:
    steps = [{"event": "step", "step": 10 * (n + 1), "epoch": 0, "loss": loss} for n, loss in enumerate(losses)]
    return [*steps, {"event": "epoch", "step": 30, "epoch": 0, "val_accuracy": accuracy}]


def test_a_comparison_says_what_differs_and_where_the_curves_part(tmp_path: Path) -> None:
    a = written(tmp_path, curve([3.0, 2.0, 1.0], 0.5))
    b = written(tmp_path, curve([3.0, 2.5, 0.5, 0.1], 0.5), epochs=3)
    a.write_result(result(a))
    comparison = compare_runs(a, b)
    assert comparison.settings == {"train.epochs": (10, 3)}
    assert comparison.results["status"] == ("finished", "interrupted")
    loss, accuracy = comparison.curves
    assert (loss.shared, loss.first_difference, loss.largest, loss.largest_at, loss.last) == (3, 20, 0.5, 20, -0.5)
    assert loss.sentence == "loss: differs from step 20 on; at most +0.5 at step 20; -0.5 at the last of 3 in common"
    assert accuracy.sentence == "val_accuracy: equal at all 1 epochs in common"
    json.dumps(comparison.to_json())


def test_runs_without_anything_in_common_can_be_compared(tmp_path: Path) -> None:
    comparison = compare_runs(written(tmp_path, []), written(tmp_path, curve([1.0], 0.5)))
    assert comparison.settings == {}
    assert [curve.sentence for curve in comparison.curves] == [
        "loss: no step in common",
        "val_accuracy: no epoch in common",
    ]
