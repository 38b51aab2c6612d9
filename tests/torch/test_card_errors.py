"""A training says what its GPU's driver tells of errors."""

from queue import Empty, Queue

import pytest
import torch

pytest.importorskip("pynvml", reason="pip install nvidia-ml-py")

import pynvml
from fake_nvml import ABSENT, LOST, FakeCard, FakeNvml, error, working

from hotloop.train.card_errors import CardErrors, card_errors


@pytest.mark.parametrize(
    ("xid", "ecc", "said", "more"),
    [
        (79, 0, ["a serious error (Xid 79); ", "drain and reset the card"], []),
        (94, 3, ["an error that it has contained (Xid 94); ", "ROW_REMAPPER"], ["has 3 uncorrectable errors"]),
        (31, error(ABSENT), ["a program's (Xid 31); ", "hotloop explain"], []),
        (154, error(LOST), ["whether it is to be recovered (Xid 154)"], []),
    ],
)
def test_an_error_of_the_trainings_own_card_is_told_once(
    xid: int, ecc: int | Exception, said: list[str], more: list[str]
) -> None:
    nvml, told = FakeNvml(FakeCard(working(0)), FakeCard(working(1))), Queue[str]()
    nvml.cards[1].answers["nvmlDeviceGetTotalEccErrors"] = ecc
    with CardErrors(nvml, "GPU-1", told.put):
        for event in ((0, 13), (1, xid), (1, xid), (1, 62)):
            nvml.events.put(event)
        lines = [told.get(timeout=20) for _ in range(2 + len(more))]
    assert lines[0].startswith("GPU 1 (GPU-1) tells ")
    assert [part for part in said if part not in lines[0]] == []
    assert [part for part in more if part not in lines[1]] == []
    assert "Xid 62" in lines[-1], "neither the other card's, nor the same again"


@pytest.mark.parametrize("start", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION])
def test_where_nobody_may_be_asked_nothing_is_told(start: int) -> None:
    nvml, told = FakeNvml(FakeCard(working(0))), Queue[str]()
    nvml.starts.append(start)
    nvml.events.put((0, 79))
    with CardErrors(nvml, "GPU-0", told.put), pytest.raises(Empty):
        told.get(timeout=0.5)


def test_a_driver_that_hangs_keeps_no_training_from_ending() -> None:
    nvml = FakeNvml(FakeCard(working(0)))
    nvml.cards[0].hangs.clear()
    told: list[str] = []
    with CardErrors(nvml, "GPU-0", told.append):
        assert not nvml.cards[0].hangs.is_set()
    nvml.cards[0].hangs.set()
    assert not told


def test_a_training_on_a_cpu_asks_nobody() -> None:
    with card_errors(torch.device("cpu"), print) as watched:
        assert watched is None
