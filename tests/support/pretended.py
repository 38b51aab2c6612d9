"""Runs as `hotloop train` leaves them, without training."""

import json
import math
from pathlib import Path
from typing import Any

from hotloop.core.run import Result, Run


def pretend(root: Path, name: str, steps: int = 200, status: str = "finished", rate: float = 0.01, **more: Any) -> Run:
    """A run whose loss falls at a rate.

    Args:
        status: "running" leaves no result; so does "interrupted".
        more: keys of its result.
    """
    run = Run(root / name)
    run.checkpoints.mkdir(parents=True)
    run.job_file.write_text(
        f'name = "{name.split("-")[0]}"\n[optimizer]\nlearning_rate = {rate}\n[data]\ntrain = "images"\n'
    )
    run.machine_file.write_text("{}")
    with run.metrics_file.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(record(step, rate)) + "\n")
            if step % 50 == 0:
                epoch = step // 50 - 1
                scores = {"val_accuracy": 1 - math.exp(-rate * step), "val_loss": 2.4 * math.exp(-rate * step) + 0.1}
                told = {"time": 1.0, "event": "epoch", "step": step, "epoch": epoch, "train_loss": 1.0, "seconds": 5.0}
                file.write(json.dumps(told | scores) + "\n")
                (run.checkpoints / f"epoch-{epoch + 1:04d}-step-{step:08d}").mkdir()
    if status not in ("running", "interrupted"):
        result = {"metrics": {"val_accuracy": 0.9}, "epochs": steps // 50, "steps": steps, "samples_per_second": 1234.5,
                  "data_wait_share": 0.034, "train_seconds": 72.0, "device": "cuda", "precision": "bf16"}  # fmt: skip
        run.write_result(Result(**{"status": status, "name": name, **result, **more}))  # type: ignore[arg-type]
    return run


def record(step: int, rate: float = 0.01) -> dict[str, Any]:
    return {
        "time": 1.7e9 + step, "event": "step", "step": step, "epoch": step // 50, "loss": 2.3 * math.exp(-rate * step),
        "learning_rate": rate * (1 - step / 1000), "samples_per_second": 1200 + 100 * math.sin(step / 7),
        "data_wait_share": 0.05 + 0.04 * math.sin(step / 11), "memory_bytes": 4 * 2**30,
    }  # fmt: skip
