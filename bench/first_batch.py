"""From the start of a process to the first batch of a folder with a million images: the goal is 5 s once it is indexed.

A thousand class folders of a thousand names each. The names are links to a few small JPEGs, as it is the names that
count. Each figure is a process of its own that opens the data as `hotloop train` does: list, fingerprint, workers,
batch; one starts without an index. Memory is told with two thousand files, too: it must not grow with their number.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from long_run import processes, state
from record import Figure, publish

_FEW = 2000


def make_folder(folder: Path, images: int) -> None:
    """Class folders of a thousand names."""
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(0)
    for label in range(-(-images // 1000)):
        inside = folder / f"class{label:04d}"
        inside.mkdir(parents=True)
        Image.fromarray(draws.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(inside / "image-0000.jpg")
        for number in range(1, min(1000, images - 1000 * label)):
            os.link(inside / "image-0000.jpg", inside / f"image-{number:04d}.jpg")


def first_batch(folder: Path) -> None:
    from hotloop.data.image_list import find_images
    from hotloop.data.images import ImageFiles, RandomCrop
    from hotloop.data.loader import Loaders, LoaderSettings

    data = ImageFiles(find_images(str(folder)), 64, RandomCrop((0.5, 1.0), (0.8, 1.25), 0.5), 10**8)
    data.fingerprint()
    with Loaders([(data, LoaderSettings(256))], len(os.sched_getaffinity(0))) as (loader,):
        batches = loader.batches()
        assert next(batches).size == 256
        ready = time.time()
        own = sum(state(process)["own_bytes"] for process in processes())
        print(json.dumps({"ready": ready, "own_bytes": own, "ring_bytes": loader.memory.nbytes}))
        batches.close()


def started(folder: Path, cache: str) -> dict[str, float]:
    """What a process told, and the seconds from its start to its first batch."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--folder", str(folder)], stdout=subprocess.PIPE, text=True, timeout=600, check=True,
        env={**os.environ, "XDG_CACHE_HOME": cache},
    )  # fmt: skip
    told: dict[str, float] = json.loads(done.stdout)
    return {**told, "seconds": told["ready"] - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="read its first batch here and print the time")
    arguments = parser.parse_args()
    if arguments.folder:
        first_batch(arguments.folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, few, cache = Path(temporary, "images"), Path(temporary, "few"), str(Path(temporary, "cache"))
        make_folder(folder, arguments.images)
        make_folder(few, _FEW)
        time.sleep(3)  # what was written in the last two seconds is not indexed
        cold = started(folder, cache)
        warm = [started(folder, cache) for _ in range(arguments.rounds)]
        small = [started(few, cache) for _ in range(arguments.rounds)]
    memory = {
        str(files): asdict(Figure.of([one["own_bytes"] for one in found], "bytes"))
        for files, found in ((_FEW, small), (arguments.images, warm))
    }
    content = {
        "images": arguments.images,
        "without_index_seconds": cold["seconds"],
        "seconds": asdict(Figure.of([one["seconds"] for one in warm], "s")),
        "own_bytes_by_files": memory,
        "ring_bytes": [small[0]["ring_bytes"], warm[0]["ring_bytes"]],
        "goal": "median <= 5",
    }
    publish("first_batch", content, arguments.json)


if __name__ == "__main__":
    main()
