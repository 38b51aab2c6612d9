"""What is tried: kernels of several kinds with checked results, and rates. Names of GPUs are CUDA's numbers."""

import ctypes
import io
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from hotloop.doctor.probing.tensorflow import tensorflow

Measured = Iterator[tuple[str, float, str] | tuple[str, float, str, str]]
"""Of one probe: names, values and units; and a library's own words, where they matter."""

_PTX_OF_CUDA = {
    "11.7": "7.7", "11.8": "7.8", "12.1": "8.1", "12.4": "8.4", "12.6": "8.5", "12.8": "8.7", "12.9": "8.8",
    "13.0": "9.0", "13.1": "9.1", "13.2": "9.2",
}  # fmt: skip
"""The PTX version that a CUDA's compiler writes (PTX ISA, release notes)."""
_PTX = ".version {version}\n.target sm_{target}\n.address_size 64\n.visible .entry nothing() {{ ret; }}\n"
_TRITON_FROM = (7, 0)
_MATRIX = 8192
_COPY_BYTES = 1 << 30
_DISK_BYTES = 256 << 20
_DECODE_SECONDS = 1.0
_REDUCE_FLOATS = 1 << 28


def start(gpu: str) -> None:
    """Import torch and make a context, which takes longer than a probe."""
    _torch(gpu).zeros(1, device="cuda")


def _torch(gpu: str) -> Any:
    import torch

    torch.cuda.set_device(int(gpu))
    return torch


