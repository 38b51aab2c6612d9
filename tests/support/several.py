"""Start the processes of `ranks.py`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def train_together(
    folder: Path, size: int, window: int, most: int = 100, device: str = "cpu", variant: str = "plain"
) -> list[dict[str, Any]]:
    """What each of `size` ranks wrote; they end within two minutes or are killed."""
    folder.mkdir()
    script = str(Path(__file__).parent / "ranks.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(size), str(folder), str(window), str(most), device, variant],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
