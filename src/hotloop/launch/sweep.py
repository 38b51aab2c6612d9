"""Several runs of one job that differ in some keys."""

import itertools
import tomllib
from collections.abc import Sequence

import tomli_w

from hotloop.core.errors import InputError

_MOST = 1000
"""Slurm's default for MaxArraySize is 1001."""


def points(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """What to lay over the job for each run: every combination of the values; one empty point without a sweep.

    Args:
        sweeps: "KEY=[VALUE, VALUE]", as TOML writes lists.

    Raises:
        InputError: one is not written so, or they are too many together.
    """
    axes = [_axis(text) for text in sweeps]
    number = 1
    for axis in axes:
        number *= len(axis)
    if number > _MOST:
        raise InputError(f"a sweep of {number:,}", f"it may be {_MOST:,}", "fewer values, or hotloop tune")
    return list(itertools.product(*axes))


def _axis(text: str) -> list[str]:
    key, _, values = text.partition("=")
    try:
        found = tomllib.loads(f"value = {values}")["value"]
    except tomllib.TOMLDecodeError:
        found = None
    if not key.strip() or not isinstance(found, list) or not found:
        raise InputError(
            f"--sweep {text!r}", "it takes KEY=[VALUE, VALUE]", "--sweep 'optimizer.learning_rate=[0.1, 0.2]'"
        )
    return [f"{key.strip()}={tomli_w.dumps({'v': value}).partition(' = ')[2].strip()}" for value in found]
