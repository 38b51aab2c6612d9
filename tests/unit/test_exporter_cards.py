"""Cards are read whatever they answer, and whether they answer."""

import time
from collections.abc import Callable, Iterator
from threading import Event, Thread, Timer, enumerate
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fake_nvml import ABSENT, LOST, NA, FakeCard, FakeNvml, error, working
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.xids import Xids
from hotloop.monitor.card import CardReader
from hotloop.monitor.cards import Cards
from hotloop.monitor.numbers import known
from hotloop.monitor.reading import Card, Instance

LINKS = 0xFFFFFFFF
SHORT = 0.05


@pytest.fixture
def read() -> Iterator[Callable[..., Cards]]:
    """Makes readers of invented cards, and ends them."""
    made: list[Cards] = []
    fakes: list[FakeNvml] = []

    def make(nvml: FakeNvml, limit_seconds: float = 30.0) -> Cards:
        fakes.append(nvml)
        made.append(Cards(nvml, limit_seconds, user_of=lambda pid: {1: "ann"}.get(pid, "")))
        return made[-1]

    yield make
    for fake in fakes:
        for card in fake.cards:
            card.hangs.set()
    for cards in made:
        cards.close()


def only(cards: Cards) -> Card:
    (card,) = cards.read().cards
    return card


def test_a_card_that_answers_everything(read: Callable[..., Cards]) -> None:
    fields = {
        (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0): 70,
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, LINKS): 3,
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, LINKS): 4,
    }
    activity = {pynvml.NVML_GPM_METRIC_SM_UTIL: 81.0, pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 40.0}
    cards = read(FakeNvml(FakeCard(working(0), fields, activity)))
    assert only(cards).sm_active is None, "there is no sample to compare with yet"
    reading = cards.read()
    assert reading.driver
    assert (reading.driver.version, reading.driver.cuda, reading.failures) == ("580.159.04", "13.0", 0)
    assert reading.cards == (
        Card(
            index=0, uuid="GPU-0", name="NVIDIA H200", bus_id="00000000:00:00.0", mig="off",
            utilization=0.5, memory_utilization=0.25, sm_active=0.81, tensor_active=0.4,
            memory_used_bytes=10, memory_total_bytes=100,
            power_watts=345.0, power_limit_watts=700.0, energy_joules=5.0,
            temperatures_celsius={"gpu": 61, "memory": 70},
            clocks_hertz={"sm": 1.5e9, "memory": 3.2e9}, clocks_max_hertz={"sm": 1.98e9, "memory": 3.201e9},
            throttled={
                "power_cap": True, "thermal_software": True, "thermal_hardware": False, "hardware_slowdown": False,
                "power_brake": False,
            },
            ecc_errors={
                ("corrected", "volatile"): 0, ("corrected", "aggregate"): 1,
                ("uncorrected", "volatile"): 10, ("uncorrected", "aggregate"): 11,
            },
            remapped_rows={"corrected": 1, "uncorrected": 2}, row_remap_pending=True, row_remap_failed=False,
            nvlinks=3, nvlinks_active=2, nvlink_receive_bytes=3072, nvlink_transmit_bytes=4096,
            pcie_generation=5, pcie_lanes=16, pcie_replays=7, processes=2, process_memory_bytes={"ann": 4},
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("told", "total"), [((0, 1, 2), 6144), ((0, 1), None), ((), None)])
def test_links_that_are_told_of_one_by_one_are_added(
    told: tuple[int, ...], total: int | None, read: Callable[..., Cards]
) -> None:
    fields = {(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, link): link + 1 for link in told}
    assert only(read(FakeNvml(FakeCard(working(0), fields)))).nvlink_receive_bytes == total


@pytest.mark.parametrize("without", [*working(0)])
def test_what_a_card_does_not_tell_is_none_and_the_rest_is_there(without: str, read: Callable[..., Cards]) -> None:
    whole = read(FakeNvml(FakeCard(working(0))))
    answers = working(0)
    del answers[without]
    part = read(FakeNvml(FakeCard(answers)))
    complete, lacking = vars(only(whole)), vars(only(part))
    assert lacking["answers"]
    differ = {name for name, value in lacking.items() if value != complete[name]}
    assert all(
        lacking[name] in (None, "", {}) or len(lacking[name]) < len(complete[name]) for name in differ - {"processes"}
    )
    assert len(differ) in ((0,) if without == "nvmlDeviceGetGraphicsRunningProcesses" else (1, 2, 3))


def test_pages_that_are_retired_while_it_runs_are_counted(read: Callable[..., Cards]) -> None:
    pages: dict[int, list[int] | Exception] = {
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR: [],
        pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS: error(ABSENT),
    }
    cards = read(FakeNvml(FakeCard({**working(0), "nvmlDeviceGetRetiredPages": lambda cause: pages[cause]})))
    assert only(cards).retired_pages == {"double_bit": 0}
    pages[pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR] = [4096, 8192]
    assert only(cards).retired_pages == {"double_bit": 2}


def test_what_the_driver_takes_long_to_tell_is_asked_for_every_ten_seconds() -> None:
    energy = iter([1_000, 2_000])
    answers = {**working(0), "nvmlDeviceGetTotalEnergyConsumption": lambda: next(energy)}
    now = [100.0]
    reader = CardReader(FakeNvml(FakeCard(answers)), 0, str, clock=lambda: now[0])
    told = []
    for now[0] in (100.0, 101.0, 109.9, 110.0, 119.9):
        told.append(reader.read().energy_joules)
    assert told == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_a_card_that_tells_nothing_but_its_name(read: Callable[..., Cards]) -> None:
    card = only(read(FakeNvml(FakeCard({"nvmlDeviceGetName": "NVIDIA Graphics Device"}))))
    assert card == Card(index=0, name="NVIDIA Graphics Device")


@pytest.mark.parametrize("blank", [9223372036854775794, 9223372036854775792, 0x7FFFFFF0, 0xFFFFFFFF, NA])
def test_numbers_that_stand_for_none_are_none(blank: int, read: Callable[..., Cards]) -> None:
    answers = working(0)
    for name in ("PowerUsage", "TotalEnergyConsumption", "Temperature", "PcieReplayCounter", "CurrPcieLinkWidth"):
        answers[f"nvmlDeviceGet{name}"] = blank
    answers["nvmlDeviceGetMemoryInfo"].used = blank
    answers["nvmlDeviceGetComputeRunningProcesses"][0].usedGpuMemory = blank
    answers["nvmlDeviceGetTotalEccErrors"] = lambda *_: blank
    card = only(read(FakeNvml(FakeCard(answers, {(pynvml.NVML_FI_DEV_MEMORY_TEMP, 0): blank}))))
    assert (card.power_watts, card.energy_joules, card.pcie_replays, card.pcie_lanes) == (None,) * 4
    assert (card.temperatures_celsius, card.ecc_errors, card.process_memory_bytes) == ({}, {}, {})
    assert (card.memory_used_bytes, card.memory_total_bytes) == (None, 100)


@given(st.integers(0, 10**15))
def test_numbers_that_cards_have_are_kept(number: int) -> None:
    blank = 0x7FFFFFF0 <= number <= 0x7FFFFFFF or number == 0xFFFFFFFF or 140737488355328 <= number <= 140737488355343
    assert known(number) == (None if blank else number)


@pytest.mark.parametrize("percent", [float("nan"), -1.0, 101.0, 9223372036854775794.0])
def test_an_impossible_activity_is_none(percent: float, read: Callable[..., Cards]) -> None:
    cards = read(FakeNvml(FakeCard(working(0), activity={pynvml.NVML_GPM_METRIC_SM_UTIL: percent})))
    cards.read()
    assert only(cards).sm_active is None


def threads(name: str) -> set[Thread]:
    return {thread for thread in enumerate() if thread.name == name}


def test_a_card_that_hangs_costs_its_own_figures_alone(read: Callable[..., Cards]) -> None:
    nvml = FakeNvml(FakeCard(working(0)), FakeCard(working(1)))
    cards = read(nvml, SHORT)
    cards.read()
    nvml.cards[1].hangs.clear()
    before = threads("card 1")
    for _ in range(5):
        reading = cards.read()
        assert [card.answers for card in reading.cards] == [True, False]
        assert reading.failures == 1
        assert reading.cards[1] == Card(1, "GPU-1", answers=False)
    assert threads("card 1") <= before, "one thread hangs, and no second one was started"
    calls = nvml.cards[1].calls
    cards.read()
    assert nvml.cards[1].calls == calls
    nvml.cards[1].hangs.set()
    while not cards.read().cards[1].answers:  # its thread is on its way back
        pass
    assert [card.answers for card in cards.read().cards] == [True, True]


class Counting(FakeNvml):
    """Cards that count by themselves; notes how many threads are within that at once, and can hang there."""

    def __init__(self, number: int) -> None:
        counted = {pynvml.NVML_GPM_METRIC_SM_UTIL: 50.0}
        super().__init__(*(FakeCard(working(index), activity=counted) for index in range(number)))
        self.within, self.most, self.goes_on = 0, 0, Event()
        self.goes_on.set()

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> Any:  # noqa: N802 - NVML's name
        self.within += 1
        self.most = max(self.most, self.within)
        self.goes_on.wait()
        self.within -= 1
        return super().nvmlGpmSampleGet(handle, sample)


def test_cards_are_asked_for_their_activity_one_by_one(read: Callable[..., Cards]) -> None:
    """The driver's library dies of two at a time."""
    nvml = Counting(4)
    cards = read(nvml)
    cards.read()
    nvml.goes_on.clear()  # so that each is at it for longer than until the next is asked
    Timer(0.05, nvml.goes_on.set).start()
    assert [card.sm_active for card in cards.read().cards] == [0.5] * 4
    assert nvml.most == 1


def test_a_card_that_hangs_while_it_counts_costs_the_others_their_activity_alone(read: Callable[..., Cards]) -> None:
    nvml = Counting(3)
    cards = read(nvml, 0.5)
    cards.read()
    nvml.goes_on.clear()
    for _ in range(2):
        reading = cards.read()
        assert [card.answers for card in reading.cards] == [False, True, True]
        assert [card.sm_active for card in reading.cards] == [None] * 3
        assert [card.power_watts is not None for card in reading.cards] == [False, True, True]
    nvml.goes_on.set()
    while not cards.read().cards[0].answers:  # its thread is on its way back
        pass
    assert [card.sm_active for card in cards.read().cards] == [0.5] * 3
    assert nvml.most == 1


def test_a_card_that_hangs_from_the_start_does_not_hold_up_the_others(read: Callable[..., Cards]) -> None:
    nvml = FakeNvml(FakeCard(working(0)), FakeCard(working(1)))
    nvml.cards[0].hangs.clear()
    reading = read(nvml, SHORT).read()
    assert [(card.uuid, card.answers) for card in reading.cards] == [("", False), ("GPU-1", True)]


@pytest.mark.parametrize("number", [LOST, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_card_that_falls_off_the_bus_and_comes_back(number: int, read: Callable[..., Cards]) -> None:
    nvml = FakeNvml(FakeCard(working(0)), FakeCard(working(1)))
    cards = read(nvml)
    cards.read()
    nvml.cards[0].gone = number
    reading = cards.read()
    assert reading.cards[0] == Card(0, "GPU-0", answers=False)
    assert (reading.cards[1].uuid, reading.failures) == ("GPU-1", 1)
    nvml.cards[0].gone = 0
    assert cards.read().cards[0].power_watts == 345.0


def test_a_card_that_is_lost_in_the_middle_of_a_reading(read: Callable[..., Cards]) -> None:
    answers = working(0)
    cards = read(FakeNvml(FakeCard(answers)))
    cards.read()
    answers["nvmlDeviceGetCurrPcieLinkWidth"] = error(LOST)
    assert only(cards) == Card(0, "GPU-0", answers=False)


@pytest.mark.parametrize(
    ("number", "failures"), [(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, 0), (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 1)]
)
def test_a_host_without_a_driver_has_no_cards_until_there_is_one(
    number: int, failures: int, read: Callable[..., Cards]
) -> None:
    nvml = FakeNvml(FakeCard(working(0)))
    nvml.starts = [number]
    cards = read(nvml)
    reading = cards.read()
    assert (reading.cards, reading.failures) == ((), failures)
    assert len(cards.read().cards) == 1


def test_a_card_of_which_pynvml_makes_nothing_costs_its_own_figures_alone(read: Callable[..., Cards]) -> None:
    nvml = FakeNvml(FakeCard(working(0)), FakeCard(working(1)))
    nvml.cards[0].answers["nvmlDeviceGetName"] = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    reading = read(nvml).read()
    assert ([card.answers for card in reading.cards], reading.failures) == ([False, True], 1)


def test_errors_of_cards_are_counted_by_card(read: Callable[..., Cards]) -> None:
    nvml = FakeNvml(FakeCard(working(0)), FakeCard(working(1)))
    cards = read(nvml)
    began = time.time()
    cards.read()
    for event in [(1, 79), (1, 79), (0, 31)]:
        nvml.events.put(event)
    until = time.monotonic() + 20
    while cards.read().cards[0].xids != {"31": 1} and time.monotonic() < until:
        pass
    nvml.cards[1].gone = LOST
    first, second = cards.read().cards
    assert (first.xids, second.xids) == ({"31": 1}, {"79": 2})
    assert not second.answers
    assert second.xid_times["79"] >= began
    cards.close()
    assert nvml.freed
    assert "xids" not in {thread.name for thread in enumerate()}


def test_a_card_that_hangs_from_the_start_keeps_no_other_from_telling_its_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotloop.core.xids._REGISTER_SECONDS", 0.1)
    nvml = FakeNvml(FakeCard(working(0)), FakeCard(working(1)))
    nvml.cards[0].hangs.clear()
    xids = Xids(nvml, range(2))
    until = time.monotonic() + 20
    while not xids.of(1)[0] and time.monotonic() < until:
        nvml.events.put((1, 79))
        time.sleep(0.01)
    assert "79" in xids.of(1)[0]
    nvml.cards[0].hangs.set()
    while not xids.of(0)[0] and time.monotonic() < until:
        nvml.events.put((0, 31))
        time.sleep(0.01)
    assert "31" in xids.of(0)[0], "it is heard once it answers"
    xids.close()


def test_parts_of_a_divided_card(read: Callable[..., Cards]) -> None:
    nvml = FakeNvml(FakeCard(working(0)), FakeCard(working(1)))
    answers: dict[str, Any] = {
        **working(0), "nvmlDeviceGetMigMode": (1, 1), "nvmlDeviceGetMaxMigDeviceCount": 2,
        "nvmlDeviceGetUtilizationRates": error(ABSENT),
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda place: (
            nvml.nvmlDeviceGetHandleByIndex(1) if place == 1 else error(pynvml.NVML_ERROR_NOT_FOUND)
        ),
    }  # fmt: skip
    nvml.cards[0].answers = answers
    nvml.cards[1].answers["nvmlDeviceGetUUID"] = "MIG-1"
    first = read(nvml).read().cards[0]
    assert (first.mig, first.uuid, first.utilization) == ("on", "GPU-0", None)
    assert first.instances == (Instance("MIG-1", "NVIDIA H200", 1, 10, 100),)


def test_memory_of_very_many_users_is_told_of_sixteen() -> None:
    processes = [SimpleNamespace(pid=pid, usedGpuMemory=pid) for pid in range(1, 41)]
    nvml = FakeNvml(FakeCard({**working(0), "nvmlDeviceGetComputeRunningProcesses": processes}))
    cards = Cards(nvml, user_of=lambda pid: f"user{pid}")
    try:
        card = only(cards)
    finally:
        cards.close()
    assert card.processes == 40
    assert set(card.process_memory_bytes) == {f"user{pid}" for pid in range(25, 41)}
