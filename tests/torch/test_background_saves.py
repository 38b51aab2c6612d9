"""Checkpoints with large tensors: written beside the training, read by other means than ours too."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from hotloop import Checkpointer
from hotloop.core.errors import CheckpointError
from hotloop.core.files import start_directory
from hotloop.train.checkpoint.checkpointer import load_checkpoint
from hotloop.train.checkpoint.files import (
    Plan,
    Share,
    ShareFailed,
    describe,
    manifest_text,
    read_manifest,
    write_checkpoint,
)  # fmt: skip
from hotloop.train.checkpoint.parts import Part, Split, StoredTensor, header, layout_of
from hotloop.train.checkpoint.saving import _check_ranks
from hotloop.train.checkpoint.writer import Request, Writer
from hotloop.train.host_memory import HostMemory
from hotloop.train.sharded import divided_optimizer

BOTH = pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])


def state() -> dict[str, Any]:
    """With large and small tensors, one under two names, one in another order, and types of 8 and 16 bits."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(100, 80, generator=generator)
    images = torch.randn(8, 16, 12, 20, generator=generator).to(memory_format=torch.channels_last)
    moments = {"exp_avg": torch.randn(90, 70, generator=generator).bfloat16(), "step": torch.tensor(3.0)}
    return {
        "model": {"embedding.weight": shared, "head.weight": shared, "conv": images, "bias": torch.ones(3)},
        "optimizer": {"state": {0: moments, 1: {"mask": torch.rand(200, 100, generator=generator) > 0.5}}},
        "list": [1, (torch.arange(5000), "text")],
        "number": 7,
    }


@pytest.fixture
def checkpointer(tmp_path: Path, background: bool) -> Iterator[Checkpointer]:
    with closing(Checkpointer(tmp_path, keep=2, background=background)) as made:
        yield made


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and found.stride() == expected.stride() and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(map(same, found, expected))
    return bool(found == expected)


@BOTH
def test_large_tensors_come_back_as_they_were(checkpointer: Checkpointer, tmp_path: Path) -> None:
    path = checkpointer.save(state(), step=1)
    assert sorted(os.listdir(path)) == ["manifest.json", "part-00001-of-00001.safetensors", "state.pt"]
    loaded = checkpointer.latest()
    assert loaded
    assert same(loaded.state, state())
    assert (path / "part-00001-of-00001.safetensors").stat().st_size < 300_000, "what has two names is written once"
    assert os.listdir(tmp_path) == [path.name]


@BOTH
def test_a_state_that_changes_is_saved_as_it_was(checkpointer: Checkpointer) -> None:
    changing = state()
    checkpointer.open(1)
    saving = checkpointer.begin(changing, step=1)
    changing["model"]["conv"].zero_()
    changing["optimizer"]["state"][0]["step"] += 1
    assert same(load_checkpoint(saving.end()).state, state())
    assert saving.done()
    larger = {**state(), "more": torch.ones(1_000_000)}
    assert same(load_checkpoint(checkpointer.save(larger, step=2)).state, larger), "the memory grows"


