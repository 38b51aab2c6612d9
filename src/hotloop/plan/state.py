"""What a training holds all the time, and its update: the job's own optimizer on weights without memory."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hotloop.core.errors import InputError
from hotloop.core.job import OptimizerSection
from hotloop.plan.allocations import Allocations
from hotloop.plan.footprint import State, summed
from hotloop.train.blocks import repeated_blocks
from hotloop.train.optimizer import make_optimizer


def state_of(model: nn.Module, section: OptimizerSection, allocations: Allocations) -> State:
    """Of a model of fakes, within `allocations`.

    Raises:
        InputError: there is no such optimizer, it does not take its arguments, or its update cannot be traced.
    """
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    blocks = repeated_blocks(model)
    weights, saved = _bytes(model.parameters()), model.state_dict().keys()
    if not learnt:
        raise InputError(
            "the model has no weights that are learnt", "none of them requires a gradient", "see model.name"
        )
    optimizer = make_optimizer(section, model)
    for parameter in learnt:
        parameter.grad = torch.empty_like(parameter)
    before = allocations.bytes_of("state")
    try:
        optimizer.step()  # the first one makes what it remembers
    except Exception as error:  # whatever it asks of numbers that are not there, or of gradients
        cause = "its update cannot be traced: " + " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f'a job with the optimizer "{section.name}" cannot be planned', cause, "--set optimizer.name=adamw"
        ) from None
    remembered = allocations.bytes_of("state") - before
    allocations.costs.clear()
    allocations.phase = "temporary"
    with allocations.watched() as moments:
        optimizer.step()
    return State(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=weights,
        buffer_bytes=_bytes(model.buffers()),
        saved_buffer_bytes=_bytes(buffer for name, buffer in model.named_buffers() if name in saved),
        optimizer_bytes=float(remembered),
        learnt_bytes=_bytes(learnt),
        block_bytes=max((_bytes(block.parameters()) for block in blocks), default=weights),
        blocks=len(blocks),
        blocks_share=sum(_bytes(block.parameters()) for block in blocks) / weights,
        update=max(moments, key=lambda moment: moment.bytes),
        update_costs=summed(allocations.costs),
    )


def _bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
