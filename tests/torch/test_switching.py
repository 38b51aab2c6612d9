"""Which accelerations `hotloop run` switches on and keeps, by steps whose times are given."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hotloop.accelerate.plan import Plan
from hotloop.accelerate.ranks import Ranks
from hotloop.accelerate.runner import Runner, Step
from hotloop.accelerate.training import Training
from hotloop.core.speedup import ON, UNFIT, Acceleration


class Script:
    """A training of which only the times of its steps are known.

    Args:
        step: the next one's.
    """

    def __init__(self, plan: Plan, folder: Path, step: Callable[[Runner], Step]) -> None:
        self.runner = Runner(plan, folder)
        self.loading = self.runner._loading
        self.loading.install()
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.training = Training(plan, Ranks(), torch.device("cpu"), optimizer)
        self._step = step

    def run(self) -> dict[str, Acceleration]:
        """All that is tried."""
        batches = iter(DataLoader(TensorDataset(torch.ones(4000)), 1))
        run = self.runner._accelerate(self.training)
        wanted = next(run)
        while True:
            steps = []
            for _ in range(wanted):
                next(batches)
                steps.append(self._step(self.runner))
            try:
                wanted = run.send(steps)
            except StopIteration:
                return self.runner._told


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[Plan, Callable[[Runner], Step]], Script]]:
    made: list[Script] = []

    def make(plan: Plan, step: Callable[[Runner], Step]) -> Script:
        made.append(Script(plan, tmp_path, step))
        return made[-1]

    yield make
    for each in made:
        each.loading.remove()


@pytest.mark.parametrize(("asked", "state"), [(True, ON), (False, UNFIT)])
def test_what_was_asked_for_is_used_however_little_it_seems_to_bring(
    script: Callable[[Plan, Callable[[Runner], Step]], Script], asked: bool, state: str
) -> None:
    """Steps that hardly wait for batches, and are slower with workers."""
    plan = Plan(("loader",), workers=1, measure=False, asked=asked)
    told = script(plan, lambda runner: Step(2.0 if runner._loading.how else 1.0, 0.001)).run()
    assert (told["loader"].state, told["loader"].gain) == (state, None)
