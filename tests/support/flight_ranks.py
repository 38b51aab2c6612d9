"""Three ranks that do not agree, each with its dump of the flight recorder: `python flight_ranks.py KIND FOLDER`."""

import datetime
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

_SECONDS = 3


def rank_of(rank: int, folder: Path, kind: str) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=3,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )
    data = torch.ones(1024)
    try:
        for step in range(4):
            distributed.all_reduce(data)
            if kind == "late" and rank == 2 and step == 2:
                time.sleep(2 * _SECONDS)
                break
            if kind == "other" and rank == 1 and step == 2:
                distributed.broadcast(data, 0)
    except RuntimeError:
        pass  # the others' time-out
    (folder / f"trace_rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    os._exit(0)  # a group that has failed is not taken down in order


if __name__ == "__main__":
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    ranks = [multiprocessing.Process(target=rank_of, args=(rank, Path(sys.argv[2]), sys.argv[1])) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
