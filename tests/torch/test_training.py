"""The main job in this process: files in, run out."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pictures import write_image
from runs import events_in
from tiny import Rotated

from hotloop import HotloopError, InputError, Run, train_job
from hotloop.core.history import History, read_history
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.machine import read_machine
from hotloop.core.run import Result
from hotloop.train.checkpoint import saving
from hotloop.train.checkpoint.checkpointer import Checkpointer, load_checkpoint
from hotloop.train.checkpoint.parts import PartFiles
from hotloop.train.checkpoint.schedule import SaveSchedule
from hotloop.train.checkpoint.staging import Staged
from hotloop.train.host_memory import HostMemory
from hotloop.train.loop import Loop
from hotloop.train.observer import Event, Logged, Observer, Saved, Started, Validated, Warned
from hotloop.train.patience import StopRequested
from hotloop.train.record import TensorBoard
from hotloop.train.slow_rank import SlowRanks

Make = Callable[..., Path]


class Told(Observer):
    """Keeps every event; may act on one."""

    def __init__(self, act: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Any] = []
        self._act = act

    def on(self, event: Event) -> None:
        self.events.append(event)
        self._act(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def small(folder: Path, run_dir: Path, **changes: Any) -> Job:
    """A job over two classes of 16×16 images: 16 samples, 4 steps an epoch."""
    raw: dict[str, Any] = {
        "name": "small",
        "task": {"image_size": 16, "augment": {"crop_scale": [0.5, 1.0]}},
        "data": {"train": str(folder), "val": str(folder), "batch_size": 4, "workers": 0},
        "model": {"name": "tiny:cnn"},
        "train": {"epochs": 2},
        "optimizer": {"learning_rate": 0.05},
        "log": {"every": 2, "tensorboard": False, "report": False},
        "run": {"dir": str(run_dir)},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        raw.setdefault(section, {})[name] = value
    return parse_job(raw, "job")


def run(job: Job, observer: Observer | None = None, **options: Any) -> tuple[Run, Result]:
    return train_job(job, read_machine(), observer or Told(), **options)


def stop_at(step: int, number: signal.Signals = signal.SIGTERM) -> Told:
    """Sends this process a signal when a step is logged."""

    def act(event: Event) -> None:
        if isinstance(event, Logged) and event.progress.step >= step:
            os.kill(os.getpid(), number)

    return Told(act)


@pytest.mark.parametrize("last_batch", ["keep", "drop", "pad"])
def test_the_last_batch_counts_as_the_job_says(make_images: Make, tmp_path: Path, last_batch: str) -> None:
    changes = {"data__batch_size": 6, "model__name": "tiny:perceptron", "log__every": 1}
    told = Told()
    done, result = run(small(make_images(), tmp_path / "run", data__last_batch=last_batch, **changes), told)
    assert result.steps == {"keep": 6, "drop": 4, "pad": 6}[last_batch]
    if last_batch == "pad":
        kept, _ = run(small(make_images(), tmp_path / "kept", **changes))
        losses = [[record["loss"] for record in one.metrics() if record["event"] == "step"] for one in (done, kept)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_run_trains_and_leaves_everything(make_images: Make, tmp_path: Path) -> None:
    told = Told()
    job = small(make_images(), tmp_path / "run", train__epochs=20, log__tensorboard=True, log__report=True)
    done, result = run(job, told)
    assert result.status == "finished"
    assert result.metrics["val_accuracy"] == 1.0
    assert (result.epochs, result.steps, result.corrupt_files) == (20, 80, [])
    assert 0 <= result.data_wait_share <= 1
    assert len(result.weights_sha256) == 64
    names = sorted(path.name for path in done.directory.iterdir())
    expected = ["checkpoints", "events", "examples.json", "job.toml", "machine.json", "metrics.jsonl", "report.html"]
    assert names == sorted([".lock", *expected, "result.json", "starts.jsonl"])
    assert json.loads(done.result_file.read_text())["weights_sha256"] == result.weights_sha256
    assert len(list(done.events.iterdir())) == 1
    assert len(told.of(Validated)) == 20
    assert [event.progress.step for event in told.of(Logged)] == list(range(2, 81, 2))
    assert told.of(Started)[0].parameters == 8 * 27 + 8 + 16 + 32 * 2 + 2


def test_tensorboard_reads_the_events(make_images: Make, tmp_path: Path) -> None:
    done, _ = run(small(make_images(), tmp_path / "run", log__tensorboard=True))
    events = events_in(done.events)
    assert [point.step for point in events.Scalars("step/loss")] == [2, 4, 6, 8]
    assert [point.step for point in events.Scalars("epoch/val_accuracy")] == [4, 8]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__accumulate": 3, "train__ema": 0.9, "train__clip_norm": 1.0},
        {"model__arguments": {"dropout": 0.5}, "schedule__name": "one-cycle"},
        {"task__augment": {"mixup": 0.3, "cutmix": 1.0, "randaugment": 5}},
        {"checkpoint__background": True, "model__name": "tiny:wide", "optimizer__name": "adamw"},
    ],
    ids=["plain", "accumulate and average", "dropout", "mixing", "saved in the background"],
)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_stopped_run_continues_bit_for_bit(
    make_images: Make, tmp_path: Path, changes: dict[str, Any], stop: int
) -> None:
    folder = make_images(each=9)
    settings = {"log__every": 1, "train__epochs": 3, **changes}
    _, through = run(small(folder, tmp_path / "through", **settings))
    job = small(folder, tmp_path / "stopped", **settings)
    done, first = run(job, stop_at(stop))
    assert (first.status, first.steps, first.weights_sha256) == ("preempted", stop, "")
    told = Told()
    _, second = run(job, told)
    assert second.status == "finished"
    assert second.weights_sha256 == through.weights_sha256
    assert second.metrics == through.metrics
    assert told.of(Started)[0].progress.step == stop
    steps = [record["step"] for record in done.metrics() if record["event"] == "step"]
    assert steps == sorted(set(steps))


def test_a_rank_reads_its_own_random_state_alone(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint of 1,000 ranks; dropout draws from it."""
    folder, settings = make_images(), {"log__every": 1, "model__arguments": {"dropout": 0.5}}
    _, through = run(small(folder, tmp_path / "through", **settings))
    job = small(folder, tmp_path / "stopped", **settings)
    done, _ = run(job, stop_at(3))
    (saved,) = done.checkpoints.glob("epoch-*")
    state = load_checkpoint(saved).state
    own = state["random_states"]
    others = torch.randint(256, (999, own.shape[1]), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shutil.rmtree(done.checkpoints)
    done.checkpoints.mkdir()
    Checkpointer(done.checkpoints).save({**state, "random_states": torch.cat([own, others])}, step=3)
    sizes: list[int] = []
    read = PartFiles.read

    def noted(files: PartFiles, file: int, name: str, slices: Any) -> torch.Tensor:
        block = read(files, file, name, slices)
        if name == "random_states":
            sizes.append(block.nbytes)
        return block

    monkeypatch.setattr(PartFiles, "read", noted)
    _, result = run(job)
    assert sizes == [own.nbytes]
    assert result.weights_sha256 == through.weights_sha256


@pytest.mark.slow
def test_workers_change_nothing(make_images: Make, tmp_path: Path) -> None:
    folder = make_images()
    hashes = {run(small(folder, tmp_path / str(n), data__workers=n))[1].weights_sha256 for n in (0, 1, 3)}
    assert len(hashes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_validation_stops_there_and_validates_again(
    make_images: Make, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotloop.tasks.images import ImageClassification

    folder = make_images()
    metrics = ImageClassification.metrics

    def interrupted(self: ImageClassification, outputs: Any, batch: Any) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        return metrics(self, outputs, batch)

    job = small(folder, tmp_path / "run", data__val_batch_size=4)
    with monkeypatch.context() as patched:
        patched.setattr(ImageClassification, "metrics", interrupted)
        _, first = run(job)
    assert (first.status, first.steps, first.epochs) == ("preempted", 4, 0)
    _, second = run(job)
    _, through = run(small(folder, tmp_path / "through", data__val_batch_size=4))
    assert (second.weights_sha256, second.metrics) == (through.weights_sha256, through.metrics)


def test_a_notice_saves_and_stops(make_images: Make, tmp_path: Path) -> None:
    notice = tmp_path / "notice"

    def act(event: Event) -> None:
        if isinstance(event, Logged):
            notice.touch()

    changes = {"preemption__file": str(notice), "preemption__every": 0.001, "train__epochs": 100_000}
    done, result = run(small(make_images(), tmp_path / "run", log__every=1, **changes), Told(act))
    assert (result.status, result.stopped_by) == ("preempted", f"the file {notice}")
    assert list(done.checkpoints.iterdir())


def test_handlers_are_given_back(make_images: Make, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run(small(make_images(), tmp_path / "run"), stop_at(2, signal.SIGINT))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_finished_run_stays_and_more_epochs_go_on(make_images: Make, tmp_path: Path) -> None:
    folder = make_images()
    _, first = run(small(folder, tmp_path / "run"))
    _, again = run(small(folder, tmp_path / "run"))
    assert (again.steps, again.weights_sha256, again.metrics) == (first.steps, first.weights_sha256, first.metrics)
    _, more = run(small(folder, tmp_path / "run", train__epochs=3))
    assert more.steps == 12


def test_never_sets_the_earlier_run_aside(make_images: Make, tmp_path: Path) -> None:
    job = small(make_images(), tmp_path / "run")
    _, first = run(job)
    told = Told()
    _, anew = run(job, told, resume="never")
    assert anew.weights_sha256 == first.weights_sha256
    assert told.of(Started)[0].resumed_from == ""
    assert (tmp_path / "run.1/result.json").exists()
    assert "run.1" in told.of(Warned)[0].text


def test_a_named_checkpoint_is_continued_elsewhere(make_images: Make, tmp_path: Path) -> None:
    folder = make_images()
    done, through = run(small(folder, tmp_path / "a", checkpoint__every="3 steps", checkpoint__keep=9))
    path = done.checkpoints / "epoch-0000-step-00000003"
    told = Told()
    _, result = run(small(folder, tmp_path / "b"), told, resume=str(path))
    assert told.of(Started)[0].progress.step == 3
    assert result.weights_sha256 == through.weights_sha256


def test_going_back_in_a_run_leaves_its_later_checkpoints_behind(make_images: Make, tmp_path: Path) -> None:
    job = small(make_images(), tmp_path / "run", checkpoint__every="2 steps", checkpoint__keep=9, log__every=1)
    done, through = run(job)
    back = str(done.checkpoints / "epoch-0000-step-00000002")
    _, stopped = run(job, stop_at(3), resume=back)
    assert stopped.steps == 3
    told = Told()
    _, again = run(job, told)
    assert told.of(Started)[0].progress.step == 3
    assert again.weights_sha256 == through.weights_sha256
    assert any(path.name.startswith("abandoned-") for path in done.checkpoints.iterdir())


def test_a_command_that_names_a_checkpoint_goes_on_when_it_is_repeated(make_images: Make, tmp_path: Path) -> None:
    """As launchers do, also where the one that is named is kept no longer. Other settings begin there again."""
    job = small(make_images(), tmp_path / "run", checkpoint__every="2 steps", checkpoint__keep=9, log__every=1)
    done, _ = run(job)
    back = done.checkpoints / "epoch-0001-step-00000006"
    longer = small(tmp_path / "images", tmp_path / "run", checkpoint__every="2 steps", log__every=1, train__epochs=4)
    _, stopped = run(longer, stop_at(11), resume=str(back))
    assert stopped.steps == 11
    assert not back.exists()
    told = Told()
    run(longer, told, resume=str(back))
    assert told.of(Started)[0].progress.step == 11
    (words,) = (one.text for one in told.of(Warned) if "going on from" in one.text)
    assert "epoch-0002-step-00000011" in words
    assert "--set run.dir=NEW" in words
    other = longer.model_copy(update={"optimizer": longer.optimizer.model_copy(update={"learning_rate": 0.01})})
    with pytest.raises(InputError, match="no checkpoint at"):
        run(other, resume=str(back))


def test_one_set_aside_that_is_named_is_saved_as_the_runs_own(make_images: Make, tmp_path: Path) -> None:
    """Though it lies among them, no start counts it: a notice before the first step would else leave nothing."""
    job = small(make_images(), tmp_path / "run", checkpoint__every="2 steps", checkpoint__keep=9, log__every=1)
    done, _ = run(job)
    last = max(done.checkpoints.glob("epoch-*"))
    aside = last.rename(last.with_name(f"abandoned-{last.name}"))
    notice = tmp_path / "notice"
    notice.touch()
    longer = {"checkpoint__every": "2 steps", "checkpoint__keep": 9, "log__every": 1, "train__epochs": 4}
    asked = {"preemption__file": str(notice), "preemption__every": 0.001}
    _, stopped = run(small(tmp_path / "images", tmp_path / "run", **longer, **asked), resume=str(aside))
    assert stopped.status == "preempted"
    assert last.is_dir()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model__arguments": {"num_classes": 5}}, "another model"),
        ({"data__train": "other"}, "another data"),
        ({"data__batch_size": 8}, "data.batch_size = 4"),
        ({"train__accumulate": 2}, "train.accumulate = 1"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    make_images: Make, tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    folder, other = make_images(), make_images("other", each=9)
    done, _ = run(small(folder, tmp_path / "run"))
    before = sorted(path.name for path in done.checkpoints.iterdir())
    changes = {key: str(other) if value == "other" else value for key, value in changes.items()}
    with pytest.raises(InputError, match=what):
        run(small(folder, tmp_path / "run", **changes))
    assert sorted(path.name for path in done.checkpoints.iterdir()) == before
    assert done.status() == "finished"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for where no GPU is seen")
def test_what_a_gpu_has_trained_goes_on_without_only_if_that_is_asked_for(make_images: Make, tmp_path: Path) -> None:
    job = small(make_images(), tmp_path / "run")
    done, _ = run(job)
    *_, last = sorted(done.checkpoints.iterdir())
    state = load_checkpoint(last).state
    state["job"]["device"] = "cuda"
    shutil.rmtree(last)
    Checkpointer(done.checkpoints).save(state, state["progress"]["step"], state["progress"]["epoch"])
    longer = job.model_copy(update={"train": job.train.model_copy(update={"epochs": 3})})
    with pytest.raises(InputError, match=r"was trained on a GPU\n.*torch sees no GPU now"):
        run(longer)
    told = Told()
    _, result = run(longer.model_copy(update={"device": "cpu"}), told)
    assert result.status == "finished"
    assert told.of(Started)[0].resumed_from


def test_damaged_files_are_replaced_counted_and_named(make_images: Make, tmp_path: Path) -> None:
    folder = make_images(each=9)
    (folder / "class0/003.png").write_bytes(b"")
    (folder / "class1/text.jpg").write_text("not an image")
    hashes = set()
    for name in ("a", "b"):
        done, result = run(small(folder, tmp_path / name, data__workers=len(hashes), log__report=True))
        reasons = {Path(file["path"]).name: file["reason"] for file in result.corrupt_files}
        assert reasons["003.png"] == "the file is empty"
        assert set(reasons) == {"003.png", "text.jpg"}
        assert "text.jpg" in done.report_file.read_text()
        hashes.add(result.weights_sha256)
    assert len(hashes) == 1


def test_a_damaged_file_can_stop_the_run(make_images: Make, tmp_path: Path) -> None:
    folder = make_images()
    (folder / "class0/003.png").write_bytes(b"")
    with pytest.raises(HotloopError, match=r"003.png cannot be read") as caught:
        run(small(folder, tmp_path / "run", data__on_corrupt="raise"))
    assert caught.value.exit_code == 1
    assert Run(tmp_path / "run").status() == "failed"


def test_a_loss_that_is_not_a_number_names_step_files_and_checkpoint(make_images: Make, tmp_path: Path) -> None:
    with pytest.raises(HotloopError) as caught:
        run(small(make_images(), tmp_path / "run", model__name="tiny:exploding", log__every=3))
    assert caught.value.what == "the loss of step 1 is nan"
    assert "class" in caught.value.cause
    assert ".png" in caught.value.cause
    assert "no checkpoint" in caught.value.cause
    done = Run(tmp_path / "run")
    assert done.status() == "failed"
    assert list(done.checkpoints.iterdir()) == []


def test_weights_that_are_not_finite_never_become_a_checkpoint(make_images: Make, tmp_path: Path) -> None:
    job = small(
        make_images(), tmp_path / "run", checkpoint__every="1 step", log__every=1, optimizer__learning_rate=1e38
    )
    with pytest.raises(HotloopError, match=r"not finite|is nan|is inf"):
        run(job)
    for path in Run(tmp_path / "run").checkpoints.iterdir():
        state = load_checkpoint(path).state
        assert all(tensor.isfinite().all() for tensor in state["step"]["model"].values())


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"data__batch_size": 17}, "data.batch_size = 17 is more than the 16 samples", "data.batch_size=16"),
        ({"data__batch_size": 5}, "the last batch of 16 samples in batches of 5 has 1 sample", "last_batch=drop"),
        ({"data__last_batch": "pad"}, "would change what is trained", "last_batch=drop"),
        (
            {"data__last_batch": "pad", "model__name": "tiny:perceptron", "task__augment": {"mixup": 0.2}},
            "would change what is trained",
            "last_batch=drop",
        ),
        ({"model__name": "resnet81"}, 'unknown model "resnet81"', "resnet18"),
        ({"model__name": "tiny:cnnn"}, "tiny has no cnnn", "tiny:cnn"),
        ({"model__name": "nowhere:cnn"}, "cannot be imported", "folder that holds the module"),
        ({"model__name": "tiny:not_a_model"}, "gave a str", "return one"),
        ({"model__arguments": {"depth": 3}}, "do not fit tiny:cnn", "model.arguments"),
        ({"optimizer__name": "sdg"}, 'unknown optimizer "sdg"', "sgd"),
        ({"optimizer__arguments": {"speed": 3}}, "do not fit sgd", "optimizer.arguments"),
        ({"optimizer__arguments": {"lr": 3.0}}, "lr is not read there", "optimizer.learning_rate=3.0"),
        ({"optimizer__arguments": {"weight_decay": 0.1}}, "is not read there", "optimizer.weight_decay=0.1"),
        ({"optimizer__name": "rprop", "optimizer__weight_decay": 0.1}, "weight_decay = 0.1 with rprop", "decay=0"),
        ({"optimizer__name": "lbfgs"}, '"lbfgs" does not fit this model', "adamw"),
        ({"task__name": "tiny:cnn"}, "is no task", "hotloop.Task"),
        ({"data__train": "/nowhere"}, "no data at /nowhere", "data.train"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    make_images: Make, tmp_path: Path, changes: dict[str, Any], what: str, fix: str
) -> None:
    changes = {"task__name": "tiny:cnn", **changes} if "task__name" in changes else changes
    if "task__name" in changes:
        job = small(make_images(), tmp_path / "run")
        job = parse_job({**job.model_dump(mode="json"), "task": {"name": "tiny:cnn"}}, "job")
    else:
        job = small(make_images(), tmp_path / "run", **changes)
    with pytest.raises(InputError) as caught:
        run(job)
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(make_images: Make, tmp_path: Path) -> None:
    job = small(make_images(), tmp_path / "run").model_copy(update={"device": "cuda"})
    with pytest.raises(InputError, match="torch sees no GPU"):
        run(job)


def custom(tmp_path: Path, task: str = "tiny:Regression", **arguments: Any) -> Job:
    raw = {
        "task": {"name": task, "arguments": arguments},
        "data": {"train": "none", "batch_size": 8, "workers": 1},
        "model": {"name": "own"},
        "train": {"epochs": 30},
        "optimizer": {"learning_rate": 0.3},
        "run": {"dir": str(tmp_path / "run")},
    }
    return parse_job(raw, "job")


def test_a_task_of_ones_own_is_a_few_methods(tmp_path: Path) -> None:
    done, result = run(custom(tmp_path, samples=44, damaged=[3]))
    assert result.metrics["val_loss"] < 0.01
    assert result.steps == 30 * 6
    assert [file["path"] for file in result.corrupt_files] == ["line 3"]
    state = load_checkpoint(max(done.checkpoints.iterdir())).state
    assert state["step"]["model"]["weight"].item() == pytest.approx(2, abs=0.2)


def test_a_warm_up_longer_than_the_run_is_said(tmp_path: Path) -> None:
    raw = custom(tmp_path).model_dump(mode="json")
    told = Told()
    run(parse_job({**raw, "train": {"epochs": 1}, "schedule": {"warmup": "60 steps"}}, "job"), told)
    (text,) = [event.text for event in told.of(Warned)]
    assert "schedule.warmup takes 60 steps, the whole run 5 steps" in text
    assert "8.3 %" in text


@pytest.mark.slow
def test_a_batch_is_prepared_in_full_precision(tmp_path: Path) -> None:
    """Where a crop begins, for one, is no matter for 8 bits of mantissa."""
    job = custom(tmp_path, "tiny:Rotated")
    run(job.model_copy(update={"precision": "bf16"}))
    assert Rotated.prepared == {torch.float32}
    assert torch.bfloat16 in Rotated.forwarded


@pytest.mark.parametrize(
    ("task", "arguments", "error", "text"),
    [
        ("tiny:Regression", {"broken": 30}, HotloopError, "this sample is broken"),
        ("tiny:Regression", {"ragged": 30}, HotloopError, "inputs of sample 30 has shape"),
        ("tiny:VectorLoss", {}, HotloopError, r"the loss has shape \(8, 1\)"),
    ],
)
def test_faults_of_a_task_reach_the_user(
    tmp_path: Path, task: str, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run(custom(tmp_path, task, **arguments))
    assert Run(tmp_path / "run").status() == "failed"


def test_time_between_saves_is_not_counted_as_training(make_images: Make, tmp_path: Path) -> None:
    told = Told()
    run(small(make_images(), tmp_path / "run", checkpoint__every="1 step"), told)
    assert len(told.of(Saved)) >= 8
    seconds = [event.progress.whole.seconds for event in told.of(Logged)]
    assert seconds == sorted(seconds)


def test_every_format_trains_together(tmp_path: Path) -> None:
    for label in ("a", "b"):
        for number, suffix in enumerate((".jpg", ".png", ".webp", ".bmp", ".gif", ".JPEG")):
            write_image(tmp_path / f"mixed/{label}/{number}{suffix}", number, (40 + number, 30))
    _, result = run(small(tmp_path / "mixed", tmp_path / "run"))
    assert (result.status, result.corrupt_files) == ("finished", [])


def test_a_worker_that_is_killed_is_counted_and_changes_nothing(make_images: Make, tmp_path: Path) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, Logged) and event.progress.step == 2:
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid or 0, signal.SIGKILL)

    folder, told = make_images(), Told(kill)
    _, expected = run(small(folder, tmp_path / "whole", data__workers=1, train__epochs=4))
    _, result = run(small(folder, tmp_path / "run", data__workers=1, train__epochs=4), told)
    assert (expected.workers_replaced, result.workers_replaced) == (0, 1)
    assert result.weights_sha256 == expected.weights_sha256
    (said,) = [event.text for event in told.of(Warned) if "data worker" in event.text]
    assert "killed by signal 9 (most often for memory" in said
    assert said.endswith("replaced so far: 1")


def test_a_continued_run_says_what_changed(make_images: Make, tmp_path: Path) -> None:
    folder = make_images()
    run(small(folder, tmp_path / "run", log__every=1), stop_at(2))
    told = Told()
    run(small(folder, tmp_path / "run", log__every=1, optimizer__learning_rate=0.01, train__epochs=3), told)
    assert told.of(Started)[0].changed == ["train.epochs: 2 -> 3", "optimizer.learning_rate: 0.05 -> 0.01"]


def test_a_finished_run_keeps_the_job_it_was_trained_with(make_images: Make, tmp_path: Path) -> None:
    folder = make_images()
    done, first = run(small(folder, tmp_path / "run"))
    before = done.job_file.read_text()
    told = Told()
    _, again = run(small(folder, tmp_path / "run", optimizer__learning_rate=0.01, train__epochs=1), told)
    assert again == first
    assert done.job_file.read_text() == before
    assert "has finished its 2 epochs" in told.of(Warned)[0].text


def test_a_run_directory_that_cannot_be_written_any_more_fails_in_words(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small(make_images(), tmp_path / "run", log__every=1)
    run(job, stop_at(2))

    def full(self: Run, *_: object) -> None:
        raise OSError(28, "No space left on device", str(self.job_file))

    monkeypatch.setattr(Run, "write_start", full)
    with pytest.raises(HotloopError) as caught:
        run(job)
    assert "cannot write" in caught.value.what
    assert "free some space" in caught.value.fix
    assert caught.value.exit_code == 1


def test_a_run_whose_directory_has_gone_says_so(make_images: Make, tmp_path: Path) -> None:
    def move(event: Event) -> None:
        if isinstance(event, Logged) and event.progress.step == 3:
            (tmp_path / "run").rename(tmp_path / "elsewhere")

    with pytest.raises(HotloopError, match="run has gone"):
        run(small(make_images(), tmp_path / "run", log__every=1), Told(move))
    assert not (tmp_path / "run").exists()


def test_events_that_cannot_be_written_at_the_end_do_not_hide_it(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = TensorBoard.close

    def full(self: TensorBoard) -> None:
        close(self)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "close", full)
    told = Told()
    _, result = run(small(make_images(), tmp_path / "run", log__tensorboard=True, train__epochs=1), told)
    assert result.status == "finished"
    assert "TensorBoard's events are not complete: [Errno 28]" in told.of(Warned)[-1].text


@pytest.mark.parametrize("kind", ["import", "arguments", "abstract"])
def test_a_task_that_cannot_be_made_is_bad_input(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty.py").write_text("import hotloop\nclass Half(hotloop.Task):\n    pass\n")
    (tmp_path / "syntax.py").write_text("def x(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    task = {"import": "syntax:X", "arguments": "tiny:Regression", "abstract": "faulty:Half"}[kind]
    with pytest.raises(InputError) as caught:
        run(custom(tmp_path, task, **({"job": 3} if kind == "arguments" else {})))
    expected = {"import": "SyntaxError", "arguments": "multiple values", "abstract": "abstract"}[kind]
    assert expected in caught.value.cause


@pytest.mark.slow
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])
def test_a_validation_batch_that_does_not_fit_is_looked_at_in_pieces(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    from hotloop.tasks.images import ImageClassification

    changes = {"data__val_batch_size": 7, "train__epochs": 1}
    _, whole = run(small(make_images(), tmp_path / "whole", **changes))
    forward, sizes = ImageClassification.forward, []

    def short_of_memory(self: Any, model: Any, batch: Any) -> Any:
        sizes.append(len(batch["images"]))
        if not model.training and sizes[-1] > 3:
            raise error
        return forward(self, model, batch)

    monkeypatch.setattr(ImageClassification, "forward", short_of_memory)
    told = Told()
    _, result = run(small(make_images(), tmp_path / "run", **changes), told)
    assert result.metrics == pytest.approx(whole.metrics, rel=1e-5)
    warnings = [event.text for event in told.of(Warned)]
    assert warnings == [f"out of memory in validation; each batch is now looked at in {n} pieces" for n in (2, 4)]


def test_checkpoints_closer_together_than_they_take_are_told_once(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[Path, float] = {}

    def slow(saved: saving.Saved) -> bool:
        return time.monotonic() > asked.setdefault(saved.path, time.monotonic()) + 1.1

    monkeypatch.setattr(saving.Saved, "done", slow)
    told = Told()
    run(small(make_images(), tmp_path / "run", train__epochs=1, checkpoint__every="1 steps"), told)
    said = [event.text for event in told.of(Warned) if "until the checkpoint before was written" in event.text]
    assert len(said) == 1
    assert "longer than from one to the next" in said[0]


def test_layers_that_a_task_froze_stay_frozen_through_validation(make_images: Make, tmp_path: Path) -> None:
    from hotloop.train import prepare

    seen: list[bool] = []
    original = prepare._make_model

    def frozen(*arguments: Any) -> Any:
        model = original(*arguments)
        model[1].eval()
        model.register_forward_pre_hook(lambda module, args: seen.append(module[1].training))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "_make_model", frozen)
        run(small(make_images(), tmp_path / "run"))
    assert seen
    assert not any(seen)


def test_a_run_learns_how_often_it_is_interrupted(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[History] = []

    class Schedule(SaveSchedule):
        def __init__(self, *arguments: Any, history: History) -> None:
            known.append(history)
            super().__init__(*arguments, history=history)

    def fail(event: Event) -> None:
        if isinstance(event, Logged) and event.progress.step == 3:
            raise ValueError("as a GPU that has fallen off the bus")

    monkeypatch.setattr("hotloop.train.loop.SaveSchedule", Schedule)
    job = small(make_images(), tmp_path / "run", log__every=1)
    done, _ = run(job, stop_at(2))
    with pytest.raises(ValueError, match="fallen"):
        run(job, Told(fail))
    run(job)
    run(small(tmp_path / "images", tmp_path / "run", log__every=1, train__epochs=3))
    assert [history.interruptions for history in known] == [0, 1, 2, 2], "the end of all epochs is none"
    assert 0 < known[1].seconds < known[3].seconds < 600
    assert read_history(done.starts_file) == known[-1]


def test_memory_for_checkpoints_is_there_before_the_first_step(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotloop.train.checkpoint import staging

    taken: list[int] = []
    told = Told()

    class Noted(HostMemory):
        def __init__(self, size_bytes: int, locked: bool, warn: Callable[[str], None]) -> None:
            taken.append(len(told.of(Logged)))
            super().__init__(size_bytes, locked, warn)

    monkeypatch.setattr(staging, "HostMemory", Noted)
    large = {"model__name": "tiny:broad", "checkpoint__background": True, "optimizer__name": "adamw", "log__every": 1}
    run(small(make_images(), tmp_path / "run", checkpoint__every="2 steps", **large), told)
    assert len(told.of(Saved)) > 1
    assert taken == [0], "once, before a step was logged"
    run(small(make_images(), tmp_path / "other", checkpoint__every="2 epochs", **large), told)
    assert taken[1:] == [len(told.of(Logged))], "by the save at the end, as there is no other"


def test_the_stall_of_a_save_counts_all_that_training_waits_for(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks compare takes 5 s here, by a clock that stands still elsewhere."""
    now = 0.0

    def compare(self: SlowRanks) -> None:
        nonlocal now
        now += 5.0

    stands = SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr("hotloop.train.loop.time", stands)
    monkeypatch.setattr(SlowRanks, "compare", compare)
    told = Told()
    run(small(make_images(), tmp_path / "run", checkpoint__every="4 steps", train__epochs=1), told)
    assert {(saved.stalled_seconds, saved.seconds) for saved in told.of(Saved)} == {(5.0, 5.0)}


class NoLocking:
    """CUDA's runtime where memory cannot be locked."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815, CUDA's name

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        return 304

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return {304: "OS call failed"}[code]


def test_memory_that_cannot_be_locked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", NoLocking)
    monkeypatch.setattr(torch, "zeros", lambda *_, **named: None)
    told: list[str] = []
    memory = HostMemory(3 << 20, locked=True, warn=told.append)
    memory.bytes[-1] = 1
    memory.close()
    [line] = told
    assert "memory for checkpoints cannot be page-locked (3.0 MiB, OS call failed)" in line
    assert "ulimit -l" in line


def stopped_at_batch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The wait for that batch is ended by a request to stop."""
    next_batch, count = Loop._next_batch, itertools.count()

    def ended(self: Loop) -> Any:
        if next(count) == number:
            raise StopRequested
        return next_batch(self)

    monkeypatch.setattr(Loop, "_next_batch", ended)


def test_a_stop_within_a_steps_batches_leaves_nothing_of_them(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running statistics and what dropout draws: the next start does these batches again."""
    folder = make_images(each=9)
    settings = {"train__accumulate": 3, "model__arguments": {"dropout": 0.5}, "train__epochs": 3}
    _, through = run(small(folder, tmp_path / "through", **settings))
    job = small(folder, tmp_path / "stopped", **settings)
    with monkeypatch.context() as patched:
        stopped_at_batch(patched, 7)  # 5 an epoch, in steps of 3 and 2
        _, first = run(job)
    assert (first.status, first.steps) == ("preempted", 2)
    _, second = run(job)
    assert second.weights_sha256 == through.weights_sha256


def test_a_start_that_does_nothing_writes_no_checkpoint_again(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small(make_images(), tmp_path / "run")
    done, _ = run(job, stop_at(2))
    [saved] = done.checkpoints.iterdir()
    before = saved.stat().st_ino
    with monkeypatch.context() as patched:
        stopped_at_batch(patched, 0)
        _, again = run(job)
    assert (again.status, again.steps) == ("preempted", 2)
    assert [(path.name, path.stat().st_ino) for path in done.checkpoints.iterdir()] == [(saved.name, before)]
    _, last = run(job)
    assert last.status == "finished"


def test_a_training_that_fails_has_the_checkpoint_that_it_had_begun(
    make_images: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy was still on the way from the GPU."""
    failed = False

    def fail(event: Event) -> None:
        nonlocal failed
        if isinstance(event, Logged) and event.progress.step == 6:
            failed = True
            raise ZeroDivisionError

    monkeypatch.setattr(Staged, "ready", lambda self: failed)
    changes = {"checkpoint__background": True, "checkpoint__every": "1 epoch", "model__name": "tiny:wide"}
    with pytest.raises(ZeroDivisionError):
        run(small(make_images(), tmp_path / "run", **changes), Told(fail))
    assert [path.name for path in Run(tmp_path / "run").checkpoints.iterdir()] == ["epoch-0001-step-00000004"]
