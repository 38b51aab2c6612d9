"""Which accelerations `hotloop run` switches on and keeps, by steps whose times are given."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets, transforms

from hotloop.accelerate.pace import Step, Stock
from hotloop.accelerate.plan import Plan
from hotloop.accelerate.ranks import Ranks
from hotloop.accelerate.runner import Runner
from hotloop.accelerate.training import Training
from hotloop.core.speedup import ON, UNDONE, UNFIT, Acceleration


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
        self.loader: DataLoader[object] = DataLoader(TensorDataset(torch.ones(4000)), 1)

    def run(self) -> dict[str, Acceleration]:
        """All that is tried."""
        batches = iter(self.loader)
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


def test_a_trial_begins_with_its_settings(script: Callable[[Plan, Callable[[Runner], Step]], Script]) -> None:
    """Its time is short: what steps took without them is known from another trial."""
    plan = Plan(("loader",), workers=1, measure=False, asked=True, tell=True, steps=5)
    one, steps = script(plan, lambda runner: Step(1.0, 0.001)), 0
    batches = iter(DataLoader(TensorDataset(torch.ones(4000)), 1))
    run = one.runner._accelerate(one.training)
    wanted = next(run)
    while not one.loading.how:
        for _ in range(wanted):
            next(batches)
        steps += wanted
        wanted = run.send([Step(1.0, 0.001)] * wanted)
    assert steps == 3
    run.close()


@pytest.mark.parametrize(
    ("plan", "faster", "windows"),
    [
        (Plan(("loader",)), 0.6, 1),
        (Plan(("loader",)), 0.01, 2),
        (Plan(("loader",), steps=20), 0.01, 2),
        (Plan(("loader",), measure=False), 0.01, 1),
    ],
)
def test_a_gain_is_timed_once_more_unless_it_halves_a_step(
    script: Callable[[Plan, Callable[[Runner], Step]], Script], plan: Plan, faster: float, windows: int
) -> None:
    """Steps of 1.0 and 1.4 s by turns."""
    made, seen = 0, []

    def step(runner: Runner) -> Step:
        nonlocal made
        made += 1
        on = runner._loading.how is not None
        return Step((1.2 + 0.2 * (-1) ** made) * (1 - faster * on), 0.5)

    one = script(plan, step)
    original = one.runner._window

    def window(training: Training, number: int) -> object:
        seen.append(one.loading.how is not None)
        return original(training, number)

    one.runner._window = window  # type: ignore[assignment, method-assign]
    told = one.run()["loader"]
    assert (told.state, sum(seen)) == (ON, windows)
    if plan.measure:
        assert told.gain == pytest.approx(faster, abs=0.05)


class Counted:
    """A switch that tells whether it is on, and how often it has been turned."""

    name, count = "allocator", 0

    def __init__(self) -> None:
        self.turned = 0

    def unfit(self, training: Training) -> str:
        return ""

    def switch_on(self, training: Training) -> None:
        self.turned += 1

    def switch_off(self) -> None:
        self.turned += 1

    @property
    def is_on(self) -> bool:
        return self.turned % 2 == 1


@pytest.mark.parametrize("turn", [1, 2, 3])
@pytest.mark.parametrize("pace", [0.9, 1.5])
@pytest.mark.parametrize("with_it", [0.6, 1.0])
def test_another_pace_of_the_machine_is_no_gain(
    script: Callable[[Plan, Callable[[Runner], Step]], Script], tmp_path: Path, with_it: float, pace: float, turn: int
) -> None:
    """Other programs begin, or end, as the switch is turned for the first, second or third time."""
    switch = Counted()

    def step(runner: Runner) -> Step:
        return Step((pace if switch.turned >= turn else 1.0) * (with_it if switch.is_on else 1.0), 0.0)

    one = script(Plan(("allocator",)), step)
    one.runner._switches["allocator"] = switch
    told = one.run()["allocator"]
    one.runner._write(one.training)
    found = json.loads(next(tmp_path.glob("speedup-*.json")).read_text())
    ratio = found["before_seconds"] / found["after_seconds"]
    assert switch.is_on == (told.state == ON)
    assert ratio == pytest.approx(1 / with_it, rel=1e-3)
    assert told.state == UNDONE or told.gain == pytest.approx(1 - with_it, abs=1e-3)


@pytest.mark.parametrize(("compiled", "state"), [(0.5, ON), (0.9, UNDONE)])
def test_what_was_no_use_to_long_steps_is_tried_on_those_that_are_much_shorter(
    script: Callable[[Plan, Callable[[Runner], Step]], Script], compiled: float, state: str
) -> None:
    """The first makes a step 3 % longer, as long as that computes for more than 0.7 s."""
    early, late = Counted(), Counted()

    def step(runner: Runner) -> Step:
        computes, loads = (compiled if late.is_on else 1.0), (0.2 if early.is_on else 0.7)
        return Step(max(computes, loads) + 0.03 * early.is_on, 0.0)

    one = script(Plan(("allocator", "compile")), step)
    one.runner._switches |= {"allocator": early, "compile": late}
    told = one.run()
    assert (told["allocator"].state, early.is_on) == (state, state == ON)
    assert told["compile"].state == ON


def test_it_ended_before_anything_was_timed(
    script: Callable[[Plan, Callable[[Runner], Step]], Script], tmp_path: Path
) -> None:
    one = script(Plan(("allocator",)), lambda runner: Step(1.0, 0.0))
    one.runner._switches["allocator"] = Counted()
    run = one.runner._accelerate(one.training)
    wanted = next(run)
    while not one.runner._told:
        wanted = run.send([Step(1.0, 0.0)] * wanted)
    one.runner._write(one.training)
    found = json.loads(next(tmp_path.glob("speedup-*.json")).read_text())
    assert (found["before_seconds"], found["after_seconds"]) == (pytest.approx(1.0, rel=1e-3), 0.0)
    run.close()


def test_a_stock_from_before_is_no_gain(script: Callable[[Plan, Callable[[Runner], Step]], Script]) -> None:
    """Workers make a batch in two seconds, as the script does, and had made 40 before they are timed."""
    begun = 0

    def stock() -> Stock:
        nonlocal begun
        if not one.loading.how:
            return Stock()
        begun = begun or one.loading.taken
        taken = one.loading.taken - begun
        return Stock(max(0, 40 - taken // 2), 2, taken, 2, number=1)

    one = script(Plan(("loader",), workers=2), lambda runner: Step(1.0 if stock().ready else 2.0, 0.5))
    one.loading.stock = stock  # type: ignore[method-assign]
    told = one.run()["loader"]
    assert told.gain == pytest.approx(0.0, abs=0.05)


def photographs(folder: Path, workers: int) -> DataLoader[object]:
    (folder / "class").mkdir()
    Image.new("RGB", (20, 20), (200, 100, 50)).save(folder / "class" / "a.jpg")
    crops = transforms.Compose([transforms.RandomResizedCrop(8), transforms.ToTensor()])
    data = datasets.ImageFolder(str(folder), crops)
    data.samples *= 4000
    return DataLoader(data, 1, num_workers=workers)


@pytest.mark.parametrize(
    ("busy", "workers", "measure", "faster", "state"),
    [
        (0.9, 1, True, 0.1, ON),
        (0.9, 1, True, -0.01, UNDONE),  # what is kept elsewhere, as it may be chance
        (0.2, 1, True, 0.1, UNFIT),
        (0.9, 0, True, 0.1, UNFIT),
        (0.9, 1, False, 0.1, UNFIT),
    ],
)
def test_images_of_busy_workers_are_tried_though_nothing_waits_and_kept_if_that_helps(
    script: Callable[[Plan, Callable[[Runner], Step]], Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    busy: float, workers: int, measure: bool, faster: float, state: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("hotloop.attach.activity.Activity.workers_busy", lambda self, workers: busy)
    plan = Plan(("image_folder",), measure=measure)
    one = script(plan, lambda runner: Step(1 - faster * runner._batches.images, 0.001))
    one.loader = photographs(tmp_path, workers)
    one.loading.stock = Stock  # type: ignore[method-assign]
    told = one.run()["image_folder"]
    assert told.state == state
    assert one.runner._batches.images == (state == ON)
