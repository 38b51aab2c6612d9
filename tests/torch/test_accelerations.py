"""What `hotloop run` puts between a script and torch: the same batches and gradients, and all of it taken back."""

import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, UnidentifiedImageError
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from hotloop.accelerate.forward import Bf16, ChannelsLast, Forward
from hotloop.accelerate.guard import Guard
from hotloop.accelerate.image_folder import Images, recipe_of
from hotloop.accelerate.lanes import How
from hotloop.accelerate.loading import Loading, _may_stay
from hotloop.accelerate.plan import Plan
from hotloop.accelerate.ranks import Ranks
from hotloop.accelerate.switches import FusedOptimizer, ZeroGrad
from hotloop.accelerate.training import Training, models_seen
from hotloop.accelerate.waiting import Batches, LoaderWorkers


class Numbers(Dataset[int]):
    def __init__(self, count: int, bad: int = -1) -> None:
        self.count = count
        self.bad = bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index == self.bad and torch.utils.data.get_worker_info():
            raise ValueError("not in a worker")
        return index


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def loading(failures: list[str]) -> Iterator[Loading]:
    made = Loading(failures.append)
    made.install()
    yield made
    made.remove()


def a_loader(count: int = 40, workers: int = 0, bad: int = -1, seed: int = 0, **options: Any) -> DataLoader[int]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Numbers(count, bad), 3, shuffle=True, num_workers=workers, generator=generator, **options)


def expected(passes: int, **options: Any) -> list[list[int]]:
    loader = a_loader(**options)
    return [[number for batch in loader for number in batch.tolist()] for _ in range(passes)]


def with_a_function(numbers: list[int]) -> Any:
    """What cannot be sent from process to process."""
    return numbers, lambda: numbers


def settings_of(how: How, loader: Any) -> How:
    return how


HOWS = [None, How(0, 2, False), How(1, 2, False), How(2, 3, False)]


# Of workers that end while they begin, torch's queues complain in a thread of theirs.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 13), st.sampled_from(HOWS)), max_size=3),
    st.sampled_from([0, 1]), st.booleans(),
)  # fmt: skip
def test_batches_keep_their_order_whenever_they_are_made_otherwise(
    switches: list[tuple[int, How | None]], workers: int, persistent: bool
) -> None:
    """Every sample once, in each of three passes, and the script's generator as without us."""
    options: dict[str, Any] = {"workers": workers, "persistent_workers": persistent and workers > 0}
    plain = expected(3, **options)
    failed: list[str] = []
    loading = Loading(failed.append)
    loading.install()
    try:
        loader, found, at = a_loader(**options), [], 0
        for _ in range(3):
            found.append([])
            for batch in loader:
                found[-1] += batch.tolist()
                for when, how in switches:
                    if when == at:
                        loading.set_how(partial(settings_of, how) if how else None)
                at += 1
        assert found == plain
        assert failed == []
    finally:
        loading.remove()


def test_what_a_lane_cannot_make_comes_from_the_script_in_its_place(loading: Loading, failures: list[str]) -> None:
    plain = expected(1, bad=17)
    loading.set_how(lambda loader: How(2, 2, False))
    loader = a_loader(bad=17)
    assert [[number for batch in loader for number in batch.tolist()]] == plain
    assert len(failures) == 1
    assert "not in a worker" in failures[0]


def test_workers_stay_for_the_next_pass_unless_the_data_set_has_changed(loading: Loading) -> None:
    loading.set_how(lambda loader: How(1, 2, False))
    loader = a_loader(workers=1, persistent_workers=True)

    def worker() -> int:
        seen = iter(loader)
        found = seen._workers[0].pid
        for _ in seen:
            pass
        return int(found)

    first = worker()
    assert worker() == first
    loader.dataset.count = 30  # type: ignore[attr-defined]
    assert worker() != first


def test_a_data_set_of_the_scripts_own_gets_new_workers_in_each_pass() -> None:
    """What it reads besides itself, globals say, may have changed."""
    assert not _may_stay(a_loader())
    assert _may_stay(a_loader(workers=1, persistent_workers=True))
    assert _may_stay(DataLoader(torch.utils.data.TensorDataset(torch.ones(4)), 2))


def test_an_open_file_is_not_shared_with_workers(loading: Loading, tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(range(40)))
    with (tmp_path / "numbers").open("rb") as file:

        class InFile(Numbers):
            def __getitem__(self, index: int) -> int:
                assert torch.utils.data.get_worker_info() is None
                file.seek(index)
                return file.read(1)[0]

        dataset = InFile(40)
        dataset.file = file  # type: ignore[attr-defined]
        loading.set_how(lambda loader: How(2, 2, False))
        assert [n for batch in DataLoader(dataset, 4) for n in batch.tolist()] == list(range(40))


