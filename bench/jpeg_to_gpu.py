"""ResNet-50 from JPEG files on one GPU: which share of the speed on data that lies on the GPU is reached.

Photographs of 500 × 375 pixels and 110 to 140 KiB, 224 pixels to the model, batch 256, bf16, compiled. hotloop is
`hotloop train` as a whole. The rivals are the hand-written compiled loop over DataLoaders: torchvision's decoder, and
libjpeg-turbo with OpenCV, uint8 from the workers, pinned, normalised on the GPU.

Each contender is a process of its own with so many processors; an epoch after those in which all is compiled and
measured gives one figure. Goals with 16 processors: 0.97 of the data on the GPU and 1.35 times the best DataLoader;
0.90 with 8, 0.75 with 4.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import tomli_w
from contenders import Image, hotloop_step
from photographs import make_photographs
from record import Figure, add_device, of_this_source, record
from step import resnet

_WARM_EPOCHS = 2
_SCALE, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Sizes:
    """What is trained: large on a GPU, tiny without."""

    def __init__(self, device: str) -> None:
        self.device = device
        tiny = device == "cpu"
        self.network, self.classes = ("resnet18", 10) if tiny else ("resnet50", 1000)
        self.pixels, self.batch = (32, 16) if tiny else (224, 256)
        self.images, self.epochs, self.processors = (64, 1, [16]) if tiny else (8192, 7, [16, 8, 4])


def hotloop_epochs(sizes: Sizes, folder: Path, epochs: int, decode: str) -> list[float]:
    """Seconds of each epoch of `hotloop train`, from the end of one to the end of the next, by the clock."""
    job = {
        "device": sizes.device,
        "task": {"image_size": sizes.pixels, "augment": {"crop_scale": _SCALE, "crop_ratio": _RATIO, "flip": 0.5}},
        "data": {"train": str(folder), "batch_size": sizes.batch, "last_batch": "drop", "decode": decode},
        "model": {"name": sizes.network, "arguments": {"num_classes": sizes.classes}},
        "train": {"epochs": epochs + 1},
        "optimizer": {"name": "sgd", "learning_rate": 0.01},
        "speed": {"compile": sizes.device == "cuda"},
    }
    with tempfile.TemporaryDirectory() as name:
        file, run = Path(name) / "job.toml", Path(name) / "run"
        file.write_text(tomli_w.dumps(job))
        command = [sys.executable, "-m", "hotloop", "train", str(file), "--set", f"run.dir={run}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((run / "result.json").read_text())
    share, wait, advice = (result[key] for key in ("data_speed_share", "data_wait_share", "data_advice"))
    print(f"{share:.3f} of its step's speed, {wait:.3f} without data, {advice}", file=sys.stderr)
    ends = [record["time"] for record in records if record["event"] == "epoch"]
    return [after - before for before, after in pairwise(ends)]


def resident_epochs(sizes: Sizes, folder: Path, epochs: int) -> list[float]:
    """As many steps on one batch that lies on the device."""
    train = hotloop_step(
        resnet(sizes.network, sizes.classes), Image(sizes.batch, sizes.pixels, sizes.classes), sizes.device
    )
    return list(timed(sizes, folder, epochs, train))


def resident_by_hand_epochs(sizes: Sizes, folder: Path, epochs: int) -> list[float]:
    """The rivals' loop on one batch that lies on the device: no loader of theirs can be faster than that."""
    import torch

    train = by_hand(sizes)
    images, labels = Image(sizes.batch, sizes.pixels, sizes.classes).draw(sizes.device, channels_last=True)
    train(images, labels)
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    return list(timed(sizes, folder, epochs, lambda: train(images, labels)))


def timed(sizes: Sizes, folder: Path, epochs: int, train: Callable[[], object]) -> Iterator[float]:
    import torch

    steps = len(list(folder.glob("*/*.jpg"))) // sizes.batch
    for _ in range(epochs):
        started = time.perf_counter()
        for _ in range(steps):
            train()
        if sizes.device == "cuda":
            torch.cuda.synchronize()
        yield time.perf_counter() - started


def decode_opencv(path: str) -> Any:
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)
    return simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB")


