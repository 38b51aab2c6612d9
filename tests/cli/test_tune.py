"""`hotloop tune` on a script and on a job, with trials in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command
from runs import RESNET_JOB

from hotloop.cli.tune import _lines
from hotloop.core.job_file import parse_job
from hotloop.core.tuning import DONE, Trial, Tuning

pytest.importorskip("optuna", reason="pip install 'hotloop[tune]'")

from hotloop.tune.job_trials import step_seconds
from hotloop.tune.running import Failed
from hotloop.tune.space import Knob

SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.ones(16), index % 4

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Slow(), 4)
    for epoch in range({epochs}):
        for features, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
    print("trained", model.weight.sum().item())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(epochs=1000))
    return file


@pytest.mark.slow
def test_a_scripts_settings_are_found_and_used(script: Path, hotloop: Command) -> None:
    done = hotloop("tune", "--budget", "50s", "--json", "--", sys.executable, "train.py", expect=0)
    found = json.loads(done.out)
    assert found["best"]["workers"] >= 1, done.err
    assert found["ratio"] > 1
    assert {trial["state"] for trial in found["trials"]} <= {"done", "worse"}
    assert found["trials"][0]["settings"]["workers"] == 0
    tuned = tomllib.loads((script.parent / "tuned.toml").read_text())
    assert tuned["run"]["workers"] == found["best"]["workers"]
    assert tuned["evidence"]["trials"]
    script.write_text(SCRIPT.format(epochs=6))  # more steps than all that is timed, however irregular they are
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True).stdout
    options = ["--settings", "tuned.toml", "--json-summary", "summary.json"]
    assert hotloop("run", *options, "--", sys.executable, "train.py", expect=0).out == plain
    summary = json.loads((script.parent / "summary.json").read_text())
    on = {one["name"] for one in summary["accelerations"] if one["state"] == "on"}
    assert on == set(tuned["run"]["accelerations"]) >= {"loader"}, "and what else these trials have found"
    assert summary["ratio"] > 0


@pytest.mark.slow
def test_a_step_of_a_job_is_timed_as_it_stands(
    tmp_path: Path, make_images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.tune.job_trials._CHUNKS", 4)
    job = parse_job(tomllib.loads(RESNET_JOB.format(images=make_images(classes=2, each=64))), "job")
    started = time.monotonic()
    seconds = step_seconds(job, os.environ)
    assert 0 < seconds < time.monotonic() - started
    other = job.model_copy(update={"model": job.model.model_copy(update={"arguments": {"layerz": 1}})})
    with pytest.raises(Failed, match="layerz"):
        step_seconds(other, os.environ)


@pytest.mark.slow
def test_of_an_error_of_three_lines_what_has_happened_is_told(make_images: Callable[..., Path]) -> None:
    job = parse_job(tomllib.loads(RESNET_JOB.format(images=make_images(classes=2, each=64))), "job")
    hot = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"learning_rate": 1e30})})
    with pytest.raises(Failed, match=r"the loss of step [0-9]+ is (nan|inf)"):
        step_seconds(hot, os.environ)


@pytest.mark.slow
def test_a_jobs_settings_are_found_and_used(tmp_path: Path, hotloop: Command, make_images: Callable[..., Path]) -> None:
    (tmp_path / "job.toml").write_text(RESNET_JOB.format(images=make_images(classes=2, each=64)))
    assert "data.workers" in hotloop("tune", "--dry-run", "job.toml", expect=0).out
    done = hotloop("tune", "--budget", "20s", "job.toml", expect=0, timeout=200)
    assert "as it is" in done.err
    use = "to use it: hotloop train job.toml --settings tuned.toml"
    assert (use in done.out) == ("times as fast with" in done.out)
    assert not (tmp_path / "runs").exists(), "trials leave nothing"
    options = ["--settings", "tuned.toml", "--set", "train.epochs=1", "--set", "run.dir=run"]
    hotloop("train", "job.toml", *options, expect=0)


@pytest.mark.parametrize(
    ("after", "ended", "last"),
    [
        (1.0, "done", "2 trials for 2 combinations, 9.0 s"),
        (1.0, "budget", "more can be tried in more time: --budget"),
        (0.5, "budget", "to use it: hotloop train job.toml --settings tuned.toml"),
    ],
)
def test_what_is_there_already_is_not_to_be_used(after: float, ended: str, last: str) -> None:
    space, tried = (Knob("threads", (0, 1)),), [Trial({"threads": number}, DONE, 1.0) for number in (0, 1)]
    best = {"threads": int(after < 1)}
    found = Tuning(("job.toml",), best, 1.0, after, 0.0, True, tuple(tried), 2, 9.0, ended)
    assert list(_lines(found, space, Path("tuned.toml"), ()))[-1] == last


@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_search_leaves_the_best_so_far(script: Path, number: signal.Signals) -> None:
    def hear() -> None:
        """That one alone, also where these tests run in the background of a shell or under nohup."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)

    command = [sys.executable, "-m", "hotloop", "tune", "--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear) as child:
        assert child.stderr
        while "as it is" not in child.stderr.readline():
            pass
        child.send_signal(signal.SIGHUP)
        child.send_signal(number)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + number, "what nohup has it ignore stays ignored"
    assert "until it was interrupted" in out
    assert tomllib.loads((script.parent / "tuned.toml").read_text())["run"]["accelerations"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "soon", "job.toml"], "'soon' is no duration"),
        (["none.toml"], "no job file none.toml"),
        (["--", "no-such-program"], "no-such-program: no such program"),
        (["--out", "no/such/folder.toml", "job.toml"], "no/such/folder.toml cannot be written"),
    ],
)
def test_bad_input(arguments: list[str], message: str, hotloop: Command) -> None:
    done = hotloop("tune", *arguments, expect=2)
    assert message in done.err
    assert len(done.err.splitlines()) == 3


def test_what_cannot_be_written_at_the_end_is_told_before_the_search(hotloop: Command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = hotloop("tune", "--out", str(tmp_path / "pipe"), "--", sys.executable, "-c", "1", expect=2)
    assert "pipe cannot be written" in done.err


def test_a_script_that_fails_says_so(script: Path, hotloop: Command) -> None:
    script.write_text("import torch\nraise ValueError('no data')")
    done = hotloop("tune", "--", sys.executable, "train.py", expect=1)
    assert "the training does not run with its present settings" in done.err
    assert "ValueError: no data" in done.err


def test_a_script_that_is_too_short_is_not_said_to_fail(script: Path, hotloop: Command) -> None:
    script.write_text(
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(20):\n"
        "    (weight**2).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = hotloop("tune", "--", sys.executable, "train.py", expect=1)
    assert "does not run" not in done.err
    assert "cause: it ended before enough was measured\nfix:   let it train longer" in done.err
