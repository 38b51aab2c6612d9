"""The names, words and units of all metrics of cards and jobs, and what of a reading goes into which."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hotloop.core.live import PHASES
from hotloop.monitor.jobs import run_name
from hotloop.monitor.reading import Card, CardsReading, JobsReading

PREFIX = "hotloop_"
_CARD = ("uuid", "gpu")
_JOB = ("job_name", "run", "rank")


@dataclass(frozen=True)
class _Of:
    """A metric of a card.

    Attributes:
        field: of `Card`: a number, or numbers by the labels' values.
    """

    field: str
    name: str
    help: str
    labels: tuple[str, ...] = ()


CARD_METRICS = (
    _Of("utilization", "gpu_utilization_ratio", "Share of the time in which any kernel ran."),
    _Of("memory_utilization", "gpu_memory_utilization_ratio", "Share of the time in which memory was read or written."),
    _Of("sm_active", "gpu_sm_active_ratio", "Share of the multiprocessors that were busy since the last reading."),
    _Of("sm_occupancy", "gpu_sm_occupancy_ratio", "Share of the warps that were resident since the last reading."),
    _Of("tensor_active", "gpu_tensor_active_ratio", "Share of the time tensor cores were busy since the last reading."),
    _Of("dram_active", "gpu_dram_active_ratio", "Share of the memory's bandwidth used since the last reading."),
    _Of("memory_used_bytes", "gpu_memory_used_bytes", "Memory in use."),
    _Of("memory_total_bytes", "gpu_memory_total_bytes", "Memory of the card."),
    _Of("power_watts", "gpu_power_watts", "Power drawn."),
    _Of("power_limit_watts", "gpu_power_limit_watts", "Power limit in force."),
    _Of("energy_joules", "gpu_energy_joules_total", "Energy used since the driver was loaded."),
    _Of("temperatures_celsius", "gpu_temperature_celsius", "Temperature by sensor.", ("sensor",)),
    _Of("clocks_hertz", "gpu_clock_hertz", "Clock as it is.", ("clock",)),
    _Of("clocks_max_hertz", "gpu_clock_max_hertz", "Highest clock of the card.", ("clock",)),
    _Of("throttled", "gpu_throttled", "1 while the clock is held down for the reason.", ("reason",)),
    _Of("ecc_errors", "gpu_ecc_errors_total",
        "Memory errors: volatile since the driver was loaded, aggregate ever.", ("kind", "counter")),
    _Of("remapped_rows", "gpu_remapped_rows_total", "Rows of memory that were replaced by spare ones.", ("kind",)),
    _Of("row_remap_pending", "gpu_row_remap_pending", "1 while a row waits for a reset of the card to be replaced."),
    _Of("row_remap_failed", "gpu_row_remap_failed", "1 if a row could not be replaced."),
    _Of("retired_pages", "gpu_retired_pages_total", "Pages of memory taken out of use, by cause.", ("cause",)),
    _Of("xids", "gpu_xid_errors_total", "Errors (Xid) since the exporter began.", ("xid",)),
    _Of("xid_times", "gpu_xid_timestamp_seconds", "When the error (Xid) came last, since 1970.", ("xid",)),
    _Of("nvlink_receive_bytes", "gpu_nvlink_receive_bytes_total", "Data received over all NVLinks."),
    _Of("nvlink_transmit_bytes", "gpu_nvlink_transmit_bytes_total", "Data sent over all NVLinks."),
    _Of("nvlinks", "gpu_nvlinks", "NVLinks of the card."),
    _Of("nvlinks_active", "gpu_nvlinks_active", "NVLinks that are up."),
    _Of("pcie_generation", "gpu_pcie_generation", "PCIe generation in use; lower while the card is idle."),
    _Of("pcie_lanes", "gpu_pcie_lanes", "PCIe lanes in use."),
    _Of("pcie_replays", "gpu_pcie_replays_total", "PCIe packets sent again."),
    _Of("processes", "gpu_processes", "Processes that use the card."),
    _Of("process_memory_bytes", "gpu_process_memory_bytes", "Memory of processes by their user.", ("user",)),
    _Of("answers", "gpu_reading_ok", "0: the card does not answer; it hangs, or has fallen off the bus."),
)  # fmt: skip


@dataclass(frozen=True)
class _OfJob:
    """A metric of a process that trains.

    Attributes:
        field: of `Live`.
        zero: whether 0 is a figure, and not that there is none.
    """

    field: str
    name: str
    help: str
    zero: bool = True


JOB_METRICS = (
    _OfJob("heartbeat", "job_heartbeat_timestamp_seconds", "When the process last did something, since 1970."),
    _OfJob("begun", "job_start_timestamp_seconds", "When the process began to train, since 1970."),
    _OfJob("step", "job_step", "Step of the run."),
    _OfJob("steps", "job_steps_total", "Steps of this process."),
    _OfJob("step_seconds", "job_step_seconds_total", "Time that steps took, waiting for data included."),
    _OfJob("wait_seconds", "job_data_wait_seconds_total", "Time of steps in which they waited for data."),
    _OfJob("communication_seconds", "job_communication_seconds_total",
           "Time of steps in which they waited for messages of other ranks."),
    _OfJob("samples", "job_samples_total", "Samples of this process.", zero=False),
    _OfJob("loss", "job_loss", "Loss of the last logged step."),
    _OfJob("learning_rate", "job_learning_rate", "Learning rate of the last logged step."),
    _OfJob("memory_bytes", "job_memory_bytes", "Most memory allocated on the card, or resident on a CPU.", zero=False),
    _OfJob("saves", "job_checkpoints_total", "Checkpoints that the process has written."),
    _OfJob("saved", "job_checkpoint_timestamp_seconds", "When the last checkpoint was whole, since 1970.", zero=False),
    _OfJob("save_seconds", "job_checkpoint_seconds", "Time from the last checkpoint's begin until it was whole.",
           zero=False),
    _OfJob("stalled_seconds", "job_checkpoint_stall_seconds_total", "Time in which training waited for checkpoints."),
    _OfJob("save_every_seconds", "job_checkpoint_interval_seconds", "Planned time between checkpoints.", zero=False),
    _OfJob("restarts", "job_restarts_total", "How often the run was started again."),
)  # fmt: skip


Row = tuple[tuple[str, ...], float]
"""A series: its labels' values, and its number."""


