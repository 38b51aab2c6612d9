"""Memory reports, and growth that is noticed and placed."""

import mmap

import pytest
import torch

from hotloop import LeakDetector, MemoryMarks, memory_report
from hotloop.train.memory import held_since


def test_a_report_of_the_cpu_grows_with_what_is_held() -> None:
    before = memory_report("cpu")
    held = mmap.mmap(-1, 80_000_000)  # not malloc's: it may have kept as much from before
    held.write(b"x" * 80_000_000)
    after = memory_report("cpu")
    assert after.allocated_bytes - before.allocated_bytes > 60_000_000
    assert after.peak_bytes >= after.allocated_bytes - 1_000_000
    assert after.fragmentation == 0
    held.close()


def test_marks_are_printed_in_order() -> None:
    marks = MemoryMarks("cpu")
    marks.mark("start")
    marks.mark("model made")
    lines = str(marks).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["start", "model made"]
    assert "in tensors" in lines[0]


def snapshot(*blocks: tuple[int, int, str]) -> dict[str, list[dict[str, object]]]:
    """As torch's allocator gives it: blocks of address, size and file, each allocated inside torch."""
    frames = {"filename": f"{torch.__file__[:-11]}nn/functional.py", "line": 3, "name": "relu"}
    held = [
        {"address": address, "size": size, "state": state,
         "frames": [frames, {"filename": file, "line": 7, "name": "train"}]}
        for address, size, file in blocks for state in ("active_allocated",)
    ]  # fmt: skip
    free = {"address": 1, "size": 2, "state": "inactive", "frames": []}
    return {"segments": [{"blocks": [*held, free]}]}


def test_what_is_held_is_counted_by_line() -> None:
    after = snapshot((10, 100, "a.py"), (20, 300, "b.py"), (30, 50, "a.py"), (40, 5, "a.py"))
    sites = held_since({40}, after)
    assert [(site.bytes, site.count) for site in sites] == [(300, 1), (150, 2)]
    assert "b.py, line 7" in sites[0].line


@pytest.mark.parametrize(
    ("sizes", "grows"),
    [
        ([100] * 30, False),
        ([100, 90, 120, 80, 130, 90] * 5, False),
        (list(range(100, 400, 10)), True),
        ([0, 50, 70, *[100] * 30], False),
        ([100] * 10 + list(range(100, 400, 10)), True),
    ],
    ids=["constant", "up and down", "growing", "growing at first", "growing later"],
)
def test_growth_is_noticed_once(monkeypatch: pytest.MonkeyPatch, sizes: list[int], grows: bool) -> None:
    recording: list[bool] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **key: recording.append("enabled" not in key)
    )
    taken = iter([snapshot((10, 100, "a.py")), snapshot((10, 100, "a.py"), (20, 900, "loop.py"))])
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: next(taken))
    told: list[str] = []
    readings = iter(sizes)
    detector = LeakDetector(told.append, least_bytes=10, read=lambda: next(readings))
    for step in range(len(sizes)):
        detector.look(step * 10)
    assert len(told) == grows
    assert recording == ([True, False] if grows else [])
    if grows:
        assert "memory grows by 1 B a step" in told[0]
        assert "loop.py, line 7" in told[0]
