"""An invented host: every figure is a function of the clock alone, so a demo, a dashboard and a test see the same.

Of its jobs one is healthy on four cards, one waits for data, one hangs, one is a script on a card that is too hot, and
one stands still for its checkpoints on a card with damaged memory.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotloop.core.live import Live
from hotloop.monitor.reading import Card, CardsReading, Driver, JobsReading

_PERIOD_SECONDS = 6 * 3600.0
"""All jobs begin again then."""
_GIB = 1024**3
_DRIVER = Driver("580.159.04", "13.0")
_SAVING_SECONDS = 6.0


@dataclass(frozen=True)
class DemoCard:
    """What of an invented card does not change."""

    index: int
    uuid: str
    name: str = "NVIDIA H200"
    bus_id: str = ""
    memory_bytes: int = 141 * _GIB
    power_limit_watts: float = 700.0
    sm_max_hertz: float = 1980e6
    nvlinks: int = 18
    answers: bool = True


@dataclass(frozen=True)
class _Job:
    """An invented job.

    Attributes:
        cards: that it trains on, one rank each.
        wait: share of the steps' time that goes into waiting for data.
        stalled: share of all time in which it stands still for checkpoints.
        busy, sm, tensor, dram, power: shares of what its cards could.
    """

    name: str
    way: str
    cards: tuple[int, ...]
    step_seconds: float
    samples: int
    loss: float
    wait: float
    busy: float
    sm: float
    tensor: float
    dram: float
    power: float
    memory: float
    stalled: float = 0.0
    save_every_seconds: float = 0.0
    hangs: bool = False


_JOBS = (
    _Job("gpt2-large", "train", (0, 1, 2, 3), 0.42, 64, 2.9, wait=0.01, busy=0.99, sm=0.93, tensor=0.61, dram=0.58,
         power=0.94, memory=0.83, stalled=0.004, save_every_seconds=600),
    _Job("imagenet-resnet50", "train", (4,), 0.31, 512, 1.8, wait=0.57, busy=0.44, sm=0.38, tensor=0.15, dram=0.29,
         power=0.45, memory=0.31, stalled=0.001, save_every_seconds=900),
    _Job("llama-finetune", "train", (5,), 1.1, 16, 1.4, wait=0.01, busy=1.0, sm=0.01, tensor=0.0, dram=0.0,
         power=0.21, memory=0.88, save_every_seconds=900, hangs=True),
    _Job("finetune.py", "run", (6,), 0.18, 0, 0.7, wait=0.04, busy=0.97, sm=0.82, tensor=0.4, dram=0.51, power=0.71,
         memory=0.44),
    _Job("vit-small", "train", (7,), 0.25, 256, 2.2, wait=0.02, busy=0.7, sm=0.64, tensor=0.33, dram=0.4, power=0.6,
         memory=0.37, stalled=0.28, save_every_seconds=120),
)  # fmt: skip


class Demo:
    """The invented host.

    Args:
        cards: None: eight H200.
        now: seconds since 1970.
    """

    def __init__(
        self, cards: Sequence[DemoCard] | None = None, driver: Driver = _DRIVER,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._cards = tuple(eight_h200() if cards is None else cards)
        self._driver, self._now = driver, now

    def cards(self) -> CardsReading:
        """All cards."""
        now = self._now()
        of_card = {card: job for job in _JOBS for card in job.cards}
        cards = tuple(_card(card, of_card.get(card.index), now) for card in self._cards)
        return CardsReading(self._driver, cards, sum(not card.answers for card in cards))

    def jobs(self) -> JobsReading:
        """All jobs whose cards are there."""
        now = self._now()
        uuids = {card.index: card.uuid for card in self._cards}
        jobs = [_live(job, rank, uuids, now) for job in _JOBS for rank, card in enumerate(job.cards) if card in uuids]
        return JobsReading(tuple(jobs), {"foreign": 0, "damaged": 0, "ended": 0, "duplicate": 0})

    def close(self) -> None:
        """Nothing runs beside."""


def eight_h200() -> list[DemoCard]:
    """The cards of the invented host."""
    return [
        DemoCard(index, f"GPU-00000000-0000-4000-8000-{index:012d}", bus_id=f"00000000:{0x19 + 0x11 * index:02X}:00.0")
        for index in range(8)
    ]


def recorded(path: Path) -> tuple[list[DemoCard], Driver]:
    """The cards of a machine that `hotloop doctor --save` wrote.

    Raises:
        InputError: the file is none.
    """
    from hotloop.doctor.record import load_record  # not above: pydantic takes a demo's memory twice

    record = load_record(path)
    cards = [
        DemoCard(
            gpu.index, gpu.uuid, gpu.name, gpu.bus_id, gpu.memory_bytes, gpu.power_limit_watts or 0.0,
            (gpu.clock_sm_max_mhz or 0) * 1e6, gpu.nvlinks, not gpu.error,
        )
        for gpu in record.gpus
    ]  # fmt: skip
    return cards, Driver(record.driver.version, record.driver.cuda)


def _begun(now: float) -> float:
    return now - now % _PERIOD_SECONDS


def _card(card: DemoCard, job: _Job | None, now: float) -> Card:
    if not card.answers:
        return Card(card.index, card.uuid, answers=False)
    wave = 0.02 * math.sin(now / 30 + card.index)
    since = now - _begun(now)
    share = 0.1 if job is None else job.power * (1 + wave)
    hot, damaged = card.index == 6, card.index == 7
    celsius = 88.0 + round(2 * wave, 1) if hot else round(34 + 38 * share, 1)
    clock = card.sm_max_hertz * (0.62 if hot else 0.95 if job else 0.17)
    sent = since * 21e9 if job and len(job.cards) > 1 else 0.0

    def busy(most: float) -> float:
        return round(min(1.0, most * (1 + wave)), 3)

    return Card(
        index=card.index, uuid=card.uuid, name=card.name, bus_id=card.bus_id, mig="off",
        utilization=busy(job.busy) if job else 0.0, memory_utilization=busy(job.dram) if job else 0.0,
        sm_active=busy(job.sm) if job else 0.0, sm_occupancy=busy(job.sm / 2) if job else 0.0,
        tensor_active=busy(job.tensor) if job else 0.0, dram_active=busy(job.dram) if job else 0.0,
        memory_used_bytes=round((job.memory if job else 0.004) * card.memory_bytes),
        memory_total_bytes=card.memory_bytes,
        power_watts=round(share * card.power_limit_watts, 1), power_limit_watts=card.power_limit_watts,
        energy_joules=round(since * card.power_limit_watts * (job.power if job else 0.1), 1),
        temperatures_celsius={"gpu": celsius, "memory": celsius + 6},
        clocks_hertz={"sm": round(clock / 15e6) * 15e6, "memory": 3201e6},
        clocks_max_hertz={"sm": card.sm_max_hertz, "memory": 3201e6},
        throttled={
            "power_cap": share > 0.93, "thermal_software": hot, "thermal_hardware": False, "hardware_slowdown": False,
            "power_brake": False,
        },
        ecc_errors={
            ("corrected", "volatile"): 3 * damaged, ("corrected", "aggregate"): 11 * damaged,
            ("uncorrected", "volatile"): int(damaged), ("uncorrected", "aggregate"): 2 * damaged,
        },
        remapped_rows={"corrected": 0, "uncorrected": int(damaged)},
        row_remap_pending=damaged, row_remap_failed=False,
        xids={"94": 1} if damaged else {}, xid_times={"94": _begun(now) + 60} if damaged else {},
        nvlink_receive_bytes=sent, nvlink_transmit_bytes=sent, nvlinks=card.nvlinks, nvlinks_active=card.nvlinks,
        pcie_generation=5, pcie_lanes=16, pcie_replays=0,
        processes=int(job is not None),
        process_memory_bytes={"ml": round(job.memory * card.memory_bytes)} if job else {},
    )  # fmt: skip


def _live(job: _Job, rank: int, uuids: dict[int, str], now: float) -> Live:
    begun = _begun(now)
    if job.hangs:  # since 25 minutes before all others began
        begun -= _PERIOD_SECONDS / 2
        now = _begun(now) - 25 * 60
    since = now - begun
    training = since * (1 - job.stalled)
    steps = int(training / job.step_seconds)
    every = job.save_every_seconds
    saves = int(since / every) if every else 0
    takes = job.stalled * every if job.stalled > 0.1 else _SAVING_SECONDS
    saving = bool(saves and since % every < takes)
    loss = job.loss + 6 * math.exp(-since / 3000) + 0.02 * math.sin(now / 11)
    return Live(
        pid=4000 + job.cards[rank], started=1, namespace=1, way=job.way, job=job.name,
        run="" if job.way == "run" else f"runs/{job.name}-1", rank=rank,
        ranks=sum(card in uuids for card in job.cards), gpu=uuids[job.cards[rank]], begun=begun,
        phase="saving" if saving else "step", heartbeat=now, step=steps, steps=steps,
        step_seconds=round(steps * job.step_seconds, 3), wait_seconds=round(steps * job.step_seconds * job.wait, 3),
        communication_seconds=round(0.07 * steps * job.step_seconds, 3) if len(job.cards) > 1 else None,
        samples=steps * job.samples, loss=round(loss, 4), learning_rate=3e-4 if job.way == "train" else None,
        memory_bytes=round(job.memory * 135 * _GIB),
        metrics={"val_loss": round(loss + 0.1, 4)} if rank == 0 and job.way == "train" else {},
        saves=saves, save_seconds=takes if saves else 0.0, stalled_seconds=round(since * job.stalled, 3),
        saved=begun + (saves - saving) * every + takes if saves > saving else 0.0, save_every_seconds=every,
    )  # fmt: skip
