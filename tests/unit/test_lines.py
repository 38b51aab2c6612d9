"""Which lines of a script are at work."""

import hashlib
import sys
import threading
import time
from pathlib import Path

import torch

from hotloop.profile.lines import Lines

DATA = bytes(4096)


def rounds(seconds: float) -> int:
    """Python of some milliseconds, then a call that gives the interpreter's lock away, as torch's do."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(n * n for n in range(40_000))
        hashlib.sha256(DATA)
    return 0


def test_pythons_own_lines_are_seen_and_not_the_call_after_them() -> None:
    before = sys.getswitchinterval()
    with Lines(threading.get_ident()) as lines:
        rounds(1.5)
    assert sys.getswitchinterval() == before
    seen = lines.most_common()
    text = Path(__file__).read_text().splitlines()
    line = next(number for number, one in enumerate(text, 1) if "range(40_000)" in one)
    assert seen[f"{__file__}:{line}"] > 0.7 * sum(seen.values())


def test_what_runs_inside_of_a_module_is_told_apart() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rounds(0.5)
            return x

    found = []
    for call in (Model(), rounds):
        with Lines(threading.get_ident()) as lines:
            call(0.5)
        found.append(lines.in_models / sum(lines.most_common().values()))
        assert lines.looks >= sum(lines.most_common().values())
    assert found[0] > 0.9
    assert found[1] == 0


def test_loading_samples_is_no_line_of_the_scripts_own() -> None:
    class Samples(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            return rounds(0.3)

    with Lines(threading.get_ident()) as lines:
        for _ in torch.utils.data.DataLoader(Samples()):
            pass
    assert sum(lines.most_common().values()) < 0.1 * lines.looks