def test_a_batch_that_cannot_be_sent_comes_all_the_same(
    loading: Loading, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.accelerate.lanes._PATIENCE_SECONDS", 1.0)
    loading.set_how(lambda loader: How(1, 2, False))
    loader = DataLoader(Numbers(6), 2, collate_fn=with_a_function)
    assert [numbers for numbers, _ in loader] == [[0, 1], [2, 3], [4, 5]]
    assert failures


def test_a_sampler_draws_as_often_as_without_us(loading: Loading) -> None:
    """Two loaders at once, whose orders come from one generator."""

    def orders() -> list[Any]:
        torch.manual_seed(0)
        loaders = [DataLoader(Numbers(12), 3, shuffle=True) for _ in range(2)]
        found = [(one.tolist(), other.tolist()) for one, other in zip(*loaders, strict=True)]
        return [found, torch.rand(1).item()]

    plain = orders()
    loading.set_how(lambda loader: How(2, 2, False))
    assert orders() == plain


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("workers", "count"), [(0, 12), (0, 11), (1, 12), (1, 11), (2, 12)])
def test_a_pass_that_is_left_leaves_the_next_ones_order(
    loading: Loading, how: How | None, workers: int, count: int
) -> None:
    """What torch's sampler draws at its end is drawn only where torch itself would ask for it."""

    def orders(taken: int) -> list[list[int]]:
        loader = a_loader(count, workers)
        return [
            [number for _, batch in zip(range(taken), loader, strict=False) for number in batch.tolist()]
            for _ in range(3)
        ]

    plain = [orders(taken) for taken in range(1, 5)]
    loading.set_how(partial(settings_of, how) if how else None)
    assert [orders(taken) for taken in range(1, 5)] == plain


@pytest.mark.parametrize(("workers", "count"), [(0, 30), (0, 29), (1, 30)])
def test_a_pass_that_is_left_after_a_switch_leaves_the_next_ones_order(
    loading: Loading, workers: int, count: int
) -> None:
    def orders() -> list[list[int]]:
        loader = a_loader(count, workers)
        found = []
        for left_at in range(5, 10):
            found.append([])
            for number, batch in enumerate(loader):
                found[-1] += batch.tolist()
                if number == 1:
                    loading.set_how(None if loading.how else lambda loader: How(2, 3, False))
                if number == left_at:
                    break
        return found

    loading.remove()
    loader = a_loader(count, workers)
    plain = []
    for left_at in range(5, 10):
        batches = zip(range(left_at + 1), loader, strict=False)
        plain.append([number for _, batch in batches for number in batch.tolist()])
    loading.install()
    assert orders() == plain


def test_an_error_of_the_script_comes_at_its_batch(loading: Loading, failures: list[str]) -> None:
    class Bad(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 7:
                raise ValueError("seven")
            return index

    loading.set_how(lambda loader: How(1, 2, False))
    iterator, found = iter(DataLoader(Bad(12), 2)), []
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            break
        except ValueError:
            found.append("seven")
    assert found == [[0, 1], [2, 3], [4, 5], "seven", [8, 9], [10, 11]]
    assert failures == []


def test_two_passes_at_once_have_lanes_of_their_own(loading: Loading) -> None:
    loading.set_how(lambda loader: How(1, 2, False))
    loader = DataLoader(Numbers(6), 3)
    found = [(first.tolist(), second.tolist()) for first in loader for second in loader]
    assert found == [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [3, 4, 5]), ([3, 4, 5], [0, 1, 2]), ([3, 4, 5], [3, 4, 5])]


