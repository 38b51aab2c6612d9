"""A run that is disturbed ends as if it never was: a few faults here; `python tests/faults/run.py` for hundreds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults.run import REPOSITORY, run_trials, went_back

_WHILE_IT_TRAINS = 25
"""A seed with which a first and a second SIGTERM come after steps 62 and 49 of 184."""


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, REPOSITORY / "examples/digits/make_images.py", folder], check=True, timeout=120)
    return folder


@pytest.mark.slow
def test_a_disturbed_run_ends_with_the_same_bits(digits: Path, request: pytest.FixtureRequest) -> None:
    trials = request.config.getoption("--kills")
    found = run_trials({"killed": trials, "damaged": 1}, digits, settings=["one"])
    assert [one.notes for one in found.values()] == [[], []]
    assert found["killed"].trials == trials


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line", "changed", "found"),
    [
        ("checkpoint/checkpointer", "        loaded, damaged = _newest(", "        return None\n{}", "lost"),
        ("preemption", "        return self._reason\n", '        return ""\n', "errors"),
        ("loop", "                self._save_and_wait()\n", "", "errors"),
    ],
    ids=["goes on from nothing", "hears no signal", "stops without a save"],
)
def test_faults_that_a_training_might_have_are_found(
    digits: Path, tmp_path: Path, module: str, line: str, changed: str, found: str
) -> None:
    """Each of these trains to the same bits in the end."""
    source = shutil.copytree(REPOSITORY / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = source / f"hotloop/train/{module}.py"
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, changed.format(line)))
    trials = run_trials({"terminated": 2}, digits, seed=_WHILE_IT_TRAINS, settings=["one"], source=source)
    assert getattr(trials["terminated"], found) == 2, trials["terminated"].notes


@pytest.mark.parametrize(
    ("again", "told"),
    [
        ("continuing at step 10 from run/checkpoints/epoch-0000-step-00000010\nstep 11  loss 2.0", ""),
        ("continuing at step 5 from run/checkpoints/epoch-0000-step-00000005\nstep 6  loss 2.0", "went on from step 5"),
        ("step 1  loss 2.3", "went on from step 0"),
    ],
)
def test_ranks_that_go_back_are_found(again: str, told: str) -> None:
    steps = "\n".join(f"step {number}  loss 2.1" for number in range(1, 13))
    err = f"run run\n{steps}\nsaved run/checkpoints/epoch-0000-step-00000010 in 9 ms\nrun run\n{again}\n"
    assert told in went_back(err)
    assert bool(told) == bool(went_back(err))
