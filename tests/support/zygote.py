"""A process that has imported what `hotloop train` needs, and forks for each command: 10 s less of each on two cores.

It reads a request a line: {"arguments", "folder", "environment", "out", "err"}; it answers with the process's number,
and with its exit code when it has ended.
"""

import atexit
import gc
import importlib
import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

_IMPORTED = (
    "hotloop.cli.train", "hotloop.train.training", "hotloop.tasks.images", "hotloop.tasks.tokens", "hotloop.pages.run",
    "hotloop.pages.charts", "matplotlib.backends.backend_svg", "timm", "torch.utils.tensorboard", "hotloop.cli.launch",
    "hotloop.cli.plan_job", "hotloop.cli.export", "kubernetes.client", "kubernetes.config", "kubernetes.utils.quantity",
)  # fmt: skip


def main() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `hotloop train` sets it before it imports torch

    from hotloop.core.tensorboard import without_tensorflow

    without_tensorflow()
    for name in _IMPORTED:
        with suppress(ModuleNotFoundError):  # of an extra that is not installed
            importlib.import_module(name)
    gc.freeze()  # else each child copies all of that memory only to free it when it ends: 2 s
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            break
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        return
    for descriptor, file in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["hotloop", *request["arguments"]]
    _leave(_code(request["arguments"]))


def _code(arguments: list[str]) -> int:
    """Of the command, as the interpreter would end with it."""
    from hotloop.cli.main import main as run

    try:
        run(arguments)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> None:
    """As the interpreter does, but that nothing is taken apart: of all that is imported that takes 0.6 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # a command may have closed it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
