"""What a script's calls are watched by counts what it should, and leaves nothing behind."""

import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, dataloader

from hotloop.attach.malloc import can_keep
from hotloop.profile.ablations import Ablations, _same_containers
from hotloop.profile.hooks import Hooks


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.002)
        return torch.tensor([float(index)])


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    made = Hooks(torch)
    made.install()
    made.mark()
    yield made
    made.remove()


def test_waiting_for_batches_is_input_and_an_epochs_edge_is_not_regular(hooks: Hooks) -> None:
    steps = []
    for _ in DataLoader(Slow(), 2):
        steps.append(hooks.mark())
    steps.append(hooks.mark())
    assert [step.loads for step in steps if step] == [1, 1, 1, 0]
    assert [step.regular for step in steps if step] == [False, True, True, False]
    assert all(0.004 <= step.input <= step.seconds for step in steps[:3] if step)
    assert hooks.loader_line.startswith(__file__)
    assert len(hooks.epoch_starts) == 1
    assert hooks.epoch_starts[0] >= 0.004


def test_a_loader_that_loads_in_its_own_samples_counts_once(hooks: Hooks) -> None:
    class Nested(Dataset[Tensor]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Tensor:
            return torch.stack(list(DataLoader(Slow(), 1)))

    list(DataLoader(Nested(), 1))
    step = hooks.mark()
    assert step
    assert step.loads == 1
    assert step.input <= step.seconds


def test_another_threads_loading_is_told_and_not_counted(hooks: Hooks) -> None:
    thread = threading.Thread(target=lambda: list(DataLoader(Slow(), 2)))
    thread.start()
    thread.join()
    step = hooks.mark()
    assert step
    assert (step.loads, step.input, hooks.in_another_thread) == (0, 0.0, True)


def test_nothing_stays_behind() -> None:
    before = (dict(vars(DataLoader)), dict(vars(dataloader._BaseDataLoaderIter)), dict(vars(Tensor)))
    hooks = Hooks(torch)
    hooks.install()
    assert vars(DataLoader)["__iter__"] is not before[0]["__iter__"]
    with hooks.off():
        assert vars(DataLoader)["__iter__"] is before[0]["__iter__"]
    hooks.remove()
    assert (dict(vars(DataLoader)), dict(vars(dataloader._BaseDataLoaderIter)), dict(vars(Tensor))) == before


def test_cached_batches_come_at_once_and_the_loader_goes_on_afterwards(hooks: Hooks) -> None:
    ablations = Ablations(torch, hooks)
    batches = iter(DataLoader(Slow(), 1))
    with ablations.collecting():
        assert next(batches).item() == 0
        assert next(batches).item() == 1
    hooks.mark()
    with ablations.cached_batches():
        again = [batch.item() for batch in batches]
    step = hooks.mark()
    assert again == [0, 1, 0, 1]  # as many as there are left
    assert step
    assert step.input < 0.02
    assert [batch.item() for batch in batches] == [2, 3, 4, 5]


class Told(Slow):
    """Says how often it was asked by the process that trains."""

    asked = 0

    def __getitem__(self, index: int) -> Tensor:
        Told.asked += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_make_batches_of_samples_that_are_there(hooks: Hooks, context: str) -> None:
    ablations = Ablations(torch, hooks)
    loader = DataLoader(Told(), 2, num_workers=1, multiprocessing_context=context)
    with ablations.collecting():
        first = [batch.tolist() for batch in loader]
    Told.asked = 0
    with ablations.cached_samples():
        given = [batch.tolist() for batch in loader]
    assert given == ([[[0.0], [1.0]]] * 3 if context == "fork" else first)
    assert Told.asked == (4 if context == "fork" else 0)  # once, here


def test_each_epoch_of_persistent_workers_has_all_its_cached_batches(hooks: Hooks) -> None:
    ablations = Ablations(torch, hooks)
    loader = DataLoader(Slow(), 1, num_workers=1, persistent_workers=True)
    with ablations.collecting():
        list(loader)
    with ablations.cached_batches():
        assert [len(list(loader)) for _ in range(3)] == [6, 6, 6]


def test_what_a_script_takes_out_of_a_cached_batch_is_there_again(hooks: Hooks) -> None:
    class Named(Slow):
        def __getitem__(self, index: int) -> dict[str, int]:  # type: ignore[override]
            return {"label": index}

    ablations = Ablations(torch, hooks)
    batches = iter(DataLoader(Named(), 1))
    with ablations.collecting():
        next(batches)
    with ablations.cached_batches():
        assert next(batches).pop("label").item() == 0
        assert next(batches).pop("label").item() == 0


FAULTS = """
import resource, torch
from hotloop.profile.ablations import Ablations
from hotloop.profile.hooks import Hooks

def faults():
    # To fill 48 MiB: the fewest of some times, as the first ones may find no room beside other blocks.
    found = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(48 << 18)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)

before = faults()
with Ablations(torch, Hooks(torch)).kept_memory():
    print(before, faults())
"""


@pytest.mark.skipif(not can_keep(), reason="the C library has no such settings")
def test_what_a_step_frees_is_kept_while_it_is_tried() -> None:
    """In a process of its own: trainings before in this one have told the C library to keep what is freed."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=100)
    before, kept = map(int, done.stdout.split())
    assert before > 10_000
    assert kept < 100


def test_threads_are_put_back(hooks: Hooks) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    with Ablations(torch, hooks).fewer_threads():
        assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    assert torch.get_num_threads() == before + 3
    torch.set_num_threads(before)


def test_each_loader_gives_its_own_batches_and_unknown_ones_go_on(hooks: Hooks) -> None:
    ablations = Ablations(torch, hooks)
    first, second = Slow(), [torch.tensor([10.0 + n]) for n in range(6)]
    one, other, unknown = iter(DataLoader(first, 1)), iter(DataLoader(second, 1)), DataLoader([torch.tensor(7.0)], 1)  # type: ignore[arg-type]
    with ablations.collecting():
        next(one), next(other)
    with ablations.cached_batches():
        assert [(next(one).item(), next(other).item()) for _ in range(5)] == [(0, 10)] * 5
        assert [batch.item() for batch in unknown] == [7]


def test_dicts_of_any_kind_are_given_again() -> None:
    class Strange(dict[str, int]):
        def __init__(self, needed: int) -> None:
            super().__init__(value=needed)

    kinds: list[Any] = [defaultdict(int, value=1), Strange(1), UserDict(value=1), OrderedDict(value=1)]
    for batch in kinds:
        again = _same_containers(batch)
        assert type(again) is type(batch)
        assert again.pop("value") == batch["value"] == 1


def test_a_new_iterator_is_not_kept_alive(hooks: Hooks) -> None:
    batches = iter(DataLoader(Slow(), 2))
    next(batches)
    assert hooks.loader() is batches
    del batches
    assert hooks.loader() is None
