"""Fixtures of the tests on a GPU."""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.core.environment import for_training

os.environ.update(for_training(os.environ))  # as in `hotloop train`: read when the GPU is first used


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests run side by side, but for those that time what the GPU does: they are marked `alone`."""
    alone = request.node.get_closest_marker("alone")
    with (Path(tempfile.gettempdir()) / "hotloop-tests-gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    """What one test compiled is no recompilation in the next."""
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()