@pytest.mark.parametrize("background", [True])
def test_any_number_of_files_may_be_open(checkpointer: Checkpointer) -> None:
    """Of the first of many ranks more than 1,024 are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, before[1]), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        checkpointer.open(1)
        saving = checkpointer.begin(state(), step=1)
        while not saving.done():
            pass
        assert same(load_checkpoint(saving.end()).state, state())
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("background", [True])
def test_a_writer_that_is_killed_costs_no_checkpoint(checkpointer: Checkpointer) -> None:
    checkpointer.save(state(), step=1)
    writer = checkpointer._saver._writer._process
    assert writer
    os.kill(writer.pid, signal.SIGSTOP)  # it has not begun when it dies
    checkpointer.open(2)
    saving = checkpointer.begin(state(), step=2)
    assert not saving.done()
    writer.kill()
    assert same(load_checkpoint(saving.end()).state, state())
    assert same(load_checkpoint(checkpointer.save(state(), step=3)).state, state()), "by another one"


def test_a_writer_that_is_killed_before_it_answers_leaves_its_share_as_it_is(tmp_path: Path) -> None:
    path, name = tmp_path / "epoch-0001-step-00000001", "part-00002-of-00002.safetensors"
    temporary, memory, writer = start_directory(path), HostMemory(4096, locked=False, warn=print), Writer()
    with closing(memory), closing(writer):
        for share in (Share(0, 2), Share(1, 2)):
            process = writer._process
            if process:
                os.kill(process.pid, signal.SIGSTOP)  # the share is written below, as if by it
            request = Request(str(temporary), share, {name: [(0, 100)]} if share.number else {}, None)
            writer.begin(request, memory.descriptor, memory.bytes.nbytes)
            if not process:
                assert writer.answered(memory.bytes.data, wait=True)
        write_checkpoint(temporary, Share(1, 2), {name: [memory.bytes.data[:100]]}, None)
        write_checkpoint(temporary, Share(0, 2), {"state.pt": [memoryview(b"")]}, Plan(str(path), {}, 1, 60))
        assert process
        process.kill()
        assert writer.answered(memory.bytes.data, wait=True)
    assert sorted(os.listdir(path)) == ["manifest.json", name, "state.pt"]


def test_who_goes_on_for_a_killed_writer_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    """They may wait for it within a step, each with a killed writer of its own."""
    path = tmp_path / "epoch-0001-step-00000001"
    temporary, memory, writer = start_directory(path), HostMemory(4096, locked=False, warn=print), Writer()
    request = Request(str(temporary), Share(0, 2), {"state.pt": [(0, 100)]}, Plan(str(path), {}, 1, limit_seconds=0.0))
    with closing(memory), closing(writer):
        writer.begin(replace(request, plan=None), memory.descriptor, memory.bytes.nbytes)
        assert writer.answered(memory.bytes.data, wait=True)
        process = writer._process
        assert process
        os.kill(process.pid, signal.SIGSTOP)
        writer.begin(request, memory.descriptor, memory.bytes.nbytes)
        process.kill()
        process.wait()
        assert not writer.answered(memory.bytes.data, wait=False)
        write_checkpoint(temporary, Share(1, 2), {"part": [memoryview(b"x")]}, None)
        assert writer.answered(memory.bytes.data, wait=False)
    assert sorted(os.listdir(path)) == ["manifest.json", "part", "state.pt"]


@BOTH
def test_a_full_disk_leaves_the_last_good_one(checkpointer: Checkpointer, tmp_path: Path) -> None:
    good = checkpointer.save(state(), step=1)
    checkpointer.close()  # the next process inherits the limit
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpointer.open(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="epoch-0000-step-00000002"):
            checkpointer.begin(state(), step=2).end()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == [good.name]
    assert same(load_checkpoint(good).state, state())


DYING = """
import os, signal, sys, torch
from pathlib import Path
from hotloop import Checkpointer
checkpointer = Checkpointer(Path(sys.argv[1]), background=True)
checkpointer.save({"a": torch.ones(10_000)}, 1)
checkpointer.open(2)
os.kill(checkpointer._saver._writer._process.pid, signal.SIGSTOP)
checkpointer.begin({"a": torch.zeros(10_000_000)}, 2)
print(checkpointer._saver._writer._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_no_writer_and_no_half(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, tmp_path], capture_output=True, text=True, timeout=60)
    writer = Path("/proc", done.stdout.strip())
    while writer.exists() and "\nState:\tZ" not in (writer / "status").read_text():
        pass  # its end follows its parent's
    loaded = Checkpointer(tmp_path).latest()
    assert loaded
    assert torch.equal(loaded.state["a"], torch.ones(10_000))
    assert os.listdir(tmp_path) == ["epoch-0000-step-00000001"]


@given(st.integers(0, 10**9), st.integers(0, 7))
def test_no_changed_bit_of_a_part_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("bits")
    path = Checkpointer(folder).save({"weights": torch.arange(5000.0)}, step=1)
    file = path / "part-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="part-00001-of-00001"):
        load_checkpoint(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path)


