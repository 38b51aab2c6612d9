"""Would a script that decodes JPEG by Pillow gain by libjpeg-turbo behind Pillow's interface, with equal pixels?

Photographs in memory, decoded to a Pillow image in RGB by Pillow itself and by simplejpeg, by turns, as data sets of a
training do. Both are libjpeg-turbo underneath. torch is imported, as there: without it glibc gives each image's memory
back to the system, and Pillow, which asks for it in one piece, takes 1.6 times as long.
"""

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from photographs import make_photographs
from PIL import Image
from record import Figure, publish
from torchvision import transforms


def by_pillow(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def by_turbo(content: bytes) -> Image.Image:
    return Image.fromarray(simplejpeg.decode_jpeg(content, "RGB"))


STACK = transforms.Compose(
    [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def rate(decode: Callable[[bytes], Image.Image], files: list[bytes], whole: bool) -> float:
    """Images a second.

    Args:
        whole: crop them too, as a training does.
    """
    started = time.perf_counter()
    for content in files:
        image = decode(content)
        if whole:
            STACK(image)
    return len(files) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), arguments.files)
        files = [file.read_bytes() for file in Path(folder).glob("*/*.jpg")]
    equal = sum(np.array_equal(np.asarray(by_pillow(each)), np.asarray(by_turbo(each))) for each in files)
    content: dict[str, Any] = {"files": len(files), "equal_pixels": equal}
    for name, whole in (("decoding", False), ("with_random_crop", True)):
        rates: dict[str, list[float]] = {"Pillow": [], "libjpeg-turbo": []}
        for turn in range(arguments.rounds + 1):
            for kind, decode in (("Pillow", by_pillow), ("libjpeg-turbo", by_turbo)):
                rates[kind].append(rate(decode, files, whole))
            if not turn:  # the first allocations settle what glibc keeps
                rates = {kind: [] for kind in rates}
        ratios = [fast / plain for plain, fast in zip(*rates.values(), strict=True)]
        figures = {kind: asdict(Figure.of(each, "images/s")) for kind, each in rates.items()}
        content[name] = {"ratio": asdict(Figure.of(ratios, "x")), "images_per_second": figures}
    publish("pillow_jpeg", content, arguments.json)


if __name__ == "__main__":
    main()
