"""Find out, while a step runs as it stands, what in it a CUDA graph cannot hold."""

import linecache
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from hotloop.train.gate import LOADING, PATIENCE_SECONDS

_LIBRARIES = (*(str(Path(file).parent) for file in (torch.__file__, __file__)), warnings.__file__)


@contextmanager
def probe() -> Iterator[list[str]]:
    """Collect what happens inside that a graph cannot hold, each with its place in the code.

    A replayed graph repeats kernels: it cannot wait for a value (`.item()`, `if tensor:`, `nonzero`), and what the host
    draws or decides stays as it was when it was captured.
    """
    found: list[str] = []
    here = threading.current_thread()
    mode = torch.cuda.get_sync_debug_mode()
    # A loader draws from the same generators, for its augmentation, and a decoder waits for the GPU; of warnings and of
    # torch's mode there is one for all threads.
    with LOADING.closed(PATIENCE_SECONDS), warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = warnings.showwarning

        def show(message: Warning | str, *rest: Any, **more: Any) -> None:
            if "called a synchronizing CUDA operation" in str(message):
                if not _is_another(here):
                    found.append(f"{where(sys._getframe(1))} waits for the GPU")
            elif "ynchronization debug mode" not in str(message):
                shown(message, *rest, **more)

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            before = _host_random()
            yield found
            drawn = [name for name, state in _host_random().items() if state != before[name]]
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    found += [f"random numbers are drawn from {name} on the host: a graph would repeat them" for name in drawn]


def _is_another(here: threading.Thread) -> bool:
    """Whether a thread is at work that has nothing to do with the step in `here`: one of Python's, such as a loader's.
    Backward runs in threads of torch's own, which Python knows by a stand-in.
    """
    now = threading.current_thread()
    return now is not here and not isinstance(now, threading._DummyThread)


def where(frame: FrameType | None) -> str:
    """The innermost line of a stack that is neither torch's nor hotloop's: its text, file and number."""
    innermost = frame
    while frame and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    chosen = frame or innermost
    if chosen is None:
        return "an operation"
    file, number = chosen.f_code.co_filename, chosen.f_lineno
    return f"`{linecache.getline(file, number).strip() or chosen.f_code.co_name}` ({file}, line {number})"


def where_raised(error: BaseException) -> str:
    """As `where`, of an error's traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))]
    if not own:
        return "an operation inside torch"
    number = next(line for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))) if frame is own[-1])
    file = own[-1].f_code.co_filename
    return f"`{linecache.getline(file, number).strip()}` ({file}, line {number})"


def _host_random() -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.random.get_rng_state().numpy().tobytes(),
        "numpy": (numpy["state"]["pos"], numpy["state"]["key"].tobytes()),
        "random": random.getstate(),
    }