def test_at_the_end_of_the_process_nothing_is_waited_for(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends workers by means of a new thread, for which Python 3.12 waits for ever at that time."""
    loading.set_how(lambda loader: How(1, 2, False))
    list(a_loader())
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread is started"))
        loading.leave()
    loading.remove()


LEAVES = """
import atexit, sys
import torch
from torch.utils.data import DataLoader
from hotloop.accelerate import loading as module

def as_torch_does_for_page_locked_batches(*arguments):
    lane = module._lane(*arguments)
    for worker in lane.iterator._workers:
        atexit.register(lambda worker: print("alive" if worker.is_alive() else "ended"), worker)
    return lane

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return index

loading = module.Loading(print)
loading.make_lane = as_torch_does_for_page_locked_batches
loading.install()
loading.set_how(lambda loader: module.How(2, 2, False))
for batch in DataLoader(Numbers(), 4):
    raise KeyboardInterrupt
"""


@pytest.mark.slow
def test_workers_have_ended_when_torch_would_wait_for_each(tmp_path: Path) -> None:
    """Five seconds for each one, if they give page-locked batches."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    done = subprocess.run(
        [sys.executable, "leaves.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["ended", "ended"], done.stderr


def test_nothing_is_left_of_it(failures: list[str]) -> None:
    before = DataLoader.__iter__
    loading = Loading(failures.append)
    loading.install()
    assert DataLoader.__iter__ is not before
    loading.remove()
    assert DataLoader.__iter__ is before


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 4)
        self.error = 0.0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3))) + self.error


def a_training(model: nn.Module) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(Plan(()), Ranks(), torch.device("cpu"), optimizer, models=[model])


@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
def test_workers_that_take_seconds_to_start_are_left_as_they_are(context: str | None) -> None:
    loading = Loading(pytest.fail)
    loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context=context)
    loading.current = lambda: SimpleNamespace(loader=loader)  # type: ignore[assignment,return-value]
    training = a_training(nn.Linear(1, 1))
    training.waits = 0.5
    why = LoaderWorkers(Batches(loading), lambda: 1.0).unfit(training)
    if context in (None, "fork"):
        assert why == ""
    else:
        assert f"started by {context}" in why


def a_step(model: nn.Module, images: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(model(images), torch.arange(len(images)) % 4)
    loss.backward()
    return float(loss.detach())


def test_outputs_are_float32_and_models_can_be_saved_whole() -> None:
    torch.manual_seed(0)
    model, failed = Net(), []
    forward = Forward(lambda name, why: failed.append((name, why)))
    plain = Net.forward
    Bf16(forward).switch_on(a_training(model))
    outputs = model(torch.randn(2, 3, 8, 8))
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, outputs.bfloat16().float()), "it was computed in bfloat16"
    copy = pickle.loads(pickle.dumps(model))
    assert copy.head.weight.equal(model.head.weight)
    forward.remove()
    assert Net.forward is plain
    assert failed == []


def test_a_loss_that_drifts_takes_them_back() -> None:
    torch.manual_seed(0)
    model, failed = Net().train(), []
    forward = Forward(lambda name, why: failed.append((name, why)))
    Bf16(forward).switch_on(a_training(model))
    images = torch.randn(8, 3, 8, 8)
    a_step(model, images)
    assert (forward.guard.checked, failed) == (1, [])
    original = forward._computed
    forward._computed = lambda *given: original(*given) * 3  # type: ignore[method-assign]
    a_step(model, images)
    assert [name for name, _ in failed] == ["bf16"]
    assert "the loss was" in failed[0][1]
    assert forward.on == []
    forward.remove()


def test_a_loss_that_is_no_number_of_itself_takes_nothing_back() -> None:
    model, failed = Net().train(), []
    forward = Forward(lambda name, why: failed.append(name))
    ChannelsLast(forward).switch_on(a_training(model))
    a_step(model, torch.full((8, 3, 8, 8), torch.nan))
    assert (failed, forward.on) == ([], ["channels_last"])
    forward.remove()


def test_a_script_may_view_what_a_convolution_in_another_layout_gives() -> None:
    forward, model = Forward(lambda name, why: None), nn.Conv2d(3, 5, 3).train()
    ChannelsLast(forward).switch_on(a_training(model))
    for _ in range(8):  # those that are compared, and others
        model(torch.randn(2, 3, 8, 8)).view(2, -1).sum().backward()
    assert (forward.on, forward.counts) == (["channels_last"], {"channels_last": 8})
    forward.remove()


def test_a_layout_that_the_script_has_chosen_is_left_to_it() -> None:
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    switch = ChannelsLast(Forward(lambda name, why: None))
    assert switch.unfit(a_training(model)) == "the script has a layout of its own"
    assert not switch.unfit(a_training(nn.Conv2d(3, 5, 3)))


def test_losses_are_compared_while_something_stands_in_the_place_of_backward() -> None:
    switch, forward, model = ZeroGrad(), Forward(lambda name, why: None), Net().train()
    try:
        forward.switch("none of them", a_training(model))
        a_step(model, torch.randn(4, 3, 8, 8))
        assert forward.guard.checked == 1
    finally:
        forward.remove()
        switch.remove()


