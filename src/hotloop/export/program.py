"""A model's program by torch.export, with a batch of any size; the package that torch runs, and its runner."""

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from hotloop.core.errors import InputError
from hotloop.core.own_lines import own_line
from hotloop.export.source import Input, Source, flat

_FIX = "--to safetensors needs no program; or change the model there"


def capture(source: Source, tensors: Sequence[Tensor]) -> tuple[ExportedProgram, Source]:
    """The program behind a model, and the source with inputs that vary as the program's do: a model of one's own may
    take so many tokens and no other number.

    Args:
        tensors: its inputs, a batch of two samples or more.

    Raises:
        InputError: it decides something by its inputs' values, or by their number; the line is named.
    """
    named = {one.name: tensor for one, tensor in zip(source.inputs, tensors, strict=True) if one.keyword}
    others = tuple(tensor for one, tensor in zip(source.inputs, tensors, strict=True) if not one.keyword)
    error: Exception | None = None
    for inputs in _choices(source.inputs):
        shapes = [{axis: _dimension(name, source) for axis, name in one.varying.items()} for one in inputs]
        try:
            with quiet():
                program = torch.export.export(source.model, others, named, dynamic_shapes=tuple(shapes))
            return program, replace(source, inputs=inputs)
        except Exception as raised:  # torch raises as many kinds as there are things that cannot be followed
            error = error or raised
    assert error is not None
    raise _cannot_export(error) from error


def _choices(inputs: tuple[Input, ...]) -> Iterator[tuple[Input, ...]]:
    """All that may vary; then the batch alone."""
    yield inputs
    if any(len(one.varying) > 1 for one in inputs):
        yield tuple(replace(one, varying={0: one.varying[0]}) for one in inputs)


def _dimension(name: str, source: Source) -> Dim:
    return Dim(name, min=1, max=source.longest[name]) if name in source.longest else Dim(name)


def save_package(program: ExportedProgram, path: Path) -> None:
    """Write a program for `torch.export.load`, without the names of files that it was made from."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)
    whole = io.BytesIO()  # where a disk is full, torch's own writer ends the process
    with quiet():
        torch.export.save(program, whole)
    path.write_bytes(whole.getbuffer())


def package_forward(content: bytes) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """Run by torch. Reading a package may run code that it holds: read only what is trusted."""
    with quiet():
        module = torch.export.load(io.BytesIO(content)).module()

    def forward(arrays: list[np.ndarray]) -> list[np.ndarray]:
        with torch.inference_mode():
            return [tensor.numpy() for tensor in flat(module(*(torch.from_numpy(array) for array in arrays)))]

    return forward


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what exporters print and log; what went wrong comes as an exception."""
    kept, disabled = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(kept), redirect_stderr(kept), _readable_switches():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _readable_switches() -> Iterator[None]:
    """Torch's exporters read switches of the GPU by their older names, which raises once a training in this process has
    said "ieee" by the newer ones. On the CPU they mean nothing.
    """
    backends: Any = torch.backends
    switches = (backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn)
    before = [one.fp32_precision for one in switches]
    try:
        for one in switches:
            one.fp32_precision = "tf32"
        yield
    finally:
        for one, precision in zip(switches, before, strict=True):
            one.fp32_precision = precision


def _cannot_export(error: Exception) -> InputError:
    text = str(error)
    fixed = re.search(r"(\w+) as dynamic but your code specialized it to be a constant \((\d+)\)", text)
    if fixed:
        cause = f"its {fixed[1]} is {fixed[2]} wherever it is computed, whatever comes in{own_line(error)}"
    elif "data-dependent" in text:
        cause = f"what it computes depends on its inputs' values{own_line(error)}"
    else:
        cause = f"{type(error).__name__}: {first_line(text)}{own_line(error)}"
    return InputError("the model cannot be exported", cause, _FIX)


def first_line(text: str) -> str:
    """Of a message, without colours, 200 characters at most."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"
