"""What one look at a host finds, as plain data. What was not told is None, or not there; never 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hotloop.core.live import Live


@dataclass(frozen=True)
class Instance:
    """A part of a card that MIG has divided."""

    uuid: str
    name: str
    number: int
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True)
class Card:
    """One card. Shares are of 1.

    Attributes:
        answers: False: it has fallen off the bus or hangs, and nothing else is known but `index` and, mostly, `uuid`.
        mig: "on" for a card that is divided, "off" for one that could be, "" otherwise.
        utilization: of the time between two samples of the driver's, in which a kernel ran at all.
        memory_utilization: of that time, in which memory was read or written.
        sm_active, sm_occupancy, tensor_active, dram_active: since the reading before, by performance monitoring (GPM).
        energy_joules: since the driver was loaded.
        temperatures_celsius: by sensor: "gpu", "memory".
        clocks_hertz, clocks_max_hertz: by clock: "sm", "memory".
        throttled: whether the clock is held down, by reason.
        ecc_errors: by kind ("corrected", "uncorrected") and counter ("volatile": since the driver was loaded,
            "aggregate": ever).
        remapped_rows: by kind.
        retired_pages: by cause; of cards before Ampere.
        xids: how often each error came since the exporter began; `xid_times`: when last, seconds since 1970.
        processes: how many use the card.
        process_memory_bytes: by the name of the user, "" where that is not known; the 16 with most.
    """

    index: int
    uuid: str = ""
    answers: bool = True
    name: str = ""
    bus_id: str = ""
    mig: str = ""
    utilization: float | None = None
    memory_utilization: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperatures_celsius: Mapping[str, float] = field(default_factory=dict)
    clocks_hertz: Mapping[str, float] = field(default_factory=dict)
    clocks_max_hertz: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[str, bool] = field(default_factory=dict)
    ecc_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    remapped_rows: Mapping[str, int] = field(default_factory=dict)
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    retired_pages: Mapping[str, int] = field(default_factory=dict)
    xids: Mapping[str, int] = field(default_factory=dict)
    xid_times: Mapping[str, float] = field(default_factory=dict)
    nvlink_receive_bytes: float | None = None
    nvlink_transmit_bytes: float | None = None
    nvlinks: int | None = None
    nvlinks_active: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    pcie_replays: int | None = None
    processes: int | None = None
    process_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    instances: tuple[Instance, ...] = ()


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, and the newest CUDA that it knows."""

    version: str
    cuda: str


@dataclass(frozen=True)
class CardsReading:
    """All cards of a host.

    Attributes:
        driver: None where there is none.
        failures: cards that did not answer, or 1 if the driver did not.
    """

    driver: Driver | None = None
    cards: tuple[Card, ...] = ()
    failures: int = 0


@dataclass(frozen=True)
class JobsReading:
    """All processes of a host that train with hotloop.

    Attributes:
        ignored: how many were left out, by reason: "foreign", "damaged", "ended" or "duplicate".
    """

    jobs: tuple[Live, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)


class Host(Protocol):
    """Where readings come from: this machine, or an invented one."""

    def cards(self) -> CardsReading:
        """Takes at most some seconds, also where a card hangs."""

    def jobs(self) -> JobsReading:
        """Raises OSError where the folder cannot be read."""

    def close(self) -> None:
        """End what runs beside."""
