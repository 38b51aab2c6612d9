"""Batches prepared beside what follows a step: what arrives is right, and it is early."""

import numpy as np
import torch

from hotloop.data.arrays import ArrayDataset
from hotloop.data.loader import LoaderSettings
from hotloop.tasks.task import Tensors
from hotloop.train.execute import WARM_UP, Executor
from hotloop.train.preparation import PreparedBeside
from hotloop.train.source import ArraySource

_CYCLES = 100_000_000
"""About 0.05 s."""


def test_batches_are_prepared_while_the_step_before_ends() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = np.random.default_rng(0).random((40, 1000), dtype=np.float32)
    dataset = ArrayDataset({"rows": rows, "numbers": np.arange(40)})
    arrays = ArraySource(dataset, LoaderSettings(8, seed=0), device)
    told: list[str] = []
    step = Executor(device, True, False, WARM_UP, told.append)

    def prepare(batch: Tensors) -> Tensors:
        found = arrays.expand(batch)
        return {**found, "rows": 2 * found["rows"]}

    preparation = PreparedBeside(prepare, device, step, compiled=False, notify=told.append)
    assert step.computed
    batches, seen, early = arrays.batches(epochs=4), [], 0
    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    while True:
        with preparation.loading():
            batch = next(batches, None)
        if batch is None:
            break
        tensors = preparation(batch)
        preparation._stream.synchronize()
        early += not ended.query()  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        seen.append((batch.indices, {name: one.clone() for name, one in tensors.items()}))
        step.computed.record()
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        ended.record()
    assert len(seen) == 20
    assert early > 10, "captures wait for all that is queued"
    assert not told
    for indices, tensors in seen:
        assert np.array_equal(tensors["numbers"].cpu().numpy(), indices)
        assert np.array_equal(tensors["rows"].cpu().numpy(), 2 * rows[indices])


def test_memory_that_runs_out_once_costs_no_batch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    step = Executor(device, True, False, WARM_UP, lambda text: None)
    failed: list[bool] = []

    def prepare(batch: Tensors) -> Tensors:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("no room")
        return {"x": batch["x"] + 1}

    preparation = PreparedBeside(prepare, device, step, compiled=False, notify=lambda text: None)
    for number in range(6):
        batch = {"x": torch.full((4,), number, device=device)}
        torch.cuda.synchronize()
        found = preparation.prepared(batch)
        assert found["x"].tolist() == [number + 1] * 4
