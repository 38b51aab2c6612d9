"""A watched host in words and columns, for a terminal."""

from collections.abc import Sequence

from hotloop.core.units import format_bytes, format_seconds
from hotloop.monitor.history import LINES, History, Line, busy
from hotloop.monitor.reading import Card
from hotloop.monitor.watched import Job

CARD_COLUMNS = ("GPU", "name", "busy", "tensor", "memory", "power", "temp", "state")
JOB_COLUMNS = ("job", "rank", "GPU", "phase", "step", "a step", "wait", "loss")
_BLOCKS = "▁▂▃▄▅▆▇█"
_DASH = "–"
_LONGEST = 24
"""Characters of a job's name: one of all that it may have would leave no room for any job's figures."""


def card_cells(card: Card) -> tuple[str, ...]:
    """In the order of `CARD_COLUMNS`."""
    if not card.answers:
        return (str(card.index), card.name or _DASH, *[_DASH] * 5, "no answer")
    power = f"{card.power_watts:.0f} W" if card.power_watts is not None else _DASH
    celsius = card.temperatures_celsius.get("gpu")
    held = [reason.replace("_", " ") for reason, on in card.throttled.items() if on]
    return (
        str(card.index), card.name.removeprefix("NVIDIA "), _share(busy(card)), _share(card.tensor_active),
        _memory(card), power, f"{celsius:.0f} °C" if celsius is not None else _DASH, ", ".join(held),
    )  # fmt: skip


def job_cells(job: Job) -> tuple[str, ...]:
    """In the order of `JOB_COLUMNS`."""
    live = job.live
    rank = f"{live.rank}/{live.ranks}" if live.ranks > 1 else _DASH
    loss = f"{live.loss:.4g}" if live.loss is not None else _DASH
    step = format_seconds(job.step_seconds) if job.step_seconds is not None else _DASH
    name = live.job if len(live.job) <= _LONGEST else f"{live.job[: _LONGEST - 1]}…"
    gpu = str(job.card.index) if job.card else "?" if live.gpu else _DASH
    return name, rank, gpu, live.phase, f"{live.step:,}", step, _share(job.wait_share), loss


def details(job: Job, profiled: str = "", recent: History | None = None) -> list[tuple[str, str]]:
    """All that is known of a job.

    Args:
        profiled: what its last profile says.
        recent: lines of it and of its card.
    """
    live, card = job.live, job.card
    pairs = [
        ("verdict", job.verdict or "nothing stands out"),
        ("last profile", profiled),
        ("started by", f"hotloop {live.way}" if live.way != "library" else "a script of its own"),
        ("run", live.run),
        ("process", f"{live.pid}, rank {live.rank} of {live.ranks}" if live.pid else f"rank {live.rank}"),
        ("card", f"GPU {card.index}, {card.name}" if card else live.gpu or "none: it trains on the CPU"),
        ("phase", f"{live.phase}, step {live.step:,}"),
        ("last sign of life", f"{format_seconds(job.silent_seconds)} ago"),
        ("samples/s", f"{job.samples_per_second:,.0f}" if job.samples_per_second else ""),
        ("waits for data", _share(job.wait_share)),
        ("memory", format_bytes(live.memory_bytes) if live.memory_bytes else ""),
        ("learning rate", f"{live.learning_rate:.4g}" if live.learning_rate is not None else ""),
        ("checkpoints", f"{live.saves}, the last in {format_seconds(live.save_seconds)}" if live.saves else "none yet"),
        ("restarts", str(live.restarts) if live.restarts else ""),
        *((name, f"{value:.6g}") for name, value in live.metrics.items()),
        *((f"{line.name} lately", drawn(line, recent or {})) for line in LINES),
    ]
    return [(name, text) for name, text in pairs if text and text != _DASH]


def verdicts(jobs: Sequence[Job]) -> list[str]:
    """What stands out, a line a job, the worst first."""
    found = sorted((job for job in jobs if job.verdict), key=lambda job: job.urgency)
    return [f"{job.live.job}, rank {job.live.rank}: {job.verdict}" for job in found]


def drawn(line: Line, recent: History, width: int = 60) -> str:
    """A line's last values, so many characters at most; "" where there are none."""
    return spark(recent.get(line.name, ())[-width:], line.least, line.most)


def spark(values: Sequence[float], least: float | None = 0.0, most: float | None = None) -> str:
    """Values as blocks of eight heights, between these or what lies beyond them; None: the smallest, the largest."""
    if not values:
        return ""
    low = min(values if least is None else (least, *values))
    height = max(values if most is None else (most, *values)) - low
    return "".join(_BLOCKS[round(7 * (value - low) / height)] for value in values) if height > 0 else ""


def _share(value: float | None) -> str:
    return _DASH if value is None else f"{value:.0%}"


def _memory(card: Card) -> str:
    if card.memory_used_bytes is None or not card.memory_total_bytes:
        return _DASH
    return f"{card.memory_used_bytes / 2**30:.0f}/{card.memory_total_bytes / 2**30:.0f} GiB"
