"""What a training says of itself while it goes on."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from test_training import Told, run, small

from hotloop.core.live import FOLDER, Live, Publisher, read_live
from hotloop.train.observer import Event, Logged, Saved, Validated


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "live"))
    return tmp_path / "live"


def test_a_training_is_published_while_it_goes_on(
    make_images: Callable[..., Path], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.core.live._SECONDS", 0.0)  # else a training of a second is seen but once
    seen: list[tuple[Event, Live]] = []

    def look(event: Event) -> None:
        if isinstance(event, Logged | Validated | Saved):
            seen.extend((event, live) for live in read_live(folder).processes)

    job = small(make_images(), tmp_path / "run", train__epochs=3, checkpoint__every="1 epochs", log__every=1)
    done, result = run(job, Told(look))
    assert read_live(folder).processes == (), "who trains no more is gone"
    assert list(folder.iterdir()) == []
    lives = [live for _, live in seen]
    assert {(live.way, live.job, live.run, live.rank, live.ranks, live.gpu) for live in lives} == {
        ("train", "small", str(done.directory), 0, 1, "")
    }
    steps = [live.step for live in lives]
    assert steps == sorted(steps)
    assert steps[-1] == result.steps == 12
    last = lives[-1]
    assert 0 < last.steps <= 12
    assert last.samples == 4 * last.steps
    assert 0 <= last.wait_seconds < last.step_seconds <= result.train_seconds * 1.01
    assert last.loss is not None
    assert set(last.metrics) == {"val_accuracy", "val_loss"}
    assert {live.phase for live in lives} >= {"step", "validating"}
    assert last.saves >= 2
    assert last.saved >= last.begun > 0


def test_without_a_folder_a_run_trains_alike(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = make_images()
    hashes = []
    for number, asked in enumerate(("off", "/proc/nowhere", str(tmp_path / "live"))):
        monkeypatch.setenv(FOLDER, asked)
        hashes.append(run(small(images, tmp_path / f"run-{number}"))[1].weights_sha256)
    assert len(set(hashes)) == 1


def test_phases_are_told_when_they_begin_and_totals_whatever_is_logged(
    make_images: Callable[..., Path], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.core.live._SECONDS", 0.0)
    told: list[Live] = []
    write = Publisher.write

    def look(publisher: Publisher) -> None:
        write(publisher)
        told.extend(read_live(folder).processes)

    monkeypatch.setattr(Publisher, "write", look)
    run(small(make_images(), tmp_path / "run", train__epochs=2, checkpoint__every="1 epochs", log__every=1000))
    phases = [phase for phase, _ in groupby("step" if live.phase == "loading" else live.phase for live in told)]
    assert phases == ["starting", "step", "validating", "saving", "step", "validating", "saving", "ending"]
    steps = [live.steps for live in told]
    assert steps == sorted(steps)
    assert set(steps) == set(range(9)), "each step, though none was logged by itself"
    assert [live.samples for live in told] == [4 * live.steps for live in told]