class OpenCVCrop:
    """Random crop and flip of an array, resized by OpenCV."""

    def __init__(self, size: int) -> None:
        from torchvision.transforms import v2

        self.size, self.crop = size, v2.RandomResizedCrop(size, _SCALE, _RATIO)

    def __call__(self, pixels: Any) -> Any:
        import cv2
        import numpy as np
        import torch

        box = self.crop.make_params([torch.empty(3, *pixels.shape[:2], device="meta")])
        part = pixels[box["top"] : box["top"] + box["height"], box["left"] : box["left"] + box["width"]]
        small = cv2.resize(part, (self.size, self.size), interpolation=cv2.INTER_LINEAR)
        flipped = small[:, ::-1] if torch.rand(()) < 0.5 else small
        return torch.from_numpy(np.ascontiguousarray(flipped)).permute(2, 0, 1)


def dataloader_epochs(sizes: Sizes, folder: Path, epochs: int, decoder: str) -> list[float]:
    """The loop of the guides over a DataLoader."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision import datasets, io
    from torchvision.transforms import v2

    if decoder == "opencv":
        data = datasets.ImageFolder(str(folder), OpenCVCrop(sizes.pixels), loader=decode_opencv)
    else:
        crop = [v2.RandomResizedCrop(sizes.pixels, _SCALE, _RATIO, antialias=True), v2.RandomHorizontalFlip()]
        data = datasets.ImageFolder(str(folder), v2.Compose(crop), loader=partial(io.decode_image, mode="RGB"))
    workers = len(os.sched_getaffinity(0))
    gpu = sizes.device == "cuda"
    # One long pass: between passes a DataLoader starts from nothing, which large data sets do not notice.
    steps = len(data) // sizes.batch
    sampler = RandomSampler(data, num_samples=epochs * steps * sizes.batch)
    loader = DataLoader(data, sizes.batch, sampler=sampler, num_workers=workers, pin_memory=gpu, prefetch_factor=4)
    train = by_hand(sizes)
    mean, scale = (torch.tensor(values, device=sizes.device).view(3, 1, 1) for values in (_MEAN, _STD))
    # Compiled before the workers begin: else what they have in stock by then would be counted as speed.
    empty = torch.zeros(sizes.batch, 3, sizes.pixels, sizes.pixels, device=sizes.device)
    train(empty.contiguous(memory_format=torch.channels_last), torch.zeros(sizes.batch, device=sizes.device).long())
    seconds, batches = [], iter(loader)
    for _ in range(epochs):
        started = time.perf_counter()
        for pixels, labels in islice(batches, steps):
            images = pixels.to(sizes.device, non_blocking=True).float().div_(255).sub_(mean).div_(scale)
            images = images.contiguous(memory_format=torch.channels_last)
            labels = labels.to(sizes.device, non_blocking=True)
            train(images, labels)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def dali_epochs(sizes: Sizes, folder: Path, epochs: int, hardware: float, threads: int) -> list[float]:
    """The loop over a DALI pipeline that decodes the crop alone and does all else on the GPU."""
    import torch
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    gpu = sizes.device == "cuda"

    @pipeline_def(
        batch_size=sizes.batch, num_threads=min(threads, len(os.sched_getaffinity(0))), device_id=0 if gpu else None,
        prefetch_queue_depth=3, seed=1,
    )  # fmt: skip
    def images() -> Any:
        files, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="files")
        load = {"hw_decoder_load": hardware} if gpu else {}
        crops = fn.decoders.image_random_crop(
            files, device="mixed" if gpu else "cpu", output_type=types.RGB, random_area=list(_SCALE),
            random_aspect_ratio=list(_RATIO), **load,
        )  # fmt: skip
        small = fn.resize(crops, resize_x=sizes.pixels, resize_y=sizes.pixels)
        ready = fn.crop_mirror_normalize(
            small, dtype=types.FLOAT16 if gpu else types.FLOAT, output_layout="HWC",
            mean=[255 * value for value in _MEAN], std=[255 * value for value in _STD], mirror=fn.random.coin_flip(),
        )  # fmt: skip
        return ready, labels.gpu() if gpu else labels

    batches = DALIGenericIterator(
        [images()], ["images", "labels"], reader_name="files", auto_reset=True, last_batch_policy=LastBatchPolicy.DROP
    )
    train = by_hand(sizes)
    seconds = []
    for _ in range(epochs):
        started = time.perf_counter()
        for (batch,) in batches:
            train(batch["images"].permute(0, 3, 1, 2), batch["labels"].view(-1))
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def by_hand(sizes: Sizes) -> Callable[[Any, Any], None]:
    """The compiled step of the guides: images that are normalised, channels last, and labels."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    gpu = sizes.device == "cuda"
    model = resnet(sizes.network, sizes.classes)().to(sizes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    network = torch.compile(model) if gpu else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=gpu)

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(sizes.device, torch.bfloat16, enabled=gpu):
            loss = torch.nn.functional.cross_entropy(network(images), labels.long())
        loss.backward()
        optimizer.step()

    return step


