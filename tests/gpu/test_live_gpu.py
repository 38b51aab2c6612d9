"""What a script that trains on a GPU shows of itself."""

from pathlib import Path

import pytest
import torch

from hotloop.attach.live import PublishedScript
from hotloop.core.live import Live, read_live


def seen(folder: Path) -> Live:
    (live,) = read_live(folder).processes
    return live


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_loss_is_told_a_second_later_and_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, now = tmp_path / "live", [0.0]
    monkeypatch.setenv("HOTLOOP_LIVE", str(folder))
    weight = torch.ones(4, device="cuda", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), torch.amp.GradScaler("cuda")
    published = PublishedScript(torch, weight.device, "run", tmp_path, lambda: now[0])
    published.optimizer = optimizer
    scaler.scale(weight.sum()).backward()  # what torch prepares at the first time may wait
    torch.cuda.synchronize()
    try:
        for number in range(4):
            torch.cuda.set_sync_debug_mode("error")
            scaler.scale((10 + number) * weight.sum() / 4).backward()
            published.stepped(0.1, 0.0, number)
            now[0] += 1.0
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        live = seen(folder)
        published.close()
    assert live.loss in (10.0, 11.0, 12.0), "of a step before, not scaled"
    assert live.learning_rate == 0.5
    assert live.memory_bytes >= torch.cuda.memory_allocated()
    assert live.gpu.startswith("GPU-")


def test_a_step_that_is_captured_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_LIVE", str(tmp_path / "live"))
    weight = torch.ones(4, device="cuda", requires_grad=True)
    published = PublishedScript(torch, weight.device, "run", tmp_path)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        weight.sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss = (weight * 3).sum()
        loss.backward()
        published.stepped(0.1, 0.0, 1)
    graph.replay()
    published.close()
    assert loss.item() == 12.0
