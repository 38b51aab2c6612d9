"""Installed packages that bear on training, what torch asks of them, and TensorFlow's record of its build."""

import ctypes.util
import runpy
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_CHOSEN = ("torch", "torchvision", "torchaudio", "triton", "numpy", "tensorflow", "jax", "jaxlib", "timm", "pillow",
           "simplejpeg", "torchao", "transformers", "accelerate", "lightning", "flash-attn", "xformers", "deepspeed",
           "opencv-python", "nvidia-ml-py", "tensorflow-cpu", "tf-nightly")  # fmt: skip
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly")


def read() -> dict[str, Any]:
    """`packages`, `pins` and `tensorflow`. Imports none of them."""
    chosen: dict[str, str] = {}
    for one in metadata.distributions():
        name = canonicalize_name(one.metadata["Name"] or "")
        if name in _CHOSEN or name.startswith(("nvidia-", "pytorch-triton")):
            chosen.setdefault(name, one.version or "")  # the first one in the path is the one that is imported
    return {"packages": dict(sorted(chosen.items())), "pins": _pins(), "tensorflow": _tensorflow(chosen)}


def _pins() -> list[dict[str, str]]:
    found = []
    for holder in ("torch", "torchvision"):
        try:
            asked = metadata.requires(holder) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, asked):
            exact = [one.version for one in requirement.specifier if one.operator == "=="]
            if not exact or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            try:
                installed = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                installed = ""
            found.append({"package": requirement.name, "asked": exact[0], "installed": installed})
    return found


def _tensorflow(packages: dict[str, str]) -> dict[str, Any] | None:
    """From its file of build facts, which needs no import of the whole (8 s)."""
    package = next((name for name in _TENSORFLOWS if name in packages), None)
    if package is None:
        return None
    try:
        file = metadata.distribution(package).locate_file("tensorflow/python/platform/build_info.py")
        facts = runpy.run_path(str(file))["build_info"]
    except Exception:  # of another layout: nothing is known of it
        return None
    cuda = str(facts.get("cuda_version", ""))
    needed = {"cudart": cuda.split(".")[0], "cudnn": str(facts.get("cudnn_version", "")).split(".")[0]}
    missing = [f"lib{name}.so.{major}" for name, major in needed.items() if cuda and not _findable(name, major)]
    return {"version": packages[package], "cuda": cuda, "cudnn": str(facts.get("cudnn_version", "")),
            "missing": missing}  # fmt: skip


def _findable(name: str, major: str) -> bool:
    """In a wheel of NVIDIA's, or by the system's loader."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    return any(wheels.glob(f"*/lib/lib{name}.so.{major}*")) or bool(ctypes.util.find_library(name))