@dataclass(frozen=True)
class Family:
    """A metric with its series.

    Attributes:
        name: without the prefix.
        labels: their names.
    """

    name: str
    words: str
    labels: tuple[str, ...]
    rows: Sequence[Row]

    def metric(self) -> Metric:
        """As prometheus_client has it; a counter if its name ends like one."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        made = kind(PREFIX + self.name, self.words, labels=self.labels)
        for values, number in self.rows:
            made.add_metric(values, float(number))
        return made


def card_families(reading: CardsReading) -> Iterator[Family]:
    """All metrics of cards that have a value."""
    if reading.driver:
        versions = (reading.driver.version, reading.driver.cuda)
        yield Family("driver_info", "NVIDIA's driver and its CUDA.", ("version", "cuda"), [(versions, 1)])
    cards = [(card, (card.uuid, str(card.index))) for card in reading.cards]
    names = [((*who, card.name, card.bus_id, card.mig), 1.0) for card, who in cards if card.answers]
    parts = [(part, (part.uuid, who[1]), card.bus_id) for card, who in cards for part in card.instances]
    names += [((*who, part.name, bus, str(part.number)), 1.0) for part, who, bus in parts]
    yield from _filled("gpu_info", "Cards and their MIG instances.", (*_CARD, "name", "bus_id", "mig"), names)
    for one in CARD_METRICS:
        rows = [row for card, who in cards for row in _rows(card, one, who)]
        if one.field in ("memory_used_bytes", "memory_total_bytes"):
            shares = [(who, getattr(part, one.field)) for part, who, _ in parts]
            rows += [row for row in shares if row[1] is not None]
        yield from _filled(one.name, one.help, (*_CARD, *one.labels), rows)


def job_families(reading: JobsReading) -> Iterator[Family]:
    """All metrics of jobs that have a value."""
    jobs = [(live, (live.job, run_name(live), str(live.rank))) for live in reading.jobs]
    facts = [((*who, str(live.ranks), live.way, live.gpu), 1.0) for live, who in jobs]
    yield from _filled("job_info", "Processes that train.", (*_JOB, "ranks", "way", "uuid"), facts)
    phases = [((*who, phase), float(live.phase == phase)) for live, who in jobs for phase in PHASES]
    yield from _filled("job_phase", "1 for what the process does now.", (*_JOB, "phase"), phases)
    for one in JOB_METRICS:
        # A script that only calls `hotloop.publish` tells no more than that: its zeros are what nobody has told.
        values = [(who, getattr(live, one.field), one.zero and live.way != "library") for live, who in jobs]
        rows = [(who, value) for who, value, zero in values if value is not None and (value or zero)]
        yield from _filled(one.name, one.help, _JOB, rows)
    own = [((*who, name), value) for live, who in jobs for name, value in live.metrics.items()]
    yield from _filled("job_metric", "The user's own metrics, and a validation's.", (*_JOB, "metric"), own)


def _rows(card: Card, one: _Of, who: tuple[str, ...]) -> list[Row]:
    value: Any = getattr(card, one.field)
    if one.labels:
        return [((*who, *((key,) if isinstance(key, str) else key)), number) for key, number in value.items()]
    return [] if value is None else [(who, value)]


def _filled(name: str, words: str, labels: tuple[str, ...], rows: Sequence[Row]) -> Iterator[Family]:
    if rows:
        yield Family(name, words, labels, rows)
