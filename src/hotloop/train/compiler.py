"""torch.compile: which part of a model, with what settings, and a cache that outlives the process."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from hotloop.core.errors import InputError
from hotloop.train.blocks import repeated_blocks


def keep_compiled_code() -> None:
    """Let compiled kernels stay in the user's cache folder, so that the next run of the same job starts quickly.

    By default they go to /tmp, which a restart or another container empties. Before the first compilation.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotloop" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def compile_model(model: nn.Module, how: str) -> None:
    """Compile a model in place, for fixed shapes.

    Args:
        how: "model": all of it at once, the fastest; "blocks": its repeated blocks, one compilation for all of them.

    Raises:
        InputError: it has no repeated blocks.
    """
    parts = repeated_blocks(model) if how == "blocks" else [model]
    if not parts:
        raise InputError(
            'speed.compile = "blocks": the model has no repeated blocks',
            f"{type(model).__name__} holds no two modules of one class with weights in several layers",
            "--set speed.compile=true",
        )
    for part in parts:
        part.compile(dynamic=False)


def undo_compile(model: nn.Module) -> None:
    """Let a model run as it stands again."""
    for module in model.modules():
        module._compiled_call_impl = None


def without_compiler() -> AbstractContextManager[object]:
    """Run what is compiled as it stands in this block, so that a rare shape costs no compilation."""
    # Where its machinery was never loaded nothing is compiled, and loading it would take two seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def first_break() -> str:
    """Where the compiler first had to leave compiled code in this process, and why; empty if it never had to."""
    if "torch._dynamo" not in sys.modules:
        return ""
    from torch._dynamo.utils import counters

    reason = next(iter(counters["graph_break"]), "")
    return " ".join(reason.split())[:300]


def compiler_errors() -> tuple[type[Exception], ...]:
    """What a compilation that fails may raise."""
    if "torch._dynamo" not in sys.modules:
        return ()
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, InductorError)