CONTENDERS: dict[str, Callable[[Sizes, Path, int], list[float]]] = {
    "data on the GPU": resident_epochs,
    "the rivals' loop, data on the GPU": resident_by_hand_epochs,
    "hotloop": partial(hotloop_epochs, decode="auto"),
    "hotloop, processors alone": partial(hotloop_epochs, decode="cpu"),
    "hotloop, decoding with DALI": partial(hotloop_epochs, decode="dali"),
    "DataLoader, torchvision": partial(dataloader_epochs, decoder="torchvision"),
    "DataLoader, OpenCV": partial(dataloader_epochs, decoder="opencv"),
    "DALI, 12 % on engines, 16 threads": partial(dali_epochs, hardware=0.12, threads=16),
    "DALI, 65 % on engines, 8 threads": partial(dali_epochs, hardware=0.65, threads=8),
}
NEEDS = {"OpenCV": "cv2", "DALI": "nvidia.dali"}
"""Packages of contenders with this in their names."""


def missing(name: str) -> str:
    """What has to be installed for a contender, and is not."""
    needed = (package for word, package in NEEDS.items() if word in name)
    return next((package for package in needed if not find_spec(package)), "")


def rates(name: str, arguments: argparse.Namespace, folder: Path, processors: int) -> list[float]:
    """Images a second of each epoch that counts, of a process with so many processors."""
    command = [sys.executable, __file__, "--contender", name, "--folder", str(folder), "--device", arguments.device]
    command += ["--epochs", str(arguments.epochs), "--processors", str(processors)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--epochs", type=int, help="that count")
    parser.add_argument("--images", type=int)
    parser.add_argument("--processors", type=int, nargs="*")
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--add", action="store_true", help="to the figures that are recorded, of the same source")
    parser.add_argument("--folder", type=Path, help="where the photographs are or are to be; otherwise not kept")
    parser.add_argument("--contender", choices=CONTENDERS, help="time this one here and print its images a second")
    add_device(parser)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.device)
    for name in ("images", "epochs", "processors"):
        setattr(arguments, name, getattr(arguments, name) or getattr(sizes, name))
    if arguments.contender:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processors[0]])
        seconds = CONTENDERS[arguments.contender](sizes, arguments.folder, _WARM_EPOCHS + arguments.epochs)
        images = len(list(arguments.folder.glob("*/*.jpg"))) // sizes.batch * sizes.batch
        print(json.dumps([images / one for one in seconds[_WARM_EPOCHS:]]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        make_photographs(folder, arguments.images)
        content: dict[str, Any] = {"goals": {"16": 0.97, "8": 0.90, "4": 0.75, "best DataLoader": 1.35, "DALI": 1.12}}
        if arguments.add:
            known = of_this_source("jpeg_to_gpu")
            content |= {key: value for key, value in known.items() if key.isdecimal()}
        for processors in arguments.processors:
            found: dict[str, list[float]] = content.get(str(processors), {}).get("epochs", {})
            for name in arguments.contenders:
                if package := missing(name):
                    print(f"{name}: left out, as {package} is not installed", file=sys.stderr)
                    continue
                found[name] = rates(name, arguments, folder, processors)
                print(f"{processors} processors, {name}: {Figure.of(found[name], '1/s')}", file=sys.stderr, flush=True)
                content[str(processors)] = summary(found)
                if arguments.device == "cuda":
                    record("jpeg_to_gpu", content)
    print(json.dumps(content))


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    figures = {name: Figure.of(values, "images/s") for name, values in found.items()}
    own = figures["hotloop"].median if "hotloop" in figures else 0.0
    return {
        "epochs": found,
        "images_per_second": {name: asdict(figure) for name, figure in figures.items()},
        "ratios": {name: own / figure.median for name, figure in figures.items() if name != "hotloop"},
    }


if __name__ == "__main__":
    main()
