import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command
from pictures import write_image

SUPPORT = Path(__file__).parents[1] / "support"

JOB = """
name = "small"
model.name = "tiny:cnn"
[task]
image_size = 16
[data]
train = "images"
val = "images"
batch_size = 4
[train]
epochs = 2
[log]
every = 2
tensorboard = false
report = false
[optimizer]
learning_rate = 0.01
"""


@pytest.fixture
def job(make_images: Callable[..., Path], tmp_path: Path) -> Path:
    make_images()
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_anything_has_begun_is_a_stop(job: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "hotloop", "train", "job.toml"]
    child = subprocess.Popen(command, cwd=job.parent, stderr=subprocess.PIPE)
    try:
        status = Path(f"/proc/{child.pid}/status")
        while not _catches(status.read_text(), number):
            assert child.poll() is None
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, err) == (75, b"")


def _catches(status: str, number: signal.Signals) -> bool:
    """By a handler of its own."""
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_notice_that_is_there_already_stops_before_a_step(hotloop: Command, job: Path) -> None:
    """Else each start of a machine that is about to go would train a step, and its launcher never give up."""
    notice, run = job.parent / "notice", job.parent / "run"
    noticed = ["train", "job.toml", "--set", "run.dir=run", "--set", "preemption.file=notice"]
    notice.touch()
    stopped = hotloop(*noticed, expect=75)
    assert "preempted after 0 steps" in stopped.out
    assert "stopped before its first step, as the file notice asked" in stopped.out
    assert json.loads((run / "result.json").read_text())["status"] == "preempted"
    assert not list(run.glob("checkpoints/epoch-*"))
    notice.unlink()
    hotloop(*noticed, "--set", "train.epochs=1", expect=0)
    saved = sorted(run.glob("checkpoints/epoch-*"))
    notice.touch()
    stopped = hotloop(*noticed, expect=75)
    assert "preempted after 4 steps" in stopped.out
    assert sorted(run.glob("checkpoints/epoch-*")) == saved
    named = ["--set", "run.dir=other", "--resume", "run"]
    assert "saved, as the file notice asked" in hotloop(*noticed, *named, expect=75).out
    assert [path.name for path in (job.parent / "other/checkpoints").glob("epoch-*")] == [path.name for path in saved]
    notice.unlink()
    assert "finished after 8 steps" in hotloop(*noticed, expect=0).out
    notice.touch()
    hotloop(*noticed, expect=0)


def test_a_model_in_dataparallel_is_refused(hotloop: Command, job: Path) -> None:
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Replicated'\n"))
    refused = hotloop("train", "job.toml", expect=2)
    assert "the task's model is a torch.nn.DataParallel" in refused.err
    assert "hotloop trains on each GPU by a process of its own" in refused.err


def test_a_job_trains_and_says_so(hotloop: Command, job: Path) -> None:
    done = hotloop("train", "job.toml", "--set", "log.report=true", expect=0)
    assert "finished after 8 steps" in done.out
    assert "val_accuracy" in done.out
    assert "samples/s" in done.out
    assert done.out.splitlines()[-1].startswith("report: runs/small-")
    assert "epoch 2/2  loss" in done.err
    assert "step 2  loss" in done.err
    result = json.loads((job.parent / "runs/latest/result.json").read_text())
    for key in ("metrics", "samples_per_second", "data_wait_share", "weights_sha256", "steps", "corrupt_files"):
        assert key in result


def test_json_is_one_object_and_nothing_else(hotloop: Command, job: Path) -> None:
    done = hotloop("train", "job.toml", "--json", "--set", "run.dir=here", expect=0)
    result = json.loads(done.out)
    assert (result["status"], result["steps"], result["run"]) == ("finished", 8, str(job.parent / "here"))


def test_damaged_files_are_named_at_the_end(hotloop: Command, job: Path) -> None:
    (job.parent / "images/class0/000.png").write_bytes(b"")
    done = hotloop("train", "job.toml", expect=0)
    assert (
        "1 damaged file was replaced, in validation left out:\n  images/class0/000.png: the file is empty" in done.out
    )


