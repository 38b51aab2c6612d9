"""A run that is killed anywhere ends as if it never was: a handful of kills here, `--kills 50` before a release."""

import subprocess
import sys
from pathlib import Path

import pytest
from faults.run import REPOSITORY, run_trials


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, REPOSITORY / "examples/digits/make_images.py", folder], check=True, timeout=120)
    return folder


def test_a_killed_run_ends_with_the_same_bits(digits: Path, request: pytest.FixtureRequest) -> None:
    trials = request.config.getoption("--kills")
    faults = run_trials(trials, digits)
    assert (faults.trials, faults.mismatches, faults.hangs, faults.lost, faults.errors) == (trials, 0, 0, 0, 0)
