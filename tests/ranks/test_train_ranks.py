"""Several processes that train one model: what one would have trained, and nothing lost when one is."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command
from exporter import exporter
from runs import (
    CLIPPED,
    EARLY,
    SUPPORT,
    TOKENS_JOB,
    folder_of,
    losses,
    paced_job,
    rank_of,
    read_by_torch,
    read_until,
    started,
    weights_of,
    write_small_job,
)

from hotloop.cli.progress import rank_observer
from hotloop.train.elastic import _left, _refresh
from hotloop.train.gpus import Answers
from hotloop.train.hang import Watch

NOISY = ["--set", "model.name=tiny:cnn", "--set", "model.arguments.dropout=0.2", "--set", "checkpoint.every=2 steps"]
NOISY += ["--set", "data.last_batch=drop"]
TWO = ["--set", "ranks.processes=2"]


@pytest.fixture
def job(make_images: Callable[..., Path], tmp_path: Path) -> Path:
    return write_small_job(make_images, tmp_path)


def test_two_train_what_one_would(hotloop: Command, job: Path) -> None:
    """The last batch of a validation has one sample, and a rank of two has none of it."""
    warmup = ["--set", "schedule.warmup=500 steps", "--set", "data.val_batch_size=4"]
    hotloop("train", "job.toml", "--set", "run.dir=one", *warmup, expect=0)
    done = hotloop("train", "job.toml", "--set", "run.dir=two", *TWO, *warmup, "--json", expect=0)
    assert done.err.count("schedule.warmup takes 500 steps") == 1, "what is so on all ranks is told once"
    result = json.loads(done.out)
    assert (result["status"], result["steps"]) == ("finished", 18)
    one, two = weights_of(job.parent / "one"), weights_of(job.parent / "two")
    torch.testing.assert_close(one, two)
    assert losses(job.parent / "two") == pytest.approx(losses(job.parent / "one"), rel=1e-4)
    alone = json.loads((job.parent / "one/result.json").read_text())["metrics"]
    assert result["metrics"] == pytest.approx(alone, rel=1e-4)
    again = hotloop("train", "job.toml", "--set", "run.dir=two", *TWO, *warmup, expect=0)
    assert (again.out + again.err).count("has finished its") == 1


@pytest.mark.parametrize("lazily", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_and_sigterm_cost_nothing_beyond_the_last_save(
    hotloop: Command, job: Path, monkeypatch: pytest.MonkeyPatch, lazily: str
) -> None:
    """Three: of two, sums are the same in whichever order they are taken. Connected all with all, and as many are."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazily)
    options = [*NOISY, "--set", "ranks.processes=3", "--set", "train.epochs=12"]
    hotloop("train", "job.toml", "--set", "run.dir=undisturbed", *options, expect=0)
    with started(job.parent, "--set", "run.dir=disturbed", *options) as child:
        read_until(child, "saved")
        os.kill(rank_of(child.pid, 1), signal.SIGKILL)
        again = "hotloop: rank 1 was ended by SIGKILL; starting all again from the last checkpoint (1 of 3)"
        read_until(child, again)
        read_until(child, "step")
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert "saved, as SIGTERM asked" in out
    done = hotloop("train", "job.toml", "--set", "run.dir=disturbed", *options, expect=0)
    assert "finished after 60 steps" in done.out
    left, expected = weights_of(job.parent / "disturbed"), weights_of(job.parent / "undisturbed")
    assert all(torch.equal(left[name], expected[name]) for name in expected)


def test_damaged_files_that_any_rank_meets_are_told(hotloop: Command, job: Path) -> None:
    damaged = sorted((job.parent / "images").rglob("*.*"))[::3]
    for file in damaged:
        file.write_bytes(b"no image")
    epoch = ["--set", "run.dir=two", "--set", "train.epochs=1"]
    result = json.loads(hotloop("train", "job.toml", *TWO, *epoch, "--json", expect=0).out)
    assert {Path(one["path"]).name for one in result["corrupt_files"]} == {file.name for file in damaged}


def test_a_signal_is_heard_soon_after_a_validation(job: Path) -> None:
    """Ranks agree at the pace of their steps, not at that of a validation's short batches."""
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Paced'\n"))
    options = ["--set", "model.name=line", "--set", "task.arguments={samples = 400, seconds = 0.1}"]
    with started(job.parent, "--set", "run.dir=run", *options, *TWO) as child:
        read_until(child, "epoch 1/")
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert 100 <= json.loads((job.parent / "run/result.json").read_text())["steps"] < 150


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_stop_reaches_ranks_though_the_disk_is_full(job: Path, number: signal.Signals) -> None:
    """What hears the signal can write nothing more, and tells them by a file."""
    with started(job.parent, "--set", "run.dir=run", "--set", "train.epochs=2000", *TWO) as child:
        read_until(child, "step")
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (0, 0))
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert f"saved, as {number.name} asked" in out