def test_a_dry_run_makes_nothing(hotloop: Command, job: Path) -> None:
    done = hotloop("train", "job.toml", "--dry-run", "--json", expect=0)
    plan = json.loads(done.out)
    assert (plan["train_samples"], plan["steps"], plan["device"]) == (16, 8, plan["device"])
    assert not (job.parent / "runs").exists()
    assert "steps: 8" in hotloop("train", "job.toml", "--dry-run", expect=0).out


def test_a_dry_run_says_what_goes_on_and_refuses_what_a_start_would(hotloop: Command, job: Path) -> None:
    arguments = ["train", "job.toml", "--set", "run.dir=here"]
    dry = [*arguments, "--dry-run", "--json"]
    assert json.loads(hotloop(*dry, expect=0).out)["resumed_from"] == ""
    hotloop(*arguments, expect=0)
    before = sorted(job.parent.rglob("*"))
    found = json.loads(hotloop(*dry, expect=0).out)["resumed_from"]
    assert Path(found).parent.name == "checkpoints"
    assert json.loads(hotloop(*dry, "--resume", "never", expect=0).out)["resumed_from"] == ""
    named = hotloop("train", "job.toml", "--dry-run", "--json", "--resume", found, expect=0)
    assert json.loads(named.out)["resumed_from"] == found
    nowhere = hotloop(*dry, "--resume", "nowhere", expect=2)
    assert "no checkpoint at nowhere" in nowhere.err
    for start in (dry, arguments):
        other = hotloop(*start, "--set", "data.batch_size=2", expect=2)
        assert "was trained with data.batch_size = " in other.err
    assert sorted(job.parent.rglob("*")) == before, "nothing is made or set aside"
    for path in (job.parent / "here/checkpoints").glob("epoch-*"):
        path.rename(path.with_name(f"damaged-{path.name}"))
    for start in (dry, arguments):
        assert "checkpoints are set aside" in hotloop(*start, expect=1).err.replace(" in here/checkpoints", "")


def stopped(job: Path, after: str, *arguments: str, path: Path = SUPPORT) -> str:
    """What a run prints that gets SIGTERM after a line that begins so; it ends with 75."""
    child = subprocess.Popen(
        [sys.executable, "-m", "hotloop", *arguments],
        cwd=job.parent,
        env={**os.environ, "PYTHONPATH": f"{path}:{SUPPORT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(after):
            break
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 75
    return out


def test_it_stops_with_75_and_goes_on_when_it_is_started_again(hotloop: Command, job: Path) -> None:
    arguments = ["train", "job.toml", "--set", "train.epochs=200", "--set", "run.dir=here"]
    out = stopped(job, "step", *arguments)
    assert "preempted after" in out
    assert "hotloop train job.toml" in out
    done = hotloop("train", "job.toml", "--set", "train.epochs=200", "--set", "run.dir=here", expect=0)
    assert "continuing at step" in done.err
    assert "finished after 800 steps" in done.out


@pytest.mark.slow
def test_it_stops_while_a_file_does_not_come(hotloop: Command, job: Path) -> None:
    """As on a mount that hangs: in the first batch, which needs all files, one is never read."""
    stalled = job.parent / "images/class0/zzz.png"
    write_image(stalled, 5)
    stall = job.parent / "sitecustomize.py"  # workers import it, too
    stall.write_text(
        "import sys, time; from hotloop.data import image_list; read = image_list.read_file\n"
        "def stall(path):\n"
        "    if 'zzz' in str(path): print('stalled', file=sys.stderr, flush=True); time.sleep(600)\n"
        "    return read(path)\n"
        "image_list.read_file = stall"
    )
    options = ["--set", "run.dir=here", "--set", "data.workers=1", "--set", "data.batch_size=17"]
    assert "preempted after" in stopped(job, "stalled", "train", "job.toml", *options, path=job.parent)
    result = json.loads((job.parent / "here/result.json").read_text())
    assert result["data_wait_share"] * result["train_seconds"] > 0.9  # it looks for signals every second
    stall.unlink()
    assert "finished after" in hotloop("train", "job.toml", *options, expect=0).out


@pytest.mark.slow
def test_without_a_fixed_directory_it_says_how_to_go_on(hotloop: Command, job: Path) -> None:
    code = (
        "import os, signal, sys; from hotloop.cli.main import main; import hotloop.train.step as s\n"
        "run = s.Step.run\n"
        "s.Step.run = lambda *a, **k: (os.kill(os.getpid(), signal.SIGINT), run(*a, **k))[1]\n"
        "main(['train', 'job.toml', '--set', 'seed=3', '--set', 'optimizer.learning_rate = 0.02'])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=job.parent, env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert child.returncode == 75, child
    command = shlex.split(child.stdout.split("to continue: ")[1].splitlines()[0])
    assert command[:2] == ["hotloop", "train"]
    going_on = hotloop(*command[1:], expect=0).err
    assert "continuing at step 1" in going_on
    assert "warning" not in going_on, "with the settings that it began with"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "last"), [(1, "hotloop.cli.train.summary"), (2, "hotloop.train.elastic.train_in_ranks")]
)
def test_a_signal_after_the_end_does_not_change_the_exit_code(job: Path, processes: int, last: str) -> None:
    """As the second SIGTERM of what asks twice."""
    module, _, name = last.rpartition(".")
    code = (
        f"import os, signal; from hotloop.cli.main import main; import {module} as module; done = module.{name}\n"
        f"module.{name} = lambda *a, **k: (done(*a, **k), os.kill(os.getpid(), signal.SIGTERM))[0]\n"
        f"main(['train', 'job.toml', '--set', 'ranks.processes={processes}'])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=job.parent, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert child.returncode == 0, child
    assert "finished after" in child.stdout


@pytest.mark.slow
def test_in_a_terminal_there_is_a_bar(job: Path) -> None:
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "hotloop", "train", "job.toml", "--set", "train.epochs=40"],
        cwd=job.parent,
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "TERM": "xterm-256color", "COLUMNS": "120"},
        stdout=subprocess.DEVNULL,
        stderr=follower,
    )
    os.close(follower)
    screen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        screen += part
    os.close(leader)
    assert child.wait(timeout=60) == 0
    text = screen.decode()
    assert "160/160" in text
    for word in ("epoch", "loss", "samples/s", "wait", "MiB", "\x1b["):
        assert word in text


