import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from hotloop.core.job import ScheduleSection
from hotloop.train.schedule import make_schedule


def torchs(
    scheduler: type[lr_scheduler.LRScheduler], steps: int, rate: float = 1.0, **arguments: object
) -> list[float]:
    """Learning rates of torch's own scheduler, step by step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule = scheduler(optimizer, **arguments)  # type: ignore[arg-type]
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own use of what it deprecates
            schedule.step()
    return rates


def ours(steps: int, per_epoch: int = 1, **keys: object) -> list[float]:
    schedule = make_schedule(ScheduleSection.model_validate(keys), steps, per_epoch)
    return [schedule(step) for step in range(steps)]


@given(st.integers(2, 60), st.floats(0, 0.5))
def test_cosine_is_torchs(steps: int, final: float) -> None:
    expected = torchs(lr_scheduler.CosineAnnealingLR, steps, T_max=steps, eta_min=final)
    assert ours(steps, name="cosine", final=final) == pytest.approx(expected, abs=1e-9)


@given(st.integers(2, 60), st.integers(1, 20), st.floats(0.1, 0.9))
def test_step_is_torchs(steps: int, every: int, factor: float) -> None:
    expected = torchs(lr_scheduler.StepLR, steps, step_size=every, gamma=factor)
    assert ours(steps, name="step", every=f"{every} steps", factor=factor) == pytest.approx(expected, abs=1e-9)


def test_one_cycle_rises_and_falls_as_torchs_does() -> None:
    arguments = {"max_lr": 1.0, "total_steps": 200, "pct_start": 0.3, "final_div_factor": 1e9, "cycle_momentum": False}
    expected = torchs(lr_scheduler.OneCycleLR, 200, rate=1 / 25, **arguments)
    assert ours(200, name="one-cycle") == pytest.approx(expected, abs=0.02)  # torch's peak comes one step earlier


@given(st.integers(1, 30), st.integers(31, 90))
def test_warm_up_is_linear_and_then_the_curve_begins_at_its_top(warmup: int, steps: int) -> None:
    rates = ours(steps, name="cosine", warmup=f"{warmup} steps")
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert rates[warmup] == pytest.approx(1.0)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_epochs_are_counted_in_steps() -> None:
    assert ours(9, per_epoch=3, name="step", every="1 epoch", factor=0.5) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_constant_is_constant() -> None:
    assert set(ours(7, name="constant")) == {1.0}
