"""Probes of this machine: each set in a process with limits, one that hangs or crashes costs itself alone."""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hotloop.doctor.expect import expected
from hotloop.doctor.read import own_module
from hotloop.doctor.record import MachineRecord, Rate

OF_A_GPU = ("kernels", "convolution", "triton", "ptx", "matrices", "memory", "copies")
OF_ALL_GPUS = ("all_reduce",)
OF_THE_HOST = ("decode", "disk")
OF_TENSORFLOW = ("tensorflow",)
_PROBE_SECONDS = 30.0
_LONGER_SECONDS = {"all_reduce": 180.0, "tensorflow": 90.0}
"""For as many imports of torch as there are GPUs, and NCCL's start between them; for TensorFlow's start."""
_END_SECONDS = 5.0
_START_SECONDS = 60.0
"""For importing torch and making a context, on a busy host."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Set:
    """Probes that one process runs: of a GPU by CUDA's number, or of the host ("-")."""

    gpu: str
    names: tuple[str, ...]


def probe(record: MachineRecord, tell: Tell) -> MachineRecord:
    """Run all probes that this machine allows; the record with their rates.

    Args:
        tell: called with a line for each probe that begins.
    """
    torch = record.torch
    gpus = len(torch.devices) if torch and torch.available else 0
    sets = [Set(str(number), OF_A_GPU) for number in range(gpus)]
    sets += [Set("-", OF_ALL_GPUS)] * (gpus > 1) + [Set("-", _of_the_host())]
    sets += [Set("-", OF_TENSORFLOW)] * (record.tensorflow is not None)
    rates = [rate for one in sets for rate in _run(one, tell)]
    return record.model_copy(update={"rates": tuple(expected(rate, record) for rate in rates)})


def _of_the_host() -> tuple[str, ...]:
    """No JPEGs where Pillow, which comes with `hotloop[train]`, is not installed: that is no fault of a machine."""
    return tuple(name for name in OF_THE_HOST if name != "decode" or find_spec("PIL"))


def _run(one: Set, tell: Tell) -> list[Rate]:
    """What they found; where a process is lost, the probe it was at has failed and another one takes the rest."""
    rates: list[Rate] = []
    left = list(one.names)
    while left:
        process = _start(one.gpu, left)
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            rates += _follow(process, lines, one.gpu, left, tell)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that the driver holds
                process.wait(1)
            reader.join(1)
    return rates


def _start(gpu: str, names: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(  # noqa: S603 - this package's own modules
        own_module("hotloop.doctor.probing", gpu, *names), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _follow(
    process: "subprocess.Popen[str]", lines: "queue.Queue[str]", gpu: str, left: list[str], tell: Tell
) -> list[Rate]:
    """Take what a process says until it ends or is past a limit; takes off `left` what is done."""
    number = int(gpu) if gpu != "-" else None
    rates: list[Rate] = []
    until = time.monotonic() + _START_SECONDS
    while left:
        try:
            line = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            rates.append(Rate(name=left.pop(0), gpu=number, error="no answer within its limit: it hangs"))
            rates += [Rate(name=name, gpu=number, error="not tried after a hang") for name in left]
            left.clear()
            return rates
        if not line:
            with suppress(subprocess.TimeoutExpired):  # it may be held at its end
                process.wait(_END_SECONDS)
            code = process.returncode
            rates.append(Rate(name=left.pop(0), gpu=number, error=f"its process ended with code {code}"))
            return rates
        said = _said(line)
        if "began" in said:
            until = time.monotonic() + _LONGER_SECONDS.get(said["began"], _PROBE_SECONDS)
            tell(f"GPU {gpu}: {said['began']}" if number is not None else said["began"])
        elif "ended" in said:
            left.remove(said["ended"])
            rates += _of(said, number)
    return rates


def _said(line: str) -> dict[str, Any]:
    """What a line tells; nothing if a library printed it."""
    with suppress(ValueError):
        said = json.loads(line)
        return said if isinstance(said, dict) else {}
    return {}


def _of(said: dict[str, Any], gpu: int | None) -> list[Rate]:
    """A probe without a rate counts as one that went well."""
    rates = [Rate(gpu=gpu, **one) for one in said["rates"]]
    if said["error"] or not rates:
        rates.append(Rate(name=said["ended"], gpu=gpu, error=said["error"], seconds=said["seconds"]))
    return rates


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
    assert process.stdout
    with process.stdout as said:
        for line in said:
            lines.put(line)
    lines.put("")  # the end
