"""What "auto" means on this machine."""

import ctypes

import torch

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.machine import Machine
from hotloop.data.loader import workers_for


def resolve(job: Job, machine: Machine) -> Job:
    """The job with every "auto" that is known before the start replaced by what it stands for.

    Raises:
        InputError: the job asks for a GPU or a precision that is not there.
    """
    if job.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            'device = "cuda", and torch sees no GPU',
            f"torch {torch.__version__}, driver {machine.driver or 'none'}, {len(machine.gpus)} cards",
            "--set device=cpu, or nvidia-smi to see whether the card is there",
        )
    device = job.device if job.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    accelerated = device == "cuda"
    data, speed = job.data, job.speed
    return job.model_copy(
        update={
            "device": device,
            "precision": _precision(job.precision, accelerated),
            "data": data.model_copy(
                update={
                    "val_batch_size": 2 * data.batch_size if data.val_batch_size == "auto" else data.val_batch_size,
                    "workers": workers_for(machine.cpus, accelerated) if data.workers == "auto" else data.workers,
                }
            ),
            "speed": speed.model_copy(
                update={
                    "channels_last": accelerated if speed.channels_last == "auto" else speed.channels_last,
                    "compile": False if speed.compile == "auto" else speed.compile,
                    "keep_memory": not accelerated if speed.keep_memory == "auto" else speed.keep_memory,
                    "cudnn_benchmark": accelerated if speed.cudnn_benchmark == "auto" else speed.cudnn_benchmark,
                }
            ),
        }
    )


def _precision(asked: str, accelerated: bool) -> str:
    has_bf16 = accelerated and torch.cuda.get_device_capability() >= (8, 0)
    if asked in ("bf16", "tf32") and accelerated and not has_bf16:
        capability = ".".join(str(part) for part in torch.cuda.get_device_capability())
        raise InputError(
            f'precision = "{asked}" on {torch.cuda.get_device_name()}',
            f"{asked} needs compute capability 8.0; this card has {capability}",
            "--set precision=fp16",
        )
    if asked != "auto":
        return asked
    return "bf16" if has_bf16 else "fp16" if accelerated else "fp32"


def apply_settings(job: Job) -> None:
    """Set torch's switches for a resolved job."""
    torch.backends.fp32_precision = "ieee" if job.precision == "fp32" else "tf32"  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = bool(job.speed.cudnn_benchmark)
    if job.speed.keep_memory:
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Tell glibc to keep what is freed.

    By default it maps every large tensor anew and unmaps it when it is freed, so that each step faults all its pages
    in again. Keeping them made a ResNet's step 1.09 times as fast on two cores (bench/results/demo_epoch.json).
    The numbers are those of <malloc.h>.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # a C library other than glibc
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)