def test_what_is_stored_is_read_in_parts_from_files_of_several_processes(tmp_path: Path) -> None:
    """As three ranks would have written it, the last one with less rows."""
    expected = torch.randn(100, 70, generator=torch.Generator().manual_seed(0))
    path = Checkpointer(tmp_path).save({"weights": expected}, step=1)
    divide(path, expected)
    stored = load_checkpoint(path, lazily=True).state["weights"]
    assert isinstance(stored, StoredTensor)
    assert torch.equal(stored.whole(), expected)
    for offset, shape in [((0, 0), (100, 70)), ((30, 5), (20, 60)), ((90, 69), (10, 1)), ((7, 0), (0, 70))]:
        part = stored.part(offset, shape)
        rows, columns = (slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        assert torch.equal(part, expected[rows, columns])


def divide(path: Path, whole: Tensor) -> None:
    manifest = read_manifest((path / "manifest.json").read_bytes())
    (path / "part-00001-of-00001.safetensors").unlink()
    files = {"state.pt": manifest["files"]["state.pt"]}
    for number, rows in enumerate((slice(0, 34), slice(34, 68), slice(68, 100)), 1):
        name = f"part-{number:05d}-of-00003.safetensors"
        part = Part("weights", whole[rows], (rows.start, 0))
        (path / name).write_bytes(header([part]) + part.tensor.numpy().tobytes())
        files[name] = describe(path / name)
    tensors = [{**manifest["tensors"][0], "mesh": [3], "placements": [[0]]}]
    (path / "manifest.json").write_text(manifest_text({**manifest, "files": files, "tensors": tensors}))


PLACEMENTS = [((), ()), ((0,), ()), ((0, 2), (0,)), ((0,), (1,)), ((1,), (0,)), ((0, 2), (0,))]


@given(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.integers(1, 5), st.sampled_from(PLACEMENTS))
def test_parts_are_where_torch_has_them(
    shape: tuple[int, int], rows: int, placements: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """FSDP over `rows` ranks, layers over two; cut twice in one dimension, evenly, as torch asks for."""
    mesh = (rows, 2)
    if placements[0] == (0, 2):
        shape = (shape[0] * rows * 2, shape[1])
    kinds = [
        Replicate() if not one else Shard(one[0]) if len(one) == 1 else _StridedShard(one[0], split_factor=one[1])
        for one in placements
    ]
    expected = []
    for number, place in enumerate(np.ndindex(*mesh)):
        size, start = _compute_local_shape_and_global_offset(shape, mesh, list(place), kinds)
        copy = any(at and not one for at, one in zip(place, placements, strict=True))
        if all(size) and not copy:
            expected.append((number, list(start), [one + more for one, more in zip(start, size, strict=True)]))
    found = layout_of(shape, mesh, placements)
    assert list(zip(found.files.tolist(), found.starts.tolist(), found.ends.tolist(), strict=True)) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as we have asked
def test_other_programs_read_the_tensors(tmp_path: Path) -> None:
    weights = torch.randn(100, 70, generator=torch.Generator().manual_seed(0))
    path = Checkpointer(tmp_path).save({"model": {"weights": weights}}, step=1)
    assert torch.equal(load_file(path / "part-00001-of-00001.safetensors")["model.weights"], weights)
    path = Checkpointer(tmp_path).save({"weights": weights}, step=2)
    divide(path, weights)
    found = {"weights": torch.zeros(100, 70)}
    torch_checkpoint.load(found, storage_reader=torch_checkpoint.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(found["weights"], weights)


def test_names_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    one, other = torch.ones(5000), torch.zeros(5000)
    path = Checkpointer(tmp_path).save({"a": {"b.c": one}, "a.b": {"c": other}}, step=1)
    assert same(load_checkpoint(path).state, {"a": {"b.c": one}, "a.b": {"c": other}})


def test_a_parameter_stays_one(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save({"weight": nn.Parameter(torch.ones(5000))}, step=1)
    assert isinstance(load_checkpoint(path).state["weight"], nn.Parameter)


def test_what_a_state_carries_stays(tmp_path: Path) -> None:
    """Versions of modules, keys of all kinds, and no more than is asked for."""
    large = torch.arange(100_000.0)
    module = nn.Sequential(nn.Linear(80, 100), nn.BatchNorm1d(100)).state_dict()
    path = Checkpointer(tmp_path).save({"model": module, "few": large[:50], (1, 2): large}, step=1)
    loaded = load_checkpoint(path).state
    assert loaded["model"]._metadata == module._metadata
    assert torch.equal(loaded[1, 2], large)
    assert torch.equal(loaded["few"], large[:50])
    path = Checkpointer(tmp_path).save({"few": large[:50]}, step=2)
    assert (path / "state.pt").stat().st_size < 10_000


def test_a_tensor_of_some_ranks_is_read_from_their_files(tmp_path: Path) -> None:
    expected = torch.randn(100, 70, generator=torch.Generator().manual_seed(0))
    path = Checkpointer(tmp_path).save({"weights": expected}, step=1)
    divide(path, expected)
    manifest = read_manifest((path / "manifest.json").read_bytes())
    names = [f"part-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    for source, target in ((names[0], "first"), (names[2], names[0]), ("first", names[2])):
        (path / source).rename(path / target)
    manifest["files"] |= {names[0]: manifest["files"][names[2]], names[2]: manifest["files"][names[0]]}
    manifest["tensors"][0]["ranks"] = [2, 1, 0]
    (path / "manifest.json").write_text(manifest_text(manifest))
    assert torch.equal(load_checkpoint(path).state["weights"], expected)


@pytest.mark.parametrize("background", [True])
def test_a_state_that_grows_gets_another_writer(checkpointer: Checkpointer, capfd: pytest.CaptureFixture[str]) -> None:
    for size in (1, 2, 4):
        checkpointer.save({"weights": torch.ones(size * 1_000_000)}, step=size)
    process = checkpointer._saver._writer._process
    assert process
    assert process.poll() is None
    assert capfd.readouterr().err == ""


def test_a_rank_whose_disk_is_full_is_heard_of(tmp_path: Path) -> None:
    temporary = start_directory(tmp_path / "epoch-0001-step-00000001")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint(temporary, Share(1, 2), {"part": [memoryview(bytes(2000))]}, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    plan = Plan(str(tmp_path / "epoch-0001-step-00000001"), {}, keep=1, limit_seconds=60)
    with pytest.raises(ShareFailed, match="on rank 1"):
        write_checkpoint(temporary, Share(0, 2), {"part-0": [memoryview(b"x")]}, plan)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_writes_when_the_first_has_given_up_does_not_tell_another_cause(tmp_path: Path) -> None:
    temporary = start_directory(tmp_path / "epoch-0001-step-00000001")

    def content() -> Iterator[memoryview]:
        yield memoryview(b"x")
        shutil.rmtree(temporary)  # as the first rank does

    write_checkpoint(temporary, Share(1, 2), {"part": content()}, None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):  # a rank that has never seen it is on another disk
        write_checkpoint(temporary, Share(1, 2), {"part": [memoryview(b"x")]}, None)


def test_tensors_of_ranks_that_do_not_save_are_refused(tmp_path: Path) -> None:
    for entry in ({"mesh": (2,), "ranks": [4, 5]}, {"mesh": (2, 2), "ranks": []}):
        with pytest.raises(CheckpointError, match="other ranks than those that save"):
            _check_ranks(Split({}, [entry], [], True), Share(0, 2), tmp_path)
    fine = [{"mesh": (2,), "ranks": [1, 0]}, {"mesh": (2,), "ranks": []}, {"mesh": (), "ranks": []}]
    _check_ranks(Split({}, fine, [], True), Share(0, 2), tmp_path)


def test_lists_of_tensors_that_an_optimizer_keeps_are_read(tmp_path: Path) -> None:
    """As SOAP and Shampoo do, for ranks that divide weights."""
    parameter = nn.Parameter(torch.zeros(100, 100))
    optimizer = torch.optim.SGD([parameter])
    kept = {"factors": [torch.ones(100, 100), torch.zeros(100, 100)], "of": {"rows": torch.ones(5000)}}
    state_dict = {"state": {0: kept}, "param_groups": optimizer.state_dict()["param_groups"]}
    Checkpointer(tmp_path).save({"optimizer": state_dict}, 1)
    loaded = Checkpointer(tmp_path).latest(lazily=True)
    assert loaded
    found = divided_optimizer(loaded.state["optimizer"], optimizer)
    assert same(found["state"][0], kept)


def test_a_share_on_its_way_to_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a training that fails: its share takes longer than what else is waited for."""
    monkeypatch.setattr("hotloop.train.checkpoint.writer._END_SECONDS", 0.2)
    path = tmp_path / "epoch-0001-step-00000001"
    temporary = start_directory(path)
    size = 1 << 28
    with closing(HostMemory(size, locked=False, warn=print)) as memory:
        writer = Writer()
        plan = Plan(str(path), {"epoch": 1, "step": 1}, keep=1, limit_seconds=60)
        writer.begin(Request(str(temporary), Share(), {"part": [(0, size)]}, plan), memory.descriptor, size)
        writer.close()
    assert (path / "part").stat().st_size == size
    assert (path / "manifest.json").exists()


def test_shares_that_never_come_are_not_waited_for_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.train.checkpoint.writer._END_SECONDS", 0.2)
    path = tmp_path / "epoch-0001-step-00000001"
    temporary = start_directory(path)
    with closing(HostMemory(4096, locked=False, warn=print)) as memory:
        writer = Writer()
        plan = Plan(str(path), {"epoch": 1, "step": 1}, keep=1, limit_seconds=600)
        request = Request(str(temporary), Share(0, 2), {"part": [(0, 4096)]}, plan)
        writer.begin(request, memory.descriptor, 4096)
        writer.close()
    assert not path.exists()