def test_what_a_script_adds_up_is_added_up_once_while_losses_are_compared() -> None:
    forward, model = Forward(lambda name, why: None), Net().train()
    forward.switch("none of them", a_training(model))
    total = torch.zeros(())
    loss = model(torch.randn(4, 3, 8, 8)).square().mean()
    total += loss.detach()
    seen = torch.zeros(())
    seen += loss
    seen *= 2
    assert total.item() == pytest.approx(loss.item())
    assert seen.item() == pytest.approx(2 * loss.item())
    seen.backward()
    assert (forward.guard.checked, forward.guard.largest) == (1, pytest.approx(0, abs=1e-5))
    forward.remove()


def test_checking_changes_neither_random_numbers_nor_running_means() -> None:
    losses, states = [], []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = Net().train()
        forward = Forward(lambda name, why: None)
        if guarded:
            forward.switch("none of them", a_training(model))
        losses.append([a_step(model, torch.randn(4, 3, 8, 8)) for _ in range(4)])
        states.append(model.state_dict())
        assert forward.guard.checked == 4 * guarded
        forward.remove()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)


def test_a_model_that_raises_goes_on_without() -> None:
    model, failed = Net().train(), []
    forward = Forward(lambda name, why: failed.append((name, why)))
    training = a_training(model)
    ChannelsLast(forward).switch_on(training)
    Bf16(forward).switch_on(training)

    def broken(*given: Any) -> Any:
        if "bf16" in forward.on:
            raise RuntimeError("no kernel for bfloat16")
        return given[0](given[1], *given[2], **given[3])

    forward._computed = broken  # type: ignore[method-assign]
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4)
    assert failed == [("bf16", "RuntimeError: no kernel for bfloat16")]
    assert forward.on == ["channels_last"]
    forward.remove()


def test_a_script_that_goes_backward_through_autograd_is_not_compared() -> None:
    forward, model = Forward(lambda name, why: None), Net().train()
    Bf16(forward).switch_on(a_training(model))
    torch.autograd.backward(model(torch.randn(2, 3, 8, 8)).sum())
    forward.guard.end_step()
    assert forward.guard.checked == 0
    assert forward.guard.is_due()
    forward.remove()


def test_a_guard_looks_at_the_first_passes_and_then_ever_more_rarely() -> None:
    guard = Guard(lambda why: None)
    assert [number for number in range(1, 70) if guard.is_due()] == [1, 2, 3, 4, 5, 8, 16, 32, 64]


def test_models_are_what_the_script_calls_with_gradients() -> None:
    training = a_training(Net())
    training.models.clear()
    model, critic = Net().train(), nn.DataParallel(nn.Linear(4, 1)).train()
    with models_seen(training):
        critic(model(torch.randn(2, 3, 8, 8)))
        with torch.no_grad():
            Net()(torch.randn(2, 3, 8, 8))
    assert [type(one) for one in training.models] == [Net, nn.Linear]
    model(torch.randn(2, 3, 8, 8))
    assert len(training.models) == 2


class OverTwo(nn.DataParallel):
    """As it is where there are two GPUs; all is done by the first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids = [0, 1]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.module(*inputs))


@pytest.mark.parametrize(("wrap", "over_several"), [(nn.DataParallel, False), (OverTwo, True)])
def test_data_parallel_over_several_devices_is_noticed(wrap: type[nn.Module], over_several: bool) -> None:
    training = a_training(Net())
    with models_seen(training):
        wrap(nn.Linear(4, 1)).train()(torch.ones(2, 4))
    assert training.data_parallel is over_several


def parameters_after(steps: int, drop: bool) -> tuple[list[torch.Tensor], int]:
    """Of a model of which a part gets gradients in every other step only."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9, weight_decay=0.1)
    switch = ZeroGrad()
    try:
        for step in range(steps):
            if drop and step == 1:
                assert switch.unfit(a_training(first)) == ""
                switch.switch_on(a_training(first))
            optimizer.zero_grad(set_to_none=False)
            value = first(torch.ones(2, 4))
            (second(value) if step % 2 else value).square().sum().backward()
            optimizer.step()
    finally:
        switch.remove()
    return [*first.parameters(), *second.parameters()], switch.count


