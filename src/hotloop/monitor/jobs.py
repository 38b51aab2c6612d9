"""The processes that train, each under names that no other one has."""

from functools import lru_cache
from pathlib import Path

from hotloop.core.live import Live, live_folder, read_live
from hotloop.monitor.reading import JobsReading


def read_jobs(folder: Path | None) -> JobsReading:
    """What processes say of themselves in a folder; of those with the same names, the one that was heard of last."""
    if folder is None:
        return JobsReading()
    seen = read_live(folder)
    newest: dict[tuple[str, str, int], Live] = {}
    for live in seen.processes:
        key = (live.job, run_name(live), live.rank)
        if key not in newest or newest[key].heartbeat < live.heartbeat:
            newest[key] = live
    return JobsReading(
        tuple(newest.values()), {**seen.ignored, "duplicate": len(seen.processes) - len(newest)}
    )  # fmt: skip


def jobs_here() -> JobsReading:
    """Those that this user may see; the folder is looked for each time, as it may be made later."""
    return read_jobs(live_folder())


def run_name(live: Live) -> str:
    """The run directory's name; "" for a script."""
    return _name(live.run)


@lru_cache(256)
def _name(run: str) -> str:
    return Path(run).name
