"""Each moment of a traced step goes to what held the training up then."""

import json
from pathlib import Path

import pytest

from hotloop.core.profile import KINDS
from hotloop.profile.timeline import Event, read_trace, timeline

MAIN = 1


def marks(*times: float) -> list[Event]:
    return [Event("hotloop::mark", "user_annotation", time, time, MAIN) for time in times]


def said(name: str, begin: float, end: float) -> Event:
    return Event(f"hotloop::{name}", "user_annotation", begin, end, MAIN)


def kernel(begin: float, end: float, name: str = "gemm") -> Event:
    return Event(name, "kernel", begin, end, 7)


def call(begin: float, end: float, name: str = "cudaLaunchKernel") -> Event:
    return Event(name, "cuda_runtime", begin, end, MAIN)


def seconds(events: list[Event]) -> dict[str, float]:
    found = timeline(events)
    assert found
    assert sum(found.seconds(kind) for kind in KINDS) == pytest.approx((found.span[1] - found.span[0]) / found.steps)
    return {kind: round(found.seconds(kind), 9) for kind in KINDS if found.seconds(kind) > 1e-9}


def test_on_a_cpu_operations_compute_and_the_rest_is_python() -> None:
    events = [
        *marks(0, 10),
        said("input", 1, 3),
        Event("aten::stack", "cpu_op", 1, 2, MAIN),  # part of loading
        Event("aten::linear", "cpu_op", 3, 5, MAIN),
        Event("aten::addmm", "cpu_op", 3, 4, MAIN),
        Event("autograd", "cpu_op", 4.5, 7, 2),
        Event("gloo:all_reduce", "cpu_op", 6, 9, 3),
    ]
    assert seconds(events) == {"input": 2, "compute": 4, "communication": 2, "other": 2}


def test_a_gpu_that_works_computes_whatever_the_host_does() -> None:
    events = [*marks(0, 4), kernel(0, 4), said("input", 0, 4)]
    assert seconds(events) == {"compute": 4}


@pytest.mark.parametrize(
    ("during", "kind"),
    [
        ([said("input", 1, 3)], "input"),
        ([said("copy", 1, 3)], "copy"),
        ([call(1, 3)], "launch"),
        ([call(1, 3, "aten::add")], "launch"),
        ([], "other"),
        ([kernel(1, 3, "ncclDevKernel_AllReduce")], "communication"),
        ([Event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 1, 3, 7)], "copy"),
        ([Event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 1, 3, 7)], "compute"),
    ],
)
def test_while_a_gpu_rests_it_is_what_the_host_is_at(during: list[Event], kind: str) -> None:
    busy = [kernel(0, 1), kernel(3, 4), call(0, 1), call(3, 4)]
    expected = {"compute": 2.0, kind: 2.0} if kind != "compute" else {"compute": 4.0}
    assert seconds([*marks(0, 4), *busy, *during]) == expected


def test_waiting_costs_what_a_step_would_be_shorter_without() -> None:
    """The host waits from 1 to 3 and works from 3 to 5: without waiting a step would take 3, as long as its work."""
    waits = call(1, 3, "cudaStreamSynchronize")
    events = [*marks(0, 5), call(0, 1), kernel(1, 3), waits, call(3, 5, "aten::add")]
    assert seconds(events) == pytest.approx({"compute": 2, "launch": 1, "sync": 2})
    kept_busy = [*marks(0, 5), call(0, 0.5), kernel(0, 4), call(0.5, 4, "cudaStreamSynchronize"), call(4, 5)]
    assert seconds(kept_busy) == pytest.approx({"compute": 4, "sync": 1})


def test_a_copy_that_is_read_goes_with_the_read() -> None:
    """The host waits from 1 to 4, of which the GPU copies for 2: without the read a step takes 2, as long as the host's
    own work."""
    copy = Event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 2, 4, 7, correlation=5)
    asked = Event("cudaMemcpyAsync", "cuda_runtime", 1.5, 4, MAIN, correlation=5)
    own = [*marks(0, 5), call(0, 1), kernel(1, 2), copy, call(4, 5, "aten::add")]
    assert seconds([*own, asked, said("sync", 1, 4)]) == pytest.approx({"compute": 1, "launch": 1, "sync": 3})
    beside = [*own, asked, said("sync", 1, 4), kernel(2, 3)]
    assert seconds(beside) == pytest.approx({"compute": 2, "launch": 1, "sync": 2})


