"""Runs the command as a user does: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import Command, Finished

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def hotloop(tmp_path: Path) -> Command:
    """Runs `hotloop ARGUMENTS` in an empty folder."""

    def call(*arguments: str, expect: int | None = None, timeout: float = 120) -> Finished:
        environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": str(SUPPORT)}
        child = subprocess.run(
            [sys.executable, "-W", "error", "-m", "hotloop", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=timeout,
        )
        finished = Finished(child.returncode, child.stdout, child.stderr)
        assert expect in (None, finished.code), finished
        return finished

    return call