def test_ranks_whose_parent_is_killed_save_and_end(job: Path) -> None:
    """Also where SIGTERM comes to all that is left in their container: it tells of no ranks that are gone."""
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Paced'\n"))
    options = ["--set", "model.name=line", "--set", "task.arguments={samples = 400, seconds = 2}"]
    with started(job.parent, "--set", "run.dir=run", *options, *TWO) as child:
        read_until(child, "step")
        ranks = [rank_of(child.pid, rank) for rank in (0, 1)]
        child.kill()
        child.wait()
        try:
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
            child.communicate(timeout=60)  # they write there too, the last of them to its end
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
    result = json.loads((job.parent / "run/result.json").read_text())
    assert (result["status"], result["stopped_by"]) == ("preempted", "SIGUSR1")
    saved = [path.name for path in (job.parent / "run/checkpoints").glob("epoch-*")]
    assert f"epoch-0000-step-{result['steps']:08}" in saved


def test_a_rank_whose_parent_is_gone_before_it_begins_ends(
    hotloop: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTLOOP_RANKS_FOLDER", str(job.parent))
    monkeypatch.setenv("HOTLOOP_RANKS_PARENT", str(os.getpid()))  # another one starts what runs here
    done = hotloop("train", "job.toml", "--set", "run.dir=run", expect=1)
    assert "the process that has started this rank is gone" in done.err
    assert not (job.parent / "run").exists()


@pytest.mark.slow
def test_restarts_are_counted_from_checkpoint_to_checkpoint(job: Path) -> None:
    options = [*NOISY, *TWO, "--set", "ranks.restarts=1", "--set", "train.epochs=20", "--set", "run.dir=run"]
    with started(job.parent, *options) as child:
        for _ in range(2):
            read_until(child, "saved")
            os.kill(rank_of(child.pid, 1), signal.SIGKILL)
            read_until(
                child, "hotloop: rank 1 was ended by SIGKILL; starting all again from the last checkpoint (1 of 1)"
            )
        _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (["parallel=auto"], 0, "parallel = ddp: weights, gradients and the optimizer's state take"),
        (["parallel=tp"], 2, "does not say how its layers are divided among ranks"),
        (["parallel=fsdp", "model.name=tiny:tied"], 2, "the model has weights that several of its blocks share"),
        (["data.batch_size=1"], 2, "data.batch_size = 1 is less than the 2 processes"),
        (["model.name=tiny:cnn", "data.batch_size=6"], 2, "has 3 samples, shared by 2 processes"),
        (["ranks.tensor=2"], 2, "ranks.tensor = 2 does not go with parallel"),
    ],
)
def test_a_dry_run_says_what_several_would_do(
    hotloop: Command, job: Path, settings: list[str], code: int, said: str
) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    done = hotloop("train", "job.toml", *TWO, *words, "--dry-run", expect=code)
    assert said in done.out + done.err
    assert not (job.parent / "runs").exists()


@pytest.mark.slow
def test_one_goes_on_where_two_have_stopped(hotloop: Command, job: Path) -> None:
    schedule = ["--set", "schedule.name=constant"]
    hotloop("train", "job.toml", "--set", "run.dir=alone", *schedule, expect=0)
    hotloop("train", "job.toml", "--set", "run.dir=both", "--set", "train.epochs=1", *schedule, *TWO, expect=0)
    done = hotloop("train", "job.toml", "--set", "run.dir=both", *schedule, expect=0)
    assert "changed since: ranks.processes: 2 -> 1" in done.err
    assert losses(job.parent / "both") == pytest.approx(losses(job.parent / "alone"), rel=1e-4)
    words = ["--set", "run.dir=both", *TWO, "--set", "data.batch_size=6"]
    lines = hotloop("train", "job.toml", *words, expect=2).err.strip().splitlines()
    assert lines[0].endswith("was trained with data.batch_size = 4")
    assert len(lines) == 3, "after a refusal the other rank says nothing"


def test_a_warning_of_another_rank_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    rank_observer(1).warn("words " * 60 + "end")
    assert capsys.readouterr().err == "warning, rank 1: " + "words " * 60 + "end\n"


@pytest.mark.slow
def test_bad_input_is_told_once_and_not_tried_again(hotloop: Command, job: Path) -> None:
    done = hotloop("train", "job.toml", *TWO, "--set", "model.name=tiny:not_a_model", expect=2)
    assert done.err.count("error: ") == 1
    assert "starting all again" not in done.err


