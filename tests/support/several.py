"""Start the processes of `ranks.py` and `spread_ranks.py`."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import spread_ranks

multiprocessing.set_forkserver_preload(["ranks", "spread_ranks", "torch._dynamo"])  # once for all of them: 10 s of each


def train_together(
    folder: Path, size: int, window: int, most: int = 100, device: str = "cpu", variant: str = "plain"
) -> list[dict[str, Any]]:
    """What each of `size` ranks wrote; they end within two minutes or are killed."""
    return _together(ranks.main, folder, size, (window, most, device, variant))


def spread_over_two(folder: Path, variant: str) -> list[dict[str, Any]]:
    """What each of two ranks wrote, as `spread_ranks.py` says."""
    return _together(spread_ranks.main, folder, 2, (variant,))


def _together(main: Callable[..., None], folder: Path, size: int, more: tuple[Any, ...]) -> list[dict[str, Any]]:
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=main, args=(rank, size, folder, *more)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            process.join(120)
            assert process.exitcode == 0, (folder / f"rank-{rank}.txt").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
