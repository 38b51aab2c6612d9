"""torch, as a process sees it that imports it: versions, kernels, and which libraries were loaded from where."""

import os
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_LIBRARIES = {
    "libcuda": "", "libcudart": "cuda_runtime", "libcublas": "cublas", "libcublasLt": "cublas", "libcudnn": "cudnn",
    "libnccl": "nccl", "libnvjpeg": "nvjpeg", "libcufft": "cufft", "libcusparse": "cusparse", "libnvrtc": "cuda_nvrtc",
}  # fmt: skip
"""Library -> folder of its wheel below site-packages/nvidia; since CUDA 13 all of the toolkit lie in one, cu13."""
_PACKAGES = {"cudnn": "cudnn", "nccl": "nccl", "cublas": "cublas", "cuda_runtime": "cuda-runtime", "nvjpeg": "nvjpeg"}
"""Folder -> nvidia-NAME, with -cu12 and the like behind it."""
_FILE = re.compile(r"/(lib[A-Za-z]+)\.so([\d.]*)$")


def read() -> dict[str, Any] | None:
    """The `torch` part; None where it is not installed."""
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    started = time.perf_counter()
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        lines = str(error).strip().splitlines()
        return {"version": metadata.version("torch"), "error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "architectures": (torch._C._cuda_getArchFlags() or "").split()
        if hasattr(torch._C, "_cuda_getArchFlags")
        else [],
        "import_seconds": seconds,
    }
    if found["cuda"]:
        found |= _of_cuda(torch)
    return found | {"libraries": _loaded()}


def _of_cuda(torch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": [], "multiprocessors": [], "available": False}
    try:
        torch.cuda.init()
        found["available"] = True
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            found["devices"].append(properties.name)
            found["multiprocessors"].append(properties.multi_processor_count)
    except Exception as error:
        found["cuda_error"] = str(error).strip().splitlines()[0]
    cudnn = torch.backends.cudnn.version()
    found["cudnn"] = _cudnn(cudnn) if cudnn else ""
    try:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without
        found["nccl"] = ""
    return found


def _cudnn(number: int) -> str:
    major = number // 10_000 if number >= 90_000 else number // 1000
    rest = number - major * (10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _loaded() -> list[dict[str, Any]]:
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if ".so" in line and len(line.split()) > 5}
    wheels = {str(path.parent.parent.parent / "nvidia") for path in map(Path, paths) if "/torch/lib/" in str(path)}
    found = []
    for path in sorted(paths):
        named = _FILE.search(path)
        if not named or named[1] not in _LIBRARIES:
            continue
        folder = _LIBRARIES[named[1]]
        expected = _expected(named[1], folder, wheels)
        package = _version(_PACKAGES[folder]) if folder in _PACKAGES else ""
        version = _file_version(path, named[1])
        elsewhere = bool(expected) and os.path.realpath(path) != os.path.realpath(expected)
        found.append({
            "name": named[1], "path": path, "version": version, "expected": expected, "expected_version": package,
            "why": _why(path) if elsewhere else "",
        })  # fmt: skip
    return found


def _expected(name: str, folder: str, wheels: set[str]) -> str:
    """The file in the wheel that torch brings it in; "" where there is none."""
    for wheel in wheels:
        for place in (folder, "cu13", "cu12"):
            files = sorted(Path(wheel, place, "lib").glob(f"{name}.so*")) if place else []
            if files:
                return str(files[0])
    return ""


def _why(path: str) -> str:
    """What made the loader take this file."""
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        for part in re.split("[: ]", os.environ.get(variable, "")):
            if part and (path == part or os.path.realpath(os.path.dirname(path)) == os.path.realpath(part)):
                return f"{variable}={part}"
    return "the loader's own folders (ldconfig -p)"


def _file_version(path: str, name: str) -> str:
    """Of the file's own name once links are followed: libcudnn.so.9.24.0; else what the library says."""
    real = _FILE.search(os.path.realpath(path))
    if real and real[2].count(".") > 1:
        return real[2].strip(".")
    import ctypes

    function = {"libcudnn": "cudnnGetVersion"}.get(name)
    if function is None:
        return ""
    get = getattr(ctypes.CDLL(path), function)
    get.restype = ctypes.c_size_t
    return _cudnn(get())


def _version(name: str) -> str:
    """Of a package of NVIDIA's, whatever CUDA it is for."""
    for suffix in ("-cu13", "", "-cu12", "-cu11"):
        try:
            return metadata.version(f"nvidia-{name}{suffix}")
        except metadata.PackageNotFoundError:
            continue
    return ""
