"""A run that is disturbed ends as if it never was: a few faults here; `python tests/faults/run.py` for hundreds."""

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


@pytest.mark.slow
def test_a_disturbed_run_ends_with_the_same_bits(digits: Path, request: pytest.FixtureRequest) -> None:
    trials = request.config.getoption("--kills")
    found = run_trials({"killed": trials, "damaged": 1}, digits, settings=["one"])
    assert [one.notes for one in found.values()] == [[], []]
    assert found["killed"].trials == trials
