"""Checkpoints of what lies on a GPU, written beside the training."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop import Checkpointer
from hotloop.train.checkpoint.parts import Part
from hotloop.train.checkpoint.staging import Staging


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with closing(Checkpointer(tmp_path, keep=1, background=True)) as made:
        yield made


def state() -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    large = torch.randn(64, 1 << 20, generator=generator, device="cuda")
    images = torch.randn(8, 16, 12, 20, generator=generator, device="cuda").to(memory_format=torch.channels_last)
    return {"large": large, "images": images, "half": large[0].bfloat16(), "count": torch.tensor(3.0, device="cuda")}


@pytest.mark.parametrize("free_bytes", [1 << 40, 0, 1 << 28], ids=["room on the GPU", "no room", "room for some"])
def test_a_state_that_changes_is_saved_as_it_was(
    checkpointer: Checkpointer, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 30))  # a large tensor has 1 << 28
    for step in (1, 2):  # the second goes through memory that the first has used
        changing = state()
        checkpointer.open(step)
        saving = checkpointer.begin(changing, step)
        for tensor in changing.values():
            tensor.zero_()
        saving.end()
        loaded = checkpointer.latest()
        assert loaded
        for name, tensor in state().items():
            assert torch.equal(loaded.state[name], tensor.cpu()), name
            assert loaded.state[name].stride() == tensor.stride()


def test_what_a_copy_has_left_is_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    state, total = torch.ones(1 << 26, device="cuda"), 100 << 30
    free = state.nbytes + (6 << 30)  # of which 5 GiB are to stay free
    staging, part = Staging(print), Part("weights", state, (0,))

    def free_now(device: torch.device) -> tuple[int, int]:
        return free - (torch.cuda.memory_reserved(device) - before), total

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(state.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_now)
    for _ in range(3):
        staged = staging.copy([], [part])
        assert staged.sources, "copied on the GPU first"
        staged.wait()
        assert staging.memory
        assert torch.equal(torch.from_numpy(staging.memory.bytes[: state.nbytes]).view(torch.float32), state.cpu())
    staging.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_letting_go_of_locked_memory_touches_no_gpu_of_others() -> None:
    code = """
import torch
from hotloop.train.host_memory import HostMemory
torch.zeros(1, device="cuda:0")
memory = HostMemory(1 << 20, True, print)
memory.close()
assert torch._C._cuda_hasPrimaryContext(0) and not torch._C._cuda_hasPrimaryContext(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
