"""CUPTI, by which torch's profiler sees what a GPU does."""

from collections.abc import MutableMapping
from typing import Any

_VARIABLE = "TEARDOWN_CUPTI"
_SINCE = (12, 6)
"""CUDA. With older ones a process that replays CUDA graphs may crash where it is traced once more after CUPTI has
detached; torch's own profiler and compiler forbid detaching by the same limit:
https://github.com/pytorch/pytorch/pull/150957
"""


def detach_after_tracing(torch: Any, environment: MutableMapping[str, str]) -> None:
    """Have CUPTI leave this process once a trace has ended, if it can do so unharmed and nobody has said otherwise.

    Otherwise it stays, and makes every later call of CUDA slower: about 1.6 ms a step of many allocations on an H200,
    which steps that are timed without some part would be blamed for. Kineto asks the environment at the end of a trace
    and at the beginning of the next, so it stays set. It is not set for the whole command: whether it is safe depends
    on the torch that the script imports, and only here is anything traced.
    """
    version = torch.version.cuda  # None for cards that are not NVIDIA's
    if version and tuple(int(part) for part in version.split(".")[:2]) >= _SINCE:
        environment.setdefault(_VARIABLE, "1")
