"""GPUs of this machine that launches hold: a lock on a file for each, which goes with the last process that has it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from hotloop.core.errors import InputError
from hotloop.core.files import lock_at_once
from hotloop.core.live import is_safe
from hotloop.core.machine import Machine
from hotloop.core.units import count

VISIBLE = "CUDA_VISIBLE_DEVICES"


def usable_gpus(machine: Machine, environment: Mapping[str, str]) -> list[str]:
    """What a training may use, in its order: UUIDs, or parts of cards as they are named.

    CUDA takes numbers and the beginning of a UUID, and looks no further at one that is not there (CUDA C++ Programming
    Guide, "CUDA Environment Variables").
    """
    known = [gpu.uuid for gpu in machine.gpus]
    if VISIBLE not in environment:
        return known
    found: list[str] = []
    for text in map(str.strip, environment[VISIBLE].split(",")):
        if text.startswith("MIG-"):
            found.append(text)
            continue
        match = known[int(text) :][:1] if text.isdecimal() else [one for one in known if text and one.startswith(text)]
        if not match:
            break
        found += match[:1]
    return found


@contextmanager
def held(gpus: Sequence[str], number: int, name: str, folder: Path | None) -> Iterator[list[int]]:
    """Lock the first ones for what is started meanwhile with these file descriptors, for as long as it lives.

    Args:
        gpus: that may be used.
        number: of them that will be.
        name: who holds them.
        folder: for the files; None: nothing is locked.

    Raises:
        InputError: another launch of this user holds one.
    """
    if not number or not folder or not is_safe(folder):
        yield []
        return
    with ExitStack() as stack:
        files = {gpu: stack.enter_context(_opened(folder, gpu)) for gpu in gpus}
        taken = {gpu: file for gpu, file in files.items() if not lock_at_once(file)}
        wanted = list(gpus[:number])
        if busy := [gpu for gpu in wanted if gpu in taken]:
            who = taken[busy[0]].read().strip() or "another one"
            free = [gpu for gpu in gpus if gpu not in taken]
            raise InputError(
                f"GPU {gpus.index(busy[0])} is held by launch {who}",
                f"{count(number, 'GPU')} of {len(gpus)} are asked for, and {len(free)} are free",
                _fix(free, number, who),
            )
        for gpu in wanted:
            files[gpu].truncate(0)
            files[gpu].write(name)
            files[gpu].flush()
        for gpu in gpus[number:]:
            files[gpu].close()
        yield [files[gpu].fileno() for gpu in wanted]


def _fix(free: Sequence[str], number: int, who: str) -> str:
    if not free:
        return f"hotloop launch cancel {who}, or wait for its end"
    fewer = "" if len(free) >= number else f" --gpus {len(free)}"
    return f"{VISIBLE}={','.join(free[:number])} hotloop launch ...{fewer}"


def _opened(folder: Path, gpu: str) -> IO[str]:
    file = folder / f"{os.getuid()}-{gpu.replace('/', '-')}.lock"
    return os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
