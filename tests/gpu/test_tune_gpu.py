"""Trials on a GPU."""

import json
import os
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command
from runs import RESNET_JOB

from hotloop.core.job_file import load_job, parse_job
from hotloop.tune.job_trials import JobTrials, step_seconds


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trial_that_is_forked_trains_on_the_gpu(make_images: Callable[..., Path], compiled: bool) -> None:
    images = make_images(classes=2, each=64)
    text = RESNET_JOB.format(images=images).replace('"cpu"', '"cuda"') + f"[speed]\ncompile = {json.dumps(compiled)}\n"
    job = parse_job(tomllib.loads(text), "job")
    assert 0 < step_seconds(job, os.environ) < 1


TELLING = """
from pathlib import Path
from torch import cuda, optim

def telling(parameters, lr, **rest):
    grows = cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    Path("{told}").write_text(str(grows))
    return optim.SGD(parameters, lr)
"""


@pytest.mark.parametrize("grows", [True, False])
def test_trial_and_training_have_the_allocator_that_was_asked_for(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool, hotloop: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "told"
    Path("telling.py").write_text(TELLING.format(told=told))
    text = RESNET_JOB.format(images=make_images(classes=2, each=64)).replace('"cpu"', '"cuda"')
    Path("job.toml").write_text(text)
    own = "optimizer.name=telling:telling"
    job = load_job(Path("job.toml"), [own])
    with JobTrials(job, os.environ) as trials, trials({"expandable_segments": grows}) as running:
        next(running.chunks(time.monotonic() + 60))
    assert told.read_text() == str(grows)
    told.unlink()
    Path("tuned.toml").write_text(f"[job]\n[process]\nexpandable_segments = {str(grows).lower()}\n")
    hotloop("train", "job.toml", "--settings", "tuned.toml", "--set", own, "--set", "train.epochs=1", expect=0)
    assert told.read_text() == str(grows)


SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(1024), index % 4

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Slow(), 8)
    for epoch in range({epochs}):
        for features, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features.cuda()), labels.cuda()).backward()
            optimizer.step()
    print("trained", epoch)
"""


def test_a_scripts_settings_are_found_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hotloop: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("train.py")
    file.write_text(SCRIPT.format(epochs=1000))
    tuned = ["tune", "--level", "fast", "--budget", "90s", "--json", "--", sys.executable, "train.py"]
    found = json.loads(hotloop(*tuned, expect=0, timeout=300).out)
    assert found["best"]["workers"] >= 1
    assert found["ratio"] > 2
    file.write_text(SCRIPT.format(epochs=1))
    options = ["--settings", "tuned.toml", "--json-summary", "summary.json"]
    assert "trained 0" in hotloop("run", *options, "--", sys.executable, "train.py", expect=0, timeout=300).out
    told = json.loads(Path("summary.json").read_text())
    assert {"loader"} <= {one["name"] for one in told["accelerations"] if one["state"] == "on"}