ERRORS = [
    (["--set", "train.epoch=3"], 2, "unknown key train.epoch"),
    (["--set", "data.train=nowhere"], 2, "no data at nowhere"),
    (["--set", "data.val=other"], 2, "is not among the 2 classes"),
    (["--set", "data.batch_size=100"], 2, "more than the 16 samples"),
    (["--set", "model.name=resnet81"], 2, 'unknown model "resnet81"'),
    (["--set", "version=2"], 2, "format 2"),
    (["--set", "run.dir=job.toml"], 2, "cannot write"),
    (["--set", "run.dir=/proc/nowhere"], 2, "cannot write"),
    (["--resume", "nowhere"], 2, "no checkpoint at nowhere"),
    (["--set", "model.name=tiny:exploding"], 1, "the loss of step 1 is nan"),
    (["--set", "task.name=tiny:VectorLoss"], 2, "task.image_size"),
]


@pytest.mark.parametrize(("arguments", "code", "text"), ERRORS, ids=[error[2] for error in ERRORS])
def test_errors_are_three_lines(
    hotloop: Command, job: Path, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    write_image(tmp_path / "other/class0/a.png", 0)
    write_image(tmp_path / "other/class9/a.png", 0)
    done = hotloop("train", "job.toml", *arguments, expect=code)
    lines = done.err.splitlines()[-3:]
    assert [line.split(":")[0] for line in lines] == ["error", "cause", "fix"]
    assert text in lines[0]
    assert "Traceback" not in done.err
    assert done.out == ""


def test_debug_shows_the_way(hotloop: Command, job: Path) -> None:
    done = hotloop("--debug", "train", "job.toml", "--set", "data.train=nowhere", expect=2)
    assert "Traceback" in done.err
    assert "find_images" in done.err


def test_an_error_of_the_users_code_says_where(hotloop: Command, job: Path) -> None:
    (job.parent / "mine.py").write_text("def net(num_classes):\n    raise KeyError('oh')\n")
    done = hotloop("train", "job.toml", "--set", "model.name=mine:net", expect=1)
    assert "error: KeyError: 'oh'" in done.err
    assert "mine.py, line 2" in done.err


def test_runs_are_listed_and_compared(hotloop: Command, job: Path) -> None:
    hotloop("train", "job.toml", "--set", "run.dir=runs/a", expect=0)
    hotloop("train", "job.toml", "--set", "run.dir=runs/b", "--set", "seed=1", expect=0)
    listed = hotloop("runs", expect=0).out
    assert [line.split()[:3] for line in listed.splitlines() if "finished" in line] == [
        ["a", "finished", "8"],
        ["b", "finished", "8"],
    ]
    rows = json.loads(hotloop("runs", "--json", expect=0).out)["runs"]
    assert [row["result"]["steps"] for row in rows] == [8, 8]
    compared = hotloop("runs", "compare", "a", "latest", expect=0).out
    assert "seed" in compared
    assert "loss: differs from step 2 on" in compared
    data = json.loads(hotloop("runs", "compare", "a", "a", "--json", expect=0).out)
    assert data["settings"] == {}
    assert data["curves"][0]["first_difference"] is None


def test_a_starter_file_is_checked_and_the_schema_is_json(hotloop: Command, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(hotloop("job", "init", expect=0).out)
    assert "epochs = 3" in hotloop("job", "check", "job.toml", "--set", "train.epochs=3", expect=0).out
    assert json.loads(hotloop("job", "schema", expect=0).out)["title"] == "Job"


def test_what_the_users_code_prints_does_not_reach_the_json(hotloop: Command, job: Path) -> None:
    (job.parent / "mine.py").write_text(
        "import tiny\ndef net(num_classes):\n    print('building')\n    return tiny.cnn(num_classes)\n"
    )
    done = hotloop("train", "job.toml", "--set", "model.name=mine:net", "--json", expect=0)
    assert json.loads(done.out)["status"] == "finished"
    assert "building" in done.err


@pytest.mark.slow
def test_a_metric_that_is_not_a_number_is_null_in_json(hotloop: Command, job: Path) -> None:
    (job.parent / "mine.py").write_text(
        "import tiny\nclass Odd(tiny.Regression):\n"
        "    def metrics(self, outputs, batch):\n        return {'odd': float('nan')}\n"
    )
    (job.parent / "odd.toml").write_text(
        'task.name = "mine:Odd"\ndata.train = "x"\nmodel.name = "x"\ndata.batch_size = 8\ntrain.epochs = 1\n'
    )
    done = hotloop("train", "odd.toml", "--json", expect=0)
    assert json.loads(done.out, parse_constant=lambda name: pytest.fail(name))["metrics"]["val_odd"] is None
    assert "val_odd nan" in hotloop("runs", expect=0).out


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_training(job: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "hotloop", "train", "job.toml", "--json"],
        cwd=job.parent,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    child.stderr.readline()
    child.stderr.close()
    assert child.stdout is not None
    assert json.loads(child.stdout.read())["status"] == "finished"
    child.stdout.close()
    assert child.wait(timeout=60) == 0


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_that_is_no_run_is_left_alone(hotloop: Command, job: Path, resume: str) -> None:
    before = job.read_text()
    done = hotloop("train", "job.toml", "--set", "run.dir=.", "--resume", resume, expect=2)
    assert "is not empty and no run" in done.err
    assert job.read_text() == before
    assert sorted(path.name for path in job.parent.iterdir()) == ["images", "job.toml"]


@pytest.mark.slow
def test_a_damaged_result_does_not_hide_the_other_runs(hotloop: Command, job: Path) -> None:
    hotloop("train", "job.toml", "--set", "run.dir=runs/a", expect=0)
    hotloop("train", "job.toml", "--set", "run.dir=runs/b", expect=0)
    (job.parent / "runs/a/result.json").write_text("{")
    listed = hotloop("runs", expect=0).out
    assert "interrupted" in listed
    assert "finished" in listed
    (job.parent / "runs/a/job.toml").write_text("= 3")
    assert "cannot read" in hotloop("runs", "--root", "runs", "compare", "a", "b", expect=2).err