@pytest.mark.slow
def test_weights_that_blocks_share_are_not_divided(hotloop: Command, job: Path) -> None:
    words = [*TWO, "--set", "model.name=tiny:tied", "--set", "train.epochs=1", "--set"]
    refused = hotloop("train", "job.toml", *words, "parallel=fsdp", expect=2)
    assert 'parallel = "fsdp": the model has weights that several of its blocks share' in refused.err
    assert "--set parallel=ddp" in refused.err
    hotloop("train", "job.toml", *words, "parallel=ddp", expect=0)


@pytest.mark.slow
@pytest.mark.parametrize("static", ["false", "true"])
def test_weights_that_get_no_gradient_later_are_named(hotloop: Command, job: Path, static: str) -> None:
    words = [*TWO, "--set", "model.name=tiny:sometimes", "--set", "checkpoint.every=1 step", "--set"]
    ddp = ["parallel=ddp", "--set", f"ranks.static_graph={static}"]
    ended = hotloop("train", "job.toml", *words, *ddp, "--set", "run.dir=run", expect=1)
    said = {
        "false": "weights got no gradient in this step",
        "true": "the weights that get gradients are not those of the first step",
    }
    assert ended.err.count(f"{said[static]}: 2.extra.weight, 2.extra.bias\n") == 1
    assert "starting all again" not in ended.err
    last = max(path.name for path in (job.parent / "run/checkpoints").iterdir())
    assert last == "epoch-0000-step-00000003", "the next one holds gradients that were not averaged"
    assert "finished" in hotloop("train", "job.toml", *words, "parallel=fsdp", expect=0).out


@pytest.mark.slow
def test_weights_that_a_static_graph_has_not_seen_are_told(hotloop: Command, job: Path) -> None:
    settings = ["model.name=tiny:sometimes", "model.arguments.before=true", "parallel=ddp"]
    words = [*TWO, *(word for setting in settings for word in ("--set", setting))]
    ended = hotloop("train", "job.toml", *words, "--set", "ranks.static_graph=true", expect=1)
    assert ended.err.count("error: the weights that get gradients are not those of the first step\n") == 1
    assert "starting all again" not in ended.err
    hotloop("train", "job.toml", *words, expect=0)


@pytest.mark.slow
def test_weights_in_several_reentrant_checkpoints_need_a_static_graph(hotloop: Command, job: Path) -> None:
    words = ["--set", "model.name=tiny:twice"]
    hotloop("train", "job.toml", "--set", "run.dir=one", *words, expect=0)
    words += [*TWO, "--set", "parallel=ddp"]
    ended = hotloop("train", "job.toml", "--set", "run.dir=refused", *words, expect=1)
    assert ended.err.count("error: a weight got several gradients in one backward pass\n") == 1
    assert "starting all again" not in ended.err
    assert "--set ranks.static_graph=true" in ended.err
    hotloop("train", "job.toml", "--set", "run.dir=two", *words, "--set", "ranks.static_graph=true", expect=0)
    torch.testing.assert_close(weights_of(job.parent / "one"), weights_of(job.parent / "two"))


@pytest.mark.slow
def test_a_static_graph_that_averages_nothing_is_told(hotloop: Command, job: Path) -> None:
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Wrapped'\n"))
    words = [*TWO, "--set", "model.name=line", "--set", "parallel=ddp"]
    ended = hotloop("train", "job.toml", *words, "--set", "ranks.static_graph=true", expect=1)
    assert ended.err.count("finds no tensors in what the model returns\n") == 1
    hotloop("train", "job.toml", *words, expect=0)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["train.accumulate=2", "data.last_batch=drop"]])
def test_a_static_graph_trains_what_one_would_without_weights_that_nothing_uses(
    hotloop: Command, job: Path, more: list[str]
) -> None:
    words = [word for setting in ["model.name=tiny:idle", *more] for word in ("--set", setting)]
    hotloop("train", "job.toml", "--set", "run.dir=one", *words, expect=0)
    static = ["--set", "parallel=ddp", "--set", "ranks.static_graph=true", "--set", "run.dir=two"]
    hotloop("train", "job.toml", *TWO, *words, *static, expect=0)
    torch.testing.assert_close(weights_of(job.parent / "one"), weights_of(job.parent / "two"))


@pytest.mark.slow
def test_a_run_whose_directory_has_gone_is_not_begun_anew(job: Path) -> None:
    run, elsewhere = job.parent / "run", job.parent / "elsewhere"
    with started(job.parent, "--set", "run.dir=run", "--set", "train.epochs=2000", *TWO) as child:
        read_until(child, "step")
        run.rename(elsewhere)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1, err
    assert f"error: {run} has gone\n" in err
    assert "starting all again" not in err
    assert not run.exists()


