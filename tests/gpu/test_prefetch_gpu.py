"""Batches copied ahead: what arrives is what was sent, however the streams fall."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.train.prefetch import prefetch


class Named(NamedTuple):
    images: Tensor
    rest: dict[str, Any]


def batches(count: int, size: int) -> Iterator[Named]:
    for number in range(count):
        images = torch.full((size, 64), number, dtype=torch.uint8)
        yield Named(images, {"labels": [torch.tensor([number]), number], "names": ("a", None)})
        images.fill_(255)  # the loader's memory is its own again


def busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("slow", ["training", "copying", "neither"])
def test_what_arrives_is_what_was_sent(depth: int, slow: str) -> None:
    def transform(batch: Named) -> Named:
        busy(2_000_000 if slow == "copying" else 0)
        return batch._replace(images=batch.images.float() / 2)

    sums = []
    for number, batch in enumerate(prefetch(batches(12, 4096), "cuda", depth, transform)):
        busy(2_000_000 if slow == "training" else 0)  # what is read late must not have been written over
        assert batch.images.is_cuda
        assert batch.rest["labels"][1] == number
        assert batch.rest["names"] == ("a", None)
        sums.append((batch.images.mean(), batch.rest["labels"][0].float().mean()))
    assert [(float(images), float(label)) for images, label in sums] == [(n / 2, n) for n in range(12)]


def test_batches_of_other_shapes_types_and_layouts() -> None:
    kinds = [torch.ones(3, 5), torch.ones(4, 5), torch.ones(4, 5).half(), torch.ones(5, 4).t(), torch.ones(1).expand(6)]
    given = [kind * number for number, kind in enumerate(kinds * 3)]
    for number, batch in enumerate(prefetch(given, "cuda")):
        busy(500_000)
        assert torch.equal(batch.cpu(), given[number])
        assert batch.dtype == given[number].dtype


def test_pinned_batches_and_those_on_the_card_are_taken_as_they_are() -> None:
    loader = DataLoader(TensorDataset(torch.arange(32.0)), batch_size=4, pin_memory=True)
    assert torch.cat([batch[0] for batch in map(copied, prefetch(loader))]).tolist() == list(range(32))
    on_card = [torch.full((4,), float(number), device="cuda") for number in range(5)]
    assert [batch.data_ptr() for batch in prefetch(on_card)] == [batch.data_ptr() for batch in on_card]


def copied(batch: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in batch]


def test_a_captured_step_trains_on_them_as_on_plain_ones() -> None:
    ends = []
    draws = torch.Generator().manual_seed(0)
    data = [(torch.randn(64, 8, generator=draws), torch.randint(0, 3, (64,), generator=draws)) for _ in range(20)]
    for ahead in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3).cuda()
        step = hotloop.Step(model, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
                            torch.optim.SGD(model.parameters(), lr=0.5))  # fmt: skip
        plain = ((inputs.cuda(), labels.cuda()) for inputs, labels in data)
        for batch in prefetch(data) if ahead else plain:
            step(batch)
        assert step.captured, step.not_captured
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def test_it_works_on_another_current_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [batch.images.float().mean() for batch in prefetch(batches(6, 4096), "cuda")]
    stream.synchronize()
    assert [float(mean) for mean in found] == list(range(6))


def test_an_error_of_the_loader_arrives() -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.ones(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        assert sum(float(batch.sum()) for batch in prefetch(broken())) == 2.0


class CountedGraph(torch.cuda.CUDAGraph):
    captures = 0

    def capture_begin(self, *args: Any, **options: Any) -> None:
        CountedGraph.captures += 1
        super().capture_begin(*args, **options)


def test_a_captured_step_reads_batches_where_they_were_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy on the device, and no further capture in a later pass, which has a shorter batch in between."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CountedGraph)
    monkeypatch.setattr(CountedGraph, "captures", 0)
    sizes = [64] * 10 + [40]
    data = [(torch.full((size, 1 << 12), float(number)), torch.zeros(size)) for number, size in enumerate(sizes)]
    model = nn.Linear(1 << 12, 1, bias=False).cuda()
    nn.init.ones_(model.weight)
    step = hotloop.Step(model, lambda model, batch: (model(batch[0])[:, 0] - batch[1]).mean() / (1 << 12),
                        torch.optim.SGD(model.parameters(), lr=0.0))  # fmt: skip
    ahead = prefetch(data, "cuda", depth=2)
    losses = [step(batch) for batch in ahead]
    assert CountedGraph.captures == 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        losses += [step(batch) for batch in ahead]
        torch.cuda.synchronize()
    assert CountedGraph.captures == 3
    assert [float(loss) for loss in losses] == pytest.approx([*range(11), *range(11)])
    times = Counter(event.name for event in profile.events() if "DtoD" in event.name)
    assert times.total() <= 2 * len(sizes), times  # the two losses; copied batches would be two more a step


def test_a_loader_that_draws_random_numbers_does_not_forbid_the_capture() -> None:
    """They are drawn in a thread beside the step, from the generators of the whole process."""

    def augmented() -> Iterator[Tensor]:
        for _ in range(60):
            yield torch.rand(16, 4)

    model = nn.Linear(4, 1).cuda()
    step = hotloop.Step(model, lambda model, batch: model(batch).square().mean(),
                        torch.optim.SGD(model.parameters(), lr=0.1))  # fmt: skip
    for batch in prefetch(augmented(), "cuda"):
        step(batch)
    assert step.captured, step.not_captured
