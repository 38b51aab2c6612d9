"""What is read of the precisions of fp32 that a user sets before and after convolutions went either way, and without.

Each in a process of its own: what was set cannot be unset. Prints a line where the two differ, and how many were tried.
"""

import itertools
import os
import sys
from collections.abc import Iterator

import torch
from torch.backends import cudnn

from hotloop.kernels import search

PLACES = {
    "all": torch.backends,
    "cudnn": cudnn,
    "conv": cudnn.conv,
    "rnn": cudnn.rnn,
    "matmul": torch.backends.cuda.matmul,
}
VALUES = (None, "ieee", "tf32")


def read() -> list[object]:
    try:
        allowed: object = cudnn.allow_tf32
    except RuntimeError as error:  # the old way to ask, where the new one was used to set
        allowed = type(error).__name__
    return [allowed, *(place.fp32_precision for place in PLACES.values())]


def seen(before: tuple[str | None, ...], legacy: bool | None, ways: tuple[bool, ...]) -> Iterator[object]:
    if legacy is not None:
        cudnn.allow_tf32 = legacy
    for name, value in zip(PLACES, before, strict=False):
        if value:
            PLACES[name].fp32_precision = value
    for way in ways:
        with search._way(way):
            assert (cudnn.conv.fp32_precision == "tf32") == cudnn.benchmark == way
    yield read()
    for name, value in itertools.product(PLACES, VALUES[1:]):
        PLACES[name].fp32_precision = value
        yield read()


def in_child(*of: object) -> bytes:
    out, into = os.pipe()
    if not os.fork():
        os.write(into, repr(list(seen(*of))).encode())
        os._exit(0)
    os.close(into)
    with open(out, "rb") as file:
        found = file.read()
    os.wait()
    return found


tried = 0
for before in itertools.product(VALUES, VALUES, VALUES):
    for legacy in (None, False, True):
        expected = in_child(before, legacy, ())
        tried += 1
        for ways in ((True,), (False,), (True, False)):
            if in_child(before, legacy, ways) != expected or not expected:
                sys.exit(f"{before}, allow_tf32 {legacy}, ways {ways}")
print(tried)