@pytest.mark.slow
def test_an_error_of_the_users_ends_all_ranks(hotloop: Command, job: Path) -> None:
    """Losses come to the host several at a time, and by then all ranks' weights are NaN: the first is named."""
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:NanOnSecond'\n"))
    options = ["--set", "model.name=line", "--set", "log.every=6", "--set", "run.dir=run"]
    done = hotloop("train", "job.toml", *TWO, *options, expect=1)
    assert done.err.count("error: the loss of step 3 is nan on rank 1\n") == done.err.count("error: ") == 1, done.err
    assert "starting all again" not in done.err
    kept = json.loads((job.parent / "run/result.json").read_text())
    assert kept["error"].startswith("the loss of step 3 is nan on rank 1\n")


@pytest.mark.slow
def test_an_error_that_comes_again_at_its_step_ends_the_training(hotloop: Command, job: Path) -> None:
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:BrokenOnSecond'\n"))
    done = hotloop("train", "job.toml", *TWO, "--set", "model.name=line", "--set", "run.dir=run", expect=1)
    assert done.err.count("starting all again from the beginning") == 1, done.err
    assert "rank 1 ended with 1, as the start before did at that step" in done.err
    assert json.loads((job.parent / "run/result.json").read_text())["error"].endswith("a loss of the user's own")


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_stack(hotloop: Command, job: Path) -> None:
    options = ["--set", "ranks.timeout=15 s", "--set", "model.name=line"]
    text = job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Stuck'\n")
    job.write_text(text)
    done = hotloop("train", "job.toml", *TWO, *options, expect=1)
    assert "rank 1 makes no progress" in done.err
    assert "in stuck" in done.err
    waiting = next(line for line in done.err.splitlines() if "--- rank 0" in line)
    assert "last collective: gloo:" in waiting
    assert "not done" in waiting


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_all_stop_for_the_reason_that_one_has_heard(job: Path, number: signal.Signals) -> None:
    with started(job.parent, "--set", "run.dir=run", "--set", "train.epochs=2000", *TWO) as child:
        read_until(child, "step")
        os.kill(rank_of(child.pid, 1), number)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert f"saved, as {number.name} asked" in out
    assert json.loads((job.parent / "run/result.json").read_text())["stopped_by"] == number.name


@pytest.mark.slow
def test_a_loss_before_the_first_save_is_told_as_such(job: Path) -> None:
    options = [*TWO, "--set", "run.dir=run", "--set", "train.epochs=200", "--set", "checkpoint.every=200 epochs"]
    with started(job.parent, *options) as child:
        read_until(child, "step")
        os.kill(rank_of(child.pid, 1), signal.SIGKILL)
        read_until(
            child, "hotloop: rank 1 was ended by SIGKILL; starting all again from the beginning, as nothing is saved"
        )
        read_until(child, "step")
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 75, err


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_ranks(job: Path) -> None:
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Stuck'\n"))
    with started(job.parent, *TWO, "--set", "model.name=line") as child:
        read_until(child, "step")
        ranks = [rank_of(child.pid, rank) for rank in (0, 1)]
        child.send_signal(signal.SIGINT)
        while not (folder_of(ranks[0]) / "stop").exists():
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        child.wait(60)
        left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
        for rank in left:
            os.kill(rank, signal.SIGKILL)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert not left, "they train on, or hang for ever, and nobody looks after them"


@pytest.mark.slow
def test_a_rank_that_is_killed_while_all_are_to_stop_is_a_stop(job: Path) -> None:
    """As where memory runs out while it saves, or the notice's time is up: what was saved last is there."""
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Stuck'\n"))
    options = ["--set", "model.name=line", "--set", "run.dir=run", "--set", "checkpoint.every=1 step"]
    with started(job.parent, *TWO, *options) as child:
        read_until(child, "saved")
        rank = rank_of(child.pid, 1)
        child.send_signal(signal.SIGTERM)
        while not (folder_of(rank) / "stop").exists():
            assert child.poll() is None
        os.kill(rank, signal.SIGKILL)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert "starting all again" not in err
    assert list((job.parent / "run/checkpoints").glob("epoch-*"))


def test_of_ranks_that_do_not_begin_a_cause_is_told(tmp_path: Path) -> None:
    watch = Watch(tmp_path, limit_seconds=0.0)
    assert "no rank has begun" in watch.hung()
    assert "still imports" in watch.report


