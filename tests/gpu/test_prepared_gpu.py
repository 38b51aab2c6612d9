"""Batches prepared beside what follows a step: what arrives is right, and it is early."""

import numpy as np
import torch

from hotloop.data.arrays import ArrayDataset
from hotloop.data.loader import LoaderSettings
from hotloop.tasks.task import Tensors
from hotloop.train.prepared import PreparedSource
from hotloop.train.source import ArraySource

_CYCLES = 100_000_000
"""About 0.05 s."""


def test_batches_are_prepared_while_the_step_before_ends() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = np.random.default_rng(0).random((40, 1000), dtype=np.float32)
    dataset = ArrayDataset({"rows": rows, "numbers": np.arange(40)})
    arrays = ArraySource(dataset, LoaderSettings(8, seed=0), device)
    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    told: list[str] = []

    def prepare(batch: Tensors) -> Tensors:
        found = arrays.expand(batch)
        return {**found, "rows": 2 * found["rows"]}

    source = PreparedSource(arrays, prepare, device, computed, compiled=False, notify=told.append)
    seen, early = [], 0
    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for batch in source.batches(epochs=4):
        source._stream.synchronize()
        early += not ended.query()  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        seen.append((batch.indices, {name: one.clone() for name, one in batch.tensors.items()}))
        computed.record()
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        ended.record()
    assert len(seen) == 20
    assert early > 10, "captures wait for all that is queued"
    assert not told
    for indices, tensors in seen:
        assert np.array_equal(tensors["numbers"].cpu().numpy(), indices)
        assert np.array_equal(tensors["rows"].cpu().numpy(), 2 * rows[indices])
