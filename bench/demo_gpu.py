"""The demo on a GPU: accuracy, speed and share of data wait over several seeds. The goal: accuracy of at least 0.98."""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from record import Figure, publish

JOB = Path(__file__).parents[1] / "examples/digits/job.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    from hotloop.core.job_file import load_job
    from hotloop.core.machine import read_machine
    from hotloop.train.observer import Observer
    from hotloop.train.training import train_job

    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            job = load_job(JOB, [f"seed={seed}", f"run.dir={folder}/{seed}", f"device={arguments.device}"])
            results.append(train_job(job, read_machine(), Observer())[1])
            if results[-1].status != "finished":
                sys.exit(f"the run with seed {seed} {results[-1].status}")
    content = {
        "val_accuracy": asdict(Figure.of([result.metrics["val_accuracy"] for result in results], "share")),
        "samples_per_second": asdict(Figure.of([result.samples_per_second for result in results], "1/s")),
        "data_wait_share": asdict(Figure.of([result.data_wait_share for result in results], "share")),
        "train_seconds": asdict(Figure.of([result.train_seconds for result in results], "s")),
        "precision": results[0].precision,
        "goal": "val_accuracy >= 0.98 for every seed",
    }
    publish("demo_gpu" if arguments.device == "cuda" else "demo_cpu", content, arguments.json)


if __name__ == "__main__":
    main()