@pytest.mark.parametrize(
    ("asked", "answered", "used", "team", "left"),
    [
        ("0123", "0123", "", 1, ""),
        ("0123", "123", "", 1, "12"),
        ("0123", "02", "", 1, "02"),
        ("0123", "02", "02", 1, ""),
        ("01", "1", "", 2, ""),
        ("0123", "", "", 1, ""),
        ("0123", "012", "", 1, ""),
    ],
)
def test_ranks_move_to_gpus_that_answer(asked: str, answered: str, used: str, team: int, left: str) -> None:
    """Two ranks, on the first two unless others are named."""
    assert _left(Answers(list(asked), list(answered)), list(used), 2, team) == list(left)


LOST_GPU = """
import sys
import time
from hotloop.core.job import RanksSection
from hotloop.train.elastic import train_in_ranks
from hotloop.train.gpus import Answers
command = ["hotloop", "train", "job.toml"]
asked, answered = sys.argv[1:]
raise SystemExit(train_in_ranks(command, len(asked), RanksSection(), print, lambda: Answers([*asked], [*answered])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "answered"), [("45", "4")])
def test_what_is_left_goes_on_after_a_gpu_is_lost(job: Path, asked: str, answered: str) -> None:
    """One that is left alone is looked after as several are."""
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:OnFewer'\n"))
    job.write_text(job.read_text().replace("tiny:perceptron", "line"))
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GONE": str(len(asked) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", LOST_GPU, asked, answered],
        cwd=job.parent, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"not all GPUs answer: going on with {', '.join(answered)}" in done.stdout
    assert f"ranks see GPUs {','.join(answered)}" in done.stderr
    [run] = [folder for folder in (job.parent / "runs").iterdir() if not folder.is_symlink()]
    assert tomllib.loads((run / "job.toml").read_text())["ranks"]["processes"] == len(answered)


STOPPED_WHILE_IMPORTING = """
import os, signal, sys
if "RANK" in os.environ:
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_stop_of_all_processes_before_anything_is_trained_is_a_stop(job: Path) -> None:
    """As an engine sends it while ranks import what they need."""
    (job.parent / "sitecustomize.py").write_text(STOPPED_WHILE_IMPORTING)
    path = os.pathsep.join([str(job.parent), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", "train", "job.toml", *TWO],
        cwd=job.parent, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert "was asked to stop before anything was trained" in done.stderr


@pytest.mark.slow
def test_the_exporter_tells_which_rank_waits_for_a_slow_one(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTLOOP_LIVE", str(tmp_path / "live"))
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:SlowToCompute'\n"))
    options = [*TWO, "--set", "model.name=line", "--set", "train.epochs=100000"]
    with exporter(tmp_path) as running, started(job.parent, *options) as child:
        read_until(child, "step 20 ")
        steps, waited = [], []
        for least in (20, 80):  # a live file is written once a second; before the first step the second rank waits, too
            while (number := running.value("hotloop_job_steps_total", rank="1") or 0.0) < least:
                pass
            steps.append(number)
            found = [running.value("hotloop_job_communication_seconds_total", rank=rank) for rank in "01"]
            waited.append([seconds or 0.0 for seconds in found])
        first, second = (after - before for before, after in zip(*waited, strict=True))
        assert first > 0.5 * 0.05 * (steps[1] - steps[0])
        assert first > second
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)


@pytest.mark.slow
def test_a_rank_that_reads_slowly_is_named(hotloop: Command, job: Path) -> None:
    task = "[task]\nname = 'tiny:SlowToRead'\narguments = {samples = 160}\n"  # more than is read ahead
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", task))
    options = ["--set", "model.name=line", "--set", "data.workers=1", "--set", "checkpoint.every=1 epochs"]
    done = hotloop("train", "job.toml", *TWO, *options, expect=0)
    assert done.err.count("rank 1 waits for data") == 1, done.err
    assert "its reading holds all up" in done.err


@pytest.mark.slow
def test_normalising_over_one_sample_is_refused(hotloop: Command, job: Path) -> None:
    done = hotloop("train", "job.toml", *TWO, "--set", "model.name=tiny:cnn", "--set", "data.batch_size=6", expect=2)
    assert "the last batch of 21 samples in batches of 6 has 3 samples, shared by 2 processes" in done.err


def test_more_processes_than_samples_a_batch_are_refused(hotloop: Command, job: Path) -> None:
    done = hotloop("train", "job.toml", "--set", "ranks.processes=5", expect=2)
    assert "data.batch_size = 4 is less than the 5 processes" in done.err


@pytest.mark.slow
def test_more_processes_than_samples_are_told_how_many_there_can_be(hotloop: Command, job: Path) -> None:
    for folder in (job.parent / "images").iterdir():
        for file in sorted(folder.iterdir())[1:]:
            file.unlink()
    done = hotloop("train", "job.toml", "--set", "ranks.processes=4", expect=2)
    assert "data.batch_size = 4 is more than the" in done.err
    samples = len(list((job.parent / "images").iterdir()))
    assert f"--set data.batch_size={samples} --set ranks.processes={samples}" in done.err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """20 samples: the last of four batches has two, and the last of two in validation eight."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 20 * 16 + 1).astype(np.uint16))
    file = tmp_path / "job.toml"
    file.write_text(TOKENS_JOB)
    return file


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_within_an_epoch(hotloop: Command, job: Path) -> None:
    """With the same samples in the same order, on more and on fewer."""
    often = ["--set", "checkpoint.every=1 step", "--set", "checkpoint.keep=99", "--set", "schedule.name=constant"]
    hotloop("train", "job.toml", "--set", "run.dir=alone", *often, expect=0)
    expected = losses(job.parent / "alone")
    hotloop("train", "job.toml", "--set", "run.dir=of-2", *often, *TWO, expect=0)
    before = job.parent / "of-2"
    for ranks, step in ((3, 8), (1, 10), (4, 14)):
        (begun,) = before.glob(f"checkpoints/epoch-*-step-{step:08}")
        before = job.parent / f"of-{ranks}"
        words = ["--set", f"run.dir={before.name}", "--set", f"ranks.processes={ranks}", "--resume", str(begun)]
        done = hotloop("train", "job.toml", *often, *words, expect=0)
        assert f"continuing at step {step}" in done.err
        assert losses(before) == pytest.approx(expected[step:], rel=1e-4)


@pytest.mark.slow
def test_divided_weights_train_the_same_and_any_number_goes_on(hotloop: Command, text: Path) -> None:
    hotloop("train", "job.toml", "--set", "run.dir=one", expect=0)
    divided = ["--set", "parallel=fsdp", "--set", "ranks.processes=3", "--set", "checkpoint.background=true"]
    first = ["--set", "train.epochs=1", "--set", "run.dir=divided"]
    hotloop("train", "job.toml", *divided, *first, expect=0)
    done = hotloop("train", "job.toml", *TWO, "--set", "parallel=ddp", "--set", "run.dir=divided", "--json", expect=0)
    alone = json.loads((text.parent / "one/result.json").read_text())
    assert json.loads(done.out)["metrics"] == pytest.approx(alone["metrics"], rel=1e-3)
    torch.testing.assert_close(weights_of(text.parent / "divided"), weights_of(text.parent / "one"))
    assert losses(text.parent / "divided") == pytest.approx(losses(text.parent / "one"), rel=1e-4)
    again = ["--set", "train.epochs=3", "--set", "run.dir=divided", *divided]
    done = hotloop("train", "job.toml", *again, expect=0)
    assert "changed since" in done.err
    assert "finished after 12 steps" in done.out


def test_weights_that_are_updated_during_backward_become_those_of_one(hotloop: Command, text: Path) -> None:
    hotloop("train", "job.toml", "--set", "run.dir=one", *EARLY, expect=0)
    divided = ["--set", "parallel=fsdp", *TWO, "--set", "run.dir=divided", *EARLY]
    hotloop("train", "job.toml", *divided, expect=0)
    torch.testing.assert_close(weights_of(text.parent / "divided"), weights_of(text.parent / "one"))
    assert losses(text.parent / "divided") == pytest.approx(losses(text.parent / "one"), rel=1e-4)


LLAMA = ["--set", "model.name=llama-3.2-1b", "--set", "model.arguments.heads=4", "--set", "model.arguments.hidden=48"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as read_by_torch asks
@pytest.mark.parametrize(
    ("parallel", "processes", "more"),
    [
        pytest.param("tp", 2, [], marks=pytest.mark.slow),
        pytest.param("tp", 2, CLIPPED, marks=pytest.mark.slow),
        ("fsdp+tp", 4, [*LLAMA, *CLIPPED]),
        pytest.param("fsdp+tp", 4, [*LLAMA, *EARLY], marks=pytest.mark.slow),
    ],
)
def test_layers_of_several_ranks_train_the_same(
    hotloop: Command, text: Path, parallel: str, processes: int, more: list[str]
) -> None:
    hotloop("train", "job.toml", "--set", "run.dir=one", *more, expect=0)
    several = ["--set", f"parallel={parallel}", "--set", f"ranks.processes={processes}", *more]
    hotloop("train", "job.toml", *several, "--set", "train.epochs=1", "--set", "run.dir=several", expect=0)
    done = hotloop("train", "job.toml", *several, "--set", "run.dir=several", "--json", expect=0)
    assert "warning" not in done.err.lower()
    alone = json.loads((text.parent / "one/result.json").read_text())
    assert json.loads(done.out)["metrics"] == pytest.approx(alone["metrics"], rel=1e-3)
    torch.testing.assert_close(weights_of(text.parent / "several"), weights_of(text.parent / "one"))
    assert losses(text.parent / "several") == pytest.approx(losses(text.parent / "one"), rel=1e-4)
    read = read_by_torch(text.parent / "several")
    assert len(read) > 10
    weights = weights_of(text.parent / "several")
    torch.testing.assert_close(read, {name: weights[name] for name in read}, rtol=0, atol=0)
    again = ["--set", "train.epochs=3", "--set", "run.dir=several", *more]
    assert "finished after 12 steps" in hotloop("train", "job.toml", *again, expect=0).out, "by one alone"


@pytest.mark.slow
def test_divided_blocks_are_compiled_between_the_gathering_of_their_weights(hotloop: Command, text: Path) -> None:
    hotloop("train", "job.toml", "--set", "run.dir=one", expect=0)
    options = ["--set", "parallel=fsdp", "--set", "speed.compile=blocks", "--set", "run.dir=divided"]
    done = hotloop("train", "job.toml", *TWO, *options, expect=0)
    assert "warning" not in done.err, "each block is compiled in one piece"
    assert losses(text.parent / "divided") == pytest.approx(losses(text.parent / "one"), rel=1e-3)


@pytest.mark.slow
def test_a_model_that_is_not_compiled_is_told_once(
    hotloop: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the ranks."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the loss need not be compiled for that
    options = ["--set", "parallel=fsdp", "--set", "speed.compile=true", "--set", "train.epochs=1"]
    done = hotloop("train", "job.toml", *TWO, *options, expect=0)
    assert done.err.count("the model is not compiled: its weights are divided, and it has no repeated blocks") == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["striped", "turned"])
def test_weights_in_another_layout_are_divided_too(hotloop: Command, job: Path, model: str) -> None:
    options = ["--set", f"model.name=tiny:{model}", "--set", "parallel=fsdp", "--set", "data.last_batch=drop"]
    assert "finished after 15 steps" in hotloop("train", "job.toml", *TWO, *options, expect=0).out


@pytest.mark.parametrize(
    ("parallel", "makers"),
    [("fsdp", ["made-by-0"]), pytest.param("auto", ["made-by-0", "made-by-1"], marks=pytest.mark.slow)],
)
def test_a_model_that_is_divided_is_made_whole_by_one(
    hotloop: Command, job: Path, parallel: str, makers: list[str]
) -> None:
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Signed'\n"))
    hotloop("train", "job.toml", *TWO, "--set", "model.name=line", "--set", f"parallel={parallel}", expect=0)
    assert sorted(file.name for file in job.parent.glob("made-by-*")) == makers


@pytest.mark.slow
def test_the_one_that_cannot_make_it_is_not_waited_for(hotloop: Command, job: Path) -> None:
    arguments = "[task]\nname = 'tiny:Signed'\narguments = {refuses = true}\n"
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", arguments))
    options = ["--set", "model.name=line", "--set", "parallel=fsdp"]
    assert "no numbers for this one" in hotloop("train", "job.toml", *TWO, *options, expect=1).err


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_may_travel_in_half_as_many_bytes(hotloop: Command, text: Path, parallel: str) -> None:
    descent = ["--set", "optimizer.name=sgd", "--set", "optimizer.learning_rate=1"]  # whose steps are the gradients
    hotloop("train", "job.toml", "--set", "run.dir=one", *descent, expect=0)
    several = [*TWO, "--set", f"parallel={parallel}", "--set", "ranks.gradients=bf16", "--set", "run.dir=several"]
    hotloop("train", "job.toml", *several, *descent, expect=0)
    found, expected = losses(text.parent / "several"), losses(text.parent / "one")
    assert found == pytest.approx(expected, rel=1e-2)
    assert found != pytest.approx(expected, rel=1e-6), "they are rounded"


@pytest.mark.slow
def test_layers_that_cannot_be_divided_are_refused(hotloop: Command, text: Path) -> None:
    together = ["--set", "parallel=tp", "--set", "ranks.processes=3"]
    done = hotloop("train", "job.toml", *together, expect=2)
    assert "kv_heads = 2 cannot be divided among 3 ranks" in done.err
    assert 'with parallel = "tp" --set ranks.processes=2' in done.err
    assert done.err.count("error: ") == 1
    done = hotloop("train", "job.toml", "--set", "parallel=fsdp+tp", "--set", "ranks.processes=3", expect=2)
    assert "3 processes cannot compute layers together by 2" in done.err
    assert "--set ranks.processes=2" in done.err
    done = hotloop("train", "job.toml", *together, "--set", "ranks.tensor=2", expect=2)
    assert "--set ranks.processes=2" in done.err
    for tensor in (1, 4):
        done = hotloop("train", "job.toml", *together, "--set", f"ranks.tensor={tensor}", expect=2)
        assert f"3 processes cannot compute layers together by {tensor}" in done.err
        assert "--set ranks.tensor=auto" in done.err


@pytest.mark.slow
def test_a_model_that_does_not_say_how_it_is_divided_is_refused(hotloop: Command, job: Path) -> None:
    done = hotloop("train", "job.toml", *TWO, "--set", "parallel=tp", expect=2)
    assert "Sequential does not say how its layers are divided" in done.err
    done = hotloop("train", "job.toml", *TWO, "--set", "parallel=tp", "--set", "model.name=tiny:HalfDivided", expect=2)
    assert "HalfDivided.divide(mesh) leaves 3.weight and 1 more as they were" in done.err
    assert "name 3 in the plan of parallelize_module" in done.err
    assert done.err.count("error: ") == 1


@pytest.mark.parametrize("setting", ["precision=fp16", "train.ema=0.9", "speed.graph=true", "ranks.static_graph=true"])
def test_what_divided_weights_do_not_go_with_is_refused(hotloop: Command, text: Path, setting: str) -> None:
    options = ["--set", "parallel=fsdp", *TWO, "--set", setting]
    done = hotloop("train", "job.toml", *options, expect=2)
    assert setting.split("=")[0] in done.err
    assert done.err.count("error: ") == 1


@pytest.mark.slow
def test_float8_goes_with_divided_weights_and_not_with_divided_layers(hotloop: Command, text: Path) -> None:
    options = [*TWO, "--set", "precision=float8", "--set"]
    done = hotloop("train", "job.toml", *options, "parallel=tp", expect=2)
    assert 'precision = "float8" does not go with parallel = "tp"' in done.err
    assert "--set parallel=fsdp" in done.err
    done = hotloop("train", "job.toml", *options, "parallel=fsdp", expect=2)
    assert 'precision = "float8" on a CPU' in done.err, "that alone is against it here"


def test_what_ranks_have_noted_does_not_grow_old(tmp_path: Path) -> None:
    """Its time of change stays: ranks ask when they were told something."""
    files = [tmp_path / "saved", tmp_path / "logs/rank-0.txt"]
    files[1].parent.mkdir()
    for file in files:
        file.touch()
    for place in (*files, files[1].parent, tmp_path):
        os.utime(place, (0, 1000))
    _refresh(tmp_path)
    for place in (*files, files[1].parent, tmp_path):
        assert place.stat().st_mtime == 1000
        assert place.stat().st_atime > 1000


@pytest.mark.slow
def test_a_stop_is_heard_where_somebody_has_cleaned_up_after_the_ranks(job: Path) -> None:
    """Systemd may remove from /tmp what is ten days old."""
    with started(job.parent, "--set", "run.dir=run", "--set", "train.epochs=2000", *TWO) as child:
        read_until(child, "step")
        notices = list(folder_of(rank_of(child.pid, 1)).glob("stop.*"))
        assert notices
        for notice in notices:
            notice.unlink()
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert "saved, as SIGTERM asked" in out


@pytest.mark.slow
def test_ranks_that_were_suspended_longer_than_a_hang_may_take_go_on(job: Path) -> None:
    job.write_text(paced_job(epochs=2))
    slow = ["--set", "task.arguments.seconds=3", "--set", "ranks.timeout=5 s"]
    with started(job.parent, "--set", "run.dir=run", *slow, *TWO) as child:
        read_until(child, "step")
        processes = [child.pid, *(rank_of(child.pid, rank) for rank in (0, 1))]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        time.sleep(8)  # the fault
        for process in processes:
            os.kill(process, signal.SIGCONT)
        _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert "makes no progress" not in err


@pytest.mark.slow
def test_a_training_that_is_done_is_no_hang_though_a_rank_does_not_come_to_its_end(hotloop: Command, job: Path) -> None:
    ends_late = "import atexit, os, time\nif os.environ.get('RANK') == '0': atexit.register(time.sleep, 300)\n"
    (job.parent / "late.py").write_text(f"{ends_late}from tiny import *\n")
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'late:Regression'\n"))
    options = ["--set", "model.name=line", "--set", "run.dir=run", "--set", "ranks.timeout=4 s"]
    hotloop("train", "job.toml", *TWO, *options, expect=0, timeout=100)
    assert json.loads((job.parent / "run/result.json").read_text())["status"] == "finished"
