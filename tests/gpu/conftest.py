"""Fixtures of the tests on a GPU."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    """What one test compiled is no recompilation in the next."""
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()