def test_dropped_gradients_are_zeros_at_the_step() -> None:
    plain, none = parameters_after(6, drop=False)
    dropped, count = parameters_after(6, drop=True)
    assert (none, count) == (0, 5)
    for one, other in zip(plain, dropped, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizer_steps_alike_and_saves_what_the_script_asked_for(kind: Any) -> None:
    results, saved = [], []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        training = Training(Plan(()), Ranks(), torch.device("cpu"), kind(model.parameters(), lr=0.1))
        optimizer, switch = training.optimizer, FusedOptimizer()
        assert optimizer
        for step in range(6):
            if fused and step in (2, 4):
                (switch.switch_on(training)) if step == 2 else switch.switch_off()
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            if step == 3:
                saved.append(optimizer.state_dict()["param_groups"])
        results.append(model.weight.detach())
    torch.testing.assert_close(results[0], results[1])
    assert saved[0] == saved[1]


def test_an_optimizer_whose_step_was_asked_for_otherwise_is_left(request: pytest.FixtureRequest) -> None:
    model = nn.Linear(2, 2)
    for options in ({"foreach": False}, {"fused": True}, {"differentiable": True}):
        training = Training(
            Plan(()), Ranks(), torch.device("cpu"), torch.optim.Adam(model.parameters(), lr=0.1, **options)
        )
        assert FusedOptimizer().unfit(training)
    lbfgs = Training(Plan(()), Ranks(), torch.device("cpu"), torch.optim.LBFGS(model.parameters()))
    assert FusedOptimizer().unfit(lbfgs) == "LBFGS has no fused step"


def an_image_folder(root: Path, *stack: Any) -> Any:
    """Smooth JPEGs of 120 x 120."""
    for number in range(4):
        noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        (root / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).resize((120, 120), Image.Resampling.BICUBIC).save(
            root / f"class{number % 2}" / f"{number}.jpg"
        )
    return datasets.ImageFolder(str(root), transforms.Compose(stack))


NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("size", [40, 120])
def test_an_image_folder_gives_the_same_pixels_where_nothing_is_left_to_chance(tmp_path: Path, size: int) -> None:
    whole = transforms.RandomResizedCrop(size, scale=(1, 1), ratio=(1, 1))
    dataset = an_image_folder(tmp_path, whole, transforms.ToTensor(), NORMALIZE)
    recipe = recipe_of(dataset)
    assert recipe
    for index in range(4):
        (ours, label), (theirs, expected) = Images(dataset, recipe)[index], dataset[index]
        assert (label, ours.dtype, ours.shape) == (expected, theirs.dtype, theirs.shape)
        levels = (ours - theirs).abs() * torch.tensor(NORMALIZE.std).view(3, 1, 1) * 255
        assert levels.mean() < 1.5
        assert levels.max() < 25


def test_its_crops_and_flips_are_of_the_same_distribution(tmp_path: Path) -> None:
    stack = [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(0.3), transforms.ToTensor()]
    dataset = an_image_folder(tmp_path, *stack)
    recipe = recipe_of(dataset)
    assert recipe
    torch.manual_seed(0)
    ours = torch.stack([Images(dataset, recipe)[0][0] for _ in range(600)])
    theirs = torch.stack([dataset[0][0] for _ in range(600)])
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), atol=0.07, rtol=0)
    torch.testing.assert_close(ours.std(0), theirs.std(0), atol=0.07, rtol=0)


@pytest.mark.parametrize(
    "stack",
    [
        [transforms.Resize(16), transforms.ToTensor()],
        [transforms.RandomResizedCrop(16), transforms.ColorJitter(), transforms.ToTensor()],
        [transforms.RandomResizedCrop(16), transforms.ToTensor(), transforms.RandomErasing()],
        [transforms.RandomResizedCrop((16, 20)), transforms.ToTensor()],
        [transforms.RandomResizedCrop(16, interpolation=transforms.InterpolationMode.BICUBIC), transforms.ToTensor()],
        [transforms.RandomResizedCrop(16)],
    ],
)
def test_other_stacks_are_left_alone(tmp_path: Path, stack: list[Any]) -> None:
    assert recipe_of(an_image_folder(tmp_path, *stack)) is None


def test_a_file_that_cannot_be_decoded_is_the_scripts_own_affair(tmp_path: Path) -> None:
    dataset = an_image_folder(tmp_path, transforms.RandomResizedCrop(16), transforms.ToTensor())
    recipe = recipe_of(dataset)
    assert recipe
    Path(dataset.samples[0][0]).write_bytes(b"no image")
    with pytest.raises(UnidentifiedImageError):
        Images(dataset, recipe)[0]


@pytest.fixture(autouse=True)
def no_workers_are_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # it ends once it has seen that its queue was closed
            thread.join(10)
    assert [child for child in torch.multiprocessing.active_children() if child.is_alive()] == []
