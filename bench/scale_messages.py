"""What ranks say to each other, in a process that is the first of thousands: agreeing, lists of what each rank says."""

import ctypes
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scale_costs import Measured, Peak, first_of, processor_seconds
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from hotloop.train.agreement import NOTHING, Agreement, Wishes
from hotloop.train.random_state import random_state
from hotloop.train.slow_rank import Pace, slow_ranks


def described_file(number: int = 0) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"sha256": f"{number:064x}", "bytes": 1 << 27}


class Others:
    """Puts in what other ranks would send, where the fake group leaves what this one has sent.

    The fake group copies as often as gloo does. What this takes on top is in `seconds`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.reduced = torch.zeros(0)
        self._sizes, self._rows = torch.zeros(0), torch.zeros(0)
        self._reduce, self._all_gather, self._gather = (
            distributed.all_reduce, distributed_c10d.all_gather, distributed_c10d.gather,
        )  # fmt: skip
        for where, name, other in (
            (distributed, "all_reduce", self._reduced),
            (distributed_c10d, "all_gather", self._all_gathered),
            (distributed_c10d, "gather", self._gathered),
        ):
            setattr(where, name, other)

    def send(self, values: Iterable[Any]) -> None:
        """In the gatherings that come, by rank; the first one's own is to be the first of these."""
        pickled = [distributed_c10d._object_to_tensor(value, "cpu", None)[0] for value in values]
        self._sizes = torch.tensor([len(one) for one in pickled])
        self._rows = torch.nn.utils.rnn.pad_sequence(pickled, batch_first=True)
        del pickled
        ctypes.CDLL(None).malloc_trim(0)  # nothing is left from which a gathering could take its memory

    @property
    def sent_bytes(self) -> int:
        """By each."""
        return self._rows.shape[1]

    def _reduced(self, values: Tensor, **options: Any) -> Any:
        work = self._reduce(values, **options)
        with self._aside():
            values.copy_(self.reduced)
        return work

    def _all_gathered(self, outputs: list[Tensor], own: Tensor, **options: Any) -> None:
        self._all_gather(outputs, own, **options)
        self._fill(outputs)

    def _gathered(self, own: Tensor, gather_list: list[Tensor], **options: Any) -> None:
        self._gather(own, gather_list=gather_list, **options)
        self._fill(gather_list)

    def _fill(self, outputs: list[Tensor]) -> None:
        with self._aside():
            whole, given = outputs[0]._base, self._sizes if outputs[0].dtype is torch.long else self._rows
            assert whole is not None
            whole.copy_(given.view(-1))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        began = processor_seconds()
        yield
        self.seconds += processor_seconds() - began


def each_seconds(call: Callable[[], object], others: Others, number: int) -> float:
    """Mean time of a call."""
    call()
    others.seconds, began = 0.0, processor_seconds()
    for _ in range(number):
        call()
    return (processor_seconds() - began - others.seconds) / number


class Clock:
    """A step each 0.2 s: then there is a message after each, and its answer is read after the next."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def agreement(ranks: int) -> Measured:
    world, others, clock = first_of(ranks), Others(), Clock()
    peak = Peak()
    others.reduced = torch.tensor([0.0, 0.0, 1.0, -0.5], dtype=torch.float64)  # another one wants to save
    agreed = Agreement(world, clock)
    found: list[Wishes] = []

    def step() -> None:
        clock.seconds += 0.2
        found[:] = [agreed.after_step(lambda: NOTHING)]

    message = each_seconds(step, others, 2000)
    assert found[0].save, "what another rank wants is heard"
    clock.seconds -= 2000.0  # steps that seem to take no time: no message after them
    agreed = Agreement(world, clock)
    others.reduced[3] = -1000.0
    for _ in range(2):
        agreed.after_step(lambda: NOTHING)
    between = each_seconds(lambda: agreed.after_step(lambda: NOTHING), others, 900)
    others.reduced = torch.tensor([1.0], dtype=torch.float64)
    assert world.any(False)
    flag = each_seconds(lambda: world.any(False), others, 2000)
    others.reduced = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert world.any_of([False, False]) == [False, True]
    flags = each_seconds(lambda: world.any_of([False, False]), others, 2000)
    losses = [2.0] * 100
    others.reduced = torch.full([100], 2.0 * ranks, dtype=torch.float64)
    assert world.sum(losses) == [2.0 * ranks] * 100
    added = each_seconds(lambda: world.sum(losses), others, 2000)
    return {
        "ranks": ranks, "message_seconds": message, "step_between_seconds": between, "any_seconds": flag,
        "any_of_two_seconds": flags, "sum_of_100_seconds": added, "memory_bytes": peak.bytes(), "sent_bytes": 4 * 8,
    }  # fmt: skip


def paces(ranks: int) -> list[Pace]:
    """Of ranks that differ as cards do; each thousandth is slow, and another waits for data."""
    rates = (7e14 * (1 + 0.01 * np.random.default_rng(0).standard_normal(ranks))).tolist()
    found = [Pace(rate, 0.01) for rate in rates]
    for rank in range(500, ranks, 1000):
        found[rank], found[rank + 1] = Pace(4e14, 0.01), Pace(7e14, 0.5)
    return found


def random_states(ranks: int) -> Iterator[Any]:
    for rank in range(ranks):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        yield random_state()


def hashes(ranks: int) -> Iterator[Any]:
    return ({f"part-{rank:05d}-of-{ranks:05d}.safetensors": described_file(rank)} for rank in range(ranks))


SENT: dict[str, Callable[[int], Iterable[Any]]] = {
    "pace": paces,
    "hashes of a file": hashes,
    "random state": random_states,
}


def gathered(what: str, ranks: int) -> Measured:
    """Random numbers' states go to the first rank, all else to each."""
    world, others = first_of(ranks), Others()
    own = next(iter(SENT[what](ranks)))
    others.send(SENT[what](ranks))
    gather = world.gathered_on_first if what == "random state" else world.gathered
    taken = []
    peak = Peak()
    for _ in range(3):
        others.seconds, began = 0.0, processor_seconds()
        found = gather(own)
        taken.append(processor_seconds() - began - others.seconds)
        assert len(found) == len({str(one) for one in found[-2:]}) + ranks - 2, "they are of different ranks"
        del found
    return {
        "what": what, "ranks": ranks, "sent_bytes": others.sent_bytes, "received_bytes": ranks * others.sent_bytes,
        "seconds": statistics.median(taken), "memory_bytes": peak.bytes(),
    }  # fmt: skip


def compared(ranks: int) -> Measured:
    given, taken = paces(ranks), []
    peak = Peak()
    for _ in range(5):
        began = processor_seconds()
        found = slow_ranks(given)
        taken.append(processor_seconds() - began)
    expected = {(rank + more, why) for rank in range(500, ranks, 1000) for more, why in ((0, "rate"), (1, "data"))}
    assert found.keys() == expected
    return {"ranks": ranks, "seconds": statistics.median(taken), "memory_bytes": peak.bytes()}
