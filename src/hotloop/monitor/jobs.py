"""The processes that train, each under names that no other one has."""

from functools import lru_cache
from pathlib import Path

from hotloop.core.live import Live, live_folder, namespace, read_live
from hotloop.monitor.reading import JobsReading


def read_jobs(folder: Path | None) -> JobsReading:
    """What processes say of themselves in a folder.

    Of those with the same names the one that began last, as what it is started in place of may seem alive for a while;
    but one whose owner was checked comes before one that may be anybody's, from another container.

    Raises:
        OSError: the folder cannot be read.
    """
    if folder is None:
        return JobsReading()
    seen, here = read_live(folder), namespace()
    newest: dict[tuple[str, str, int], Live] = {}
    for live in sorted(seen.processes, key=lambda live: (live.namespace == here, live.begun, live.pid)):
        newest[live.job, run_name(live), live.rank] = live
    jobs = tuple(live for live in seen.processes if newest[live.job, run_name(live), live.rank] is live)
    return JobsReading(jobs, {**seen.ignored, "duplicate": len(seen.processes) - len(jobs)})


def jobs_here() -> JobsReading:
    """Those that this user may see; the folder is looked for each time, as it may be made later."""
    return read_jobs(live_folder())


def run_name(live: Live) -> str:
    """The run directory's name; "" for a script."""
    return _name(live.run)


@lru_cache(256)
def _name(run: str) -> str:
    return Path(run).name