@pytest.mark.parametrize("waits", [[], [call(1, 4, "cudaDeviceSynchronize")]])
def test_a_copy_that_was_asked_for_earlier_is_work_whoever_waits_for_it(waits: list[Event]) -> None:
    copy = Event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 2, 4, 7, correlation=5)
    asked = Event("cudaMemcpyAsync", "cuda_runtime", 0.5, 0.6, MAIN, correlation=5)
    found = seconds([*marks(0, 5), call(0, 1), kernel(1, 2), copy, asked, call(4, 5), *waits])
    assert found["compute"] == pytest.approx(3)


def test_what_the_profiler_adds_to_the_hosts_work_does_not_count() -> None:
    """The host works for 4 of 6 s, the GPU for 3; without a profiler a step takes 4.5: the host works for 2.5 of it."""
    waits = call(2, 4, "cudaStreamSynchronize")
    events = [*marks(0, 6), call(0, 2), kernel(1, 4), waits, call(4, 6, "aten::add")]
    found = [timeline(events, seconds) for seconds in (0.0, 4.5)]
    assert [line.seconds("sync") for line in found if line] == pytest.approx([2, 1.5])
    assert [line.added for line in found if line] == [0.0, 1.5]


def test_compilation_is_not_waiting() -> None:
    during = [call(0, 1.0001, "cudaStreamSynchronize"), said("compiling", 1.001, 3)]
    found = seconds([*marks(0, 4), kernel(0, 1), kernel(3, 4), call(3, 4), *during])
    assert found["other"] == pytest.approx(1.999)


def test_a_gpu_that_waits_for_ranks_communicates_over_the_host_too() -> None:
    events = [*marks(0, 4), kernel(0, 1), kernel(3, 4), call(0, 1), call(3, 4), call(1, 3, "gloo:all_reduce")]
    assert seconds(events) == {"compute": 2, "communication": 2}


def test_communication_beside_computing_costs_nothing() -> None:
    assert seconds([*marks(0, 4), kernel(0, 3), kernel(1, 4, "ncclKernel")]) == {"compute": 3, "communication": 1}


def test_what_lies_outside_of_the_marks_does_not_count() -> None:
    found = timeline([*marks(10, 12, 14), kernel(0, 5), kernel(11, 12), kernel(13, 14), kernel(15, 20)])
    assert found
    assert (found.steps, found.seconds("compute"), found.gpu_idle) == (2, 1.0, 0.5)


def test_without_two_marks_there_is_nothing_to_divide() -> None:
    assert timeline(marks(1)) is None


def held(moment: float, kind: str, size: int) -> Event:
    return Event("[memory]", kind, moment, moment, 0, size)


def test_a_step_on_a_gpu_that_is_behind_is_what_the_gpu_takes_for_it() -> None:
    """The host asks for three steps in 3 s, and goes on; the GPU works on them for 12 s."""
    asked = [Event("cudaLaunchKernel", "cuda_runtime", n + 0.5, n + 0.6, MAIN, correlation=n + 1) for n in range(5)]
    work = [Event("gemm", "kernel", 0.6 + 4 * n, 4.6 + 4 * n, 7, correlation=n + 1) for n in range(5)]
    found = timeline([*marks(1, 2, 3, 4), *asked, *work])
    assert found
    assert (found.span, found.steps) == ((4.6, 16.6), 3)
    assert found.seconds("compute") == pytest.approx(4)


def test_memory_is_the_most_of_each_stretch_of_the_device_that_computes() -> None:
    told = [held(9.9, "gpu_memory", 99), held(11, "gpu_memory", 7), held(11.0001, "gpu_memory", 5)]
    found = timeline([*marks(10, 12, 14), kernel(11, 12), *told, held(12, "memory", 50), held(13, "gpu_memory", 3)])
    assert found
    assert found.memory == ((11.0, 7), (13.0, 3))
    alone = timeline([*marks(10, 12, 14), held(12, "memory", 50)])
    assert alone
    assert alone.memory == ((12.0, 50),)


def test_a_chrome_trace_is_read_in_seconds(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 2e6, "dur": 5e5}
    told = {"Device Type": 1, "Device Id": 0, "Bytes": -8, "Total Allocated": 64, "Total Reserved": 128}
    memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 7, "ts": 3e6, "args": told}
    others = [memory, {"ph": "M", "name": "process_name"}]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [event, *others]}))
    assert read_trace(tmp_path / "t.json") == [
        Event("k", "kernel", 2.0, 2.5, 7),
        Event("[memory]", "gpu_memory", 3.0, 3.0, 7, 64),
    ]