def _equal(name: str, got: Any, expected: Any, tolerance: float) -> None:
    """Against the same in float64 on the processor.

    Raises:
        AssertionError: they are further apart than `tolerance` of the largest value.
    """
    off = float((got.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not off <= tolerance:  # NaN too
        raise AssertionError(f"wrong result of {name}: {off:.2g} off, {tolerance:.2g} allowed")


def kernels(gpu: str) -> Measured:
    """Kernels that torch was built with: elementwise, reduction, sort, indexing, random numbers, matrix product."""
    torch = _torch(gpu)
    host = torch.rand(1 << 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    device = host.float().cuda()
    _equal("fill", torch.empty(1000, device="cuda").fill_(2.5), torch.full((1000,), 2.5, dtype=torch.float64), 0)
    _equal("add and multiply", device * 3 + device, host.float().double() * 4, 1e-6)
    _equal("sum", device.sum(), host.float().double().sum(), 1e-5)
    _equal("sort", device.sort().values, host.float().double().sort().values, 0)
    places = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(1))
    _equal("index", device[places.cuda()], host.float().double()[places], 0)
    mean = torch.rand(1 << 22, device="cuda").mean()
    _equal("random numbers", mean, torch.tensor(0.5, dtype=torch.float64), 0.01)
    square = host[: 512 * 512].reshape(512, 512)
    _equal("matrix product", device[: 512 * 512].reshape(512, 512) @ device[: 512 * 512].reshape(512, 512),
           square @ square, 3e-3)  # fmt: skip
    torch.cuda.synchronize()
    yield from ()


def convolution(gpu: str) -> Measured:
    """cuDNN, forward and backward."""
    torch = _torch(gpu)
    images = torch.randn(4, 16, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(32, 16, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for dtype, device in ((torch.float64, "cpu"), (torch.float32, "cuda")):
        given, kernel = (one.to(device, dtype, copy=True).requires_grad_() for one in (images, weight))
        out = torch.nn.functional.conv2d(given, kernel, padding=1)
        out.square().sum().backward()
        results.append((out.detach(), given.grad, kernel.grad))
    for name, expected, got in zip(("output", "input's gradient", "weight's gradient"), *results, strict=True):
        _equal(f"convolution, {name}", got, expected, 5e-3)  # TF32
    yield from ()


def triton(gpu: str) -> Measured:
    """A kernel that Triton compiles here: compiler, headers, assembler, launch."""
    torch = _torch(gpu)
    if torch.cuda.get_device_capability() < _TRITON_FROM or not find_spec("triton"):
        return
    from hotloop.doctor.probing.triton_kernel import doubled

    numbers = torch.arange(5000, device="cuda", dtype=torch.float32)
    _equal("a Triton kernel", doubled(numbers), torch.arange(5000, dtype=torch.float64) * 2, 0)
    yield from ()


def ptx(gpu: str) -> Measured:
    """PTX of torch's CUDA, compiled by the driver: what is missing where the driver is the older of the two."""
    torch = _torch(gpu)
    version = _PTX_OF_CUDA.get(torch.version.cuda)
    if version is None:
        return
    # For an old architecture, which the card runs too: newer ones may be unknown to this PTX version.
    target = 75 if torch.cuda.get_device_capability() >= (7, 5) else 52
    module = ctypes.c_void_p()
    text = _PTX.format(version=version, target=target).encode()
    code = ctypes.CDLL("libcuda.so.1").cuModuleLoadData(ctypes.byref(module), text)
    if code:
        told = "the provided PTX was compiled with an unsupported toolchain" if code == 222 else "the driver refuses it"
        raise RuntimeError(f"PTX {version} of CUDA {torch.version.cuda}: error {code}, {told}")
    yield from ()


def _seconds(torch: Any, work: Callable[[], object], repeats: int = 7) -> float:
    """Of one call, median, by the GPU's events."""
    work()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return float(statistics.median(found))


def matrices(gpu: str) -> Measured:
    """Matrix products of 8192³, or of 4096³ where memory is short."""
    torch = _torch(gpu)
    size = _MATRIX if torch.cuda.mem_get_info()[0] > 8e9 else _MATRIX // 2
    precisions = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
    if torch.cuda.get_device_capability() < (8, 0):
        del precisions["bf16"], precisions["tf32"]
    for name, dtype in precisions.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = torch.randn(2, size, size, device="cuda").to(dtype)
        for _ in range(3):
            a @ b
        yield f"matrix product, {name}", 2 * size**3 / _seconds(torch, lambda a=a, b=b: a @ b) / 1e12, "TFLOP/s"  # type: ignore[misc]


def memory(gpu: str) -> Measured:
    """Copies within the card, what is read and what is written counted."""
    torch = _torch(gpu)
    size = min(_COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    yield "device memory", 2 * size / _seconds(torch, lambda: target.copy_(source)) / 1e9, "GB/s"


def copies(gpu: str) -> Measured:
    """Between host and card, page-locked and not; the link's generation and width are read during a copy."""
    torch = _torch(gpu)
    size = min(_COPY_BYTES, torch.cuda.mem_get_info()[0] // 4) // 2
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    pageable = torch.empty(size, dtype=torch.uint8).fill_(1)
    ways = {
        "host to device, page-locked": lambda: device.copy_(pinned, non_blocking=True),
        "device to host, page-locked": lambda: pinned.copy_(device, non_blocking=True),
        "host to device, pageable": lambda: device.copy_(pageable),
    }
    for name, way in ways.items():
        yield name, size / _seconds(torch, way) / 1e9, "GB/s"
    generation, width = _link(torch, int(gpu), lambda: [device.copy_(pinned, non_blocking=True) for _ in range(20)])
    torch.cuda.synchronize()
    if generation:
        yield "PCIe generation under load", generation, ""
        yield "PCIe lanes under load", width, ""


def _link(torch: Any, number: int, load: Callable[[], object]) -> tuple[int, int]:
    """Of PCIe while `load` goes on, a fifth of a second: at idle it steps down."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(number).uuid}")
        load()
        return nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    except nvml.NVMLError:  # parts of cards, WSL
        return 0, 0


def all_reduce(_: str) -> Measured:
    """NCCL over all cards, the sum checked; bus bandwidth of 1 GiB."""
    import torch

    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-") as folder:
        seconds = f"{folder}/seconds"
        torch.multiprocessing.spawn(_rank, (count, folder, seconds), nprocs=count)  # type: ignore[attr-defined, no-untyped-call]
        with open(seconds) as file:
            elapsed = float(file.read())
    moved = 2 * (count - 1) / count * 4 * _REDUCE_FLOATS
    yield f"NCCL all-reduce over {count} GPUs, bus", moved / elapsed / 1e9, "GB/s"


def _rank(rank: int, size: int, folder: str, seconds: str) -> None:
    import torch
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    ones = torch.ones(_REDUCE_FLOATS, device="cuda")
    distributed.all_reduce(ones)
    if not bool((ones == size).all()):
        raise AssertionError("wrong result of an all-reduce")
    ones.zero_()
    elapsed = _seconds(torch, lambda: distributed.all_reduce(ones))
    if rank == 0:
        with open(seconds, "w") as file:
            file.write(str(elapsed))
    distributed.barrier()
    distributed.destroy_process_group()


def decode(_: str) -> Measured:
    """JPEG files of 500 x 375 that one processor decodes in a second."""
    from PIL import Image

    noise = Image.effect_noise((125, 94), 60).resize((500, 375))
    file = io.BytesIO()
    Image.merge("RGB", (noise, noise.rotate(180), noise)).save(file, "JPEG", quality=90)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < _DECODE_SECONDS:
        Image.open(io.BytesIO(file.getvalue())).convert("RGB")
        count += 1
    yield "JPEG decoding on one processor", count / (time.perf_counter() - started), "images/s"


def disk(_: str) -> Measured:
    """A file of 256 MiB, written and read beside the page cache, in the folder for temporary files."""
    block = mmap.mmap(-1, 4 << 20)
    block.write(os.urandom(4 << 20))
    with tempfile.NamedTemporaryFile(prefix="hotloop-doctor-") as file:
        started = time.perf_counter()
        for _place in range(_DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield "disk, writing", _DISK_BYTES / (time.perf_counter() - started) / 1e6, "MB/s"
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # tmpfs has none
            return
        with open(descriptor, "rb", buffering=0) as source:
            started = time.perf_counter()
            while source.readinto(block):
                pass
            yield "disk, reading", _DISK_BYTES / (time.perf_counter() - started) / 1e6, "MB/s"


PROBES: dict[str, Callable[[str], Measured]] = {
    "kernels": kernels,
    "convolution": convolution,
    "triton": triton,
    "ptx": ptx,
    "matrices": matrices,
    "memory": memory,
    "copies": copies,
    "all_reduce": all_reduce,
    "decode": decode,
    "disk": disk,
    "tensorflow": tensorflow,
}
