"""Which processors a rank is kept on."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hotloop.cli import train as command
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.machine import Machine
from hotloop.core.run import Result, Run
from hotloop.train import numa, training, world
from hotloop.train.numa import bind, has_several_nodes, processors_next_to, processors_of_one_node
from hotloop.train.patience import StopRequested

SMALL = {"model": {"name": "resnet18"}, "data": {"train": "images"}}


def machine(root: Path, nodes: dict[int, str], gpus: dict[str, int]) -> Path:
    for node, processors in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    for gpu, node in gpus.items():
        folder = root / f"sys/bus/pci/devices/{gpu}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "gpus", "allowed", "expected"),
    [
        ({0: "0-3", 1: "4-7"}, {"a": 0, "b": 1}, range(8), [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ({0: "0-1,4-5", 1: "2-3,6-7"}, {"a": 1, "b": 0}, range(8), [{2, 3, 6, 7}, {0, 1, 4, 5}]),
        ({0: "0-3", 1: "4-7"}, {"a": 0, "b": 1}, [0, 1, 6], [{0, 1}, {6}]),
        ({0: "0-3", 1: "4-7"}, {"a": 0, "b": 0}, range(8), [set(), set()]),  # node 1 would be idle
        ({0: "0-3", 1: "4-7"}, {"a": 0, "b": 1}, range(4), [set(), set()]),  # this process is on node 0 already
        ({0: "0-7"}, {"a": 0, "b": 0}, range(8), [set(), set()]),
        ({0: "0-7"}, {"a": -1, "b": -1}, range(8), [set(), set()]),  # a virtual machine that does not tell
        ({0: "0-3", 1: "4-7", 2: ""}, {"a": 0, "b": 1}, range(8), [{0, 1, 2, 3}, {4, 5, 6, 7}]),  # memory alone
        ({}, {}, range(8), [set(), set()]),
    ],
)
def test_ranks_share_all_processors_each_next_to_its_gpu(
    tmp_path: Path, nodes: dict[int, str], gpus: dict[str, int], allowed: range, expected: list[set[int]]
) -> None:
    root = machine(tmp_path, nodes, gpus)
    assert [processors_next_to(["a", "b"], rank, set(allowed), root) for rank in range(2)] == expected


@pytest.mark.parametrize(
    ("nodes", "gpu", "allowed", "expected"),
    [
        ({0: "0-3", 1: "4-7"}, "a", range(8), {4, 5, 6, 7}),
        ({0: "0-3", 1: "4-7"}, "a", [0, 1, 6], {6}),
        ({0: "0-3", 1: "4-7"}, "", [0, 1, 6], {0, 1}),  # the node with the most
        ({0: "0-3", 1: "4-7"}, "unknown", range(8), set()),
        ({0: "0-3", 1: "4-7"}, "a", range(4), set()),  # there is no choice
        ({0: "0-7"}, "a", range(8), set()),
    ],
)
def test_a_process_alone_may_stay_on_one_memory_node(
    tmp_path: Path, nodes: dict[int, str], gpu: str, allowed: range, expected: set[int]
) -> None:
    root = machine(tmp_path, nodes, {"a": 1})
    assert processors_of_one_node(gpu, set(allowed), root) == expected
    if expected:
        assert has_several_nodes(set(allowed), root)


def test_a_rank_that_stays_next_to_its_gpu_has_as_many_workers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processors are shared out among the ranks of this machine, not those of one node once more."""
    usable, seen = os.sched_getaffinity(0), []

    def bind(rank: int, ranks: int) -> str:
        os.sched_setaffinity(0, {min(usable)})
        return "bound"

    def train_job(job: Job, machine: Machine, *_: Any, **__: Any) -> tuple[Run, Result]:
        seen.append(machine.cpus)
        raise StopRequested

    monkeypatch.setattr(numa, "bind", bind)
    monkeypatch.setattr(training, "train_job", train_job)
    monkeypatch.setattr(world, "joined_world", lambda *_: nullcontext(world.World(rank=1, size=2, local_size=2)))
    try:
        with pytest.raises(SystemExit):
            command._train([], parse_job(SMALL, "job"), "auto", as_json=False, one_node=False)
    finally:
        os.sched_setaffinity(0, usable)
    assert seen == [len(usable)]


def test_threads_that_are_there_already_stay_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that talk to other ranks begin before it is known which GPU a rank has."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this process may use one processor only")
    one, end = min(before), threading.Event()
    monkeypatch.setattr(numa, "gpu_addresses", lambda number: ["a", "b"])
    monkeypatch.setattr(numa, "processors_next_to", lambda gpus, rank, allowed: {one})
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert bind(0, 2) == f"GPU 0 trains on the 1 of {len(before)} processors that lie next to it"
        assert thread.native_id
        assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == {one}
    finally:
        for each in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(each.name), before)
        end.set()
        thread.join()
