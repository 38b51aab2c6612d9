"""Where the steps of somebody's training end."""

from importlib import import_module
from typing import Any

import pytest
import torch

from hotloop.attach.steps import StepFinder


class Broken:
    """Cannot follow."""

    def began(self, device: Any, optimizer: Any) -> None:
        raise ValueError("no such device")

    def stepped(self) -> None:
        raise AssertionError("told all the same")

    def changed(self) -> None:
        raise AssertionError("told all the same")


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_training_that_cannot_be_followed_goes_on(capsys: pytest.CaptureFixture[str], by_hand: bool) -> None:
    weight = torch.ones(1, requires_grad=True)
    seen: list[int] = []
    optimizer = torch.optim.SGD([weight], lr=0.01)
    finder = StepFinder(torch, Broken())
    other = import_module("torch.optim.optimizer").register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        for _ in range(30):
            (2 * weight).sum().backward()  # type: ignore[no-untyped-call]
            if not by_hand:
                optimizer.step()
    finally:
        other.remove()
        finder.stop()
    assert len(seen) == (0 if by_hand else 30), "hooks of the script's own are called"
    told = "hotloop: this training is not followed: ValueError: no such device\n"
    assert capsys.readouterr().err == told
