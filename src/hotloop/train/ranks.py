"""Processes that train one model together: what they have to agree on when memory runs out on one of them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hotloop.core.errors import HotloopError
from hotloop.core.job import Job
from hotloop.train.communication import Communication
from hotloop.train.early_update import EarlyUpdate
from hotloop.train.gathered import Gathered
from hotloop.train.outline import fill, is_outline
from hotloop.train.pieces import no_room
from hotloop.train.sharded import Types, divide, is_sharded, mesh_of
from hotloop.train.step_settings import StepSettings
from hotloop.train.world import DIVIDED, TENSOR, World

_CAUTIOUS_WINDOWS = 2
_SMALLER, _STOP, _DURING = 1.0, 2.0, 3.0


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Memory ran out on another rank."""


class PeerCannotAverageApart(Exception):
    """Another rank cannot have its gradients averaged after backward."""


class Ranks:
    """The ranks that share a `DistributedDataParallel` model; of any other model this process alone.

    A rank that runs out of memory within a backward pass leaves the others waiting for its gradients. Therefore the
    first windows, and the first after each change of the pieces' size, are cautious: gradients stay where they are
    until all ranks have said that theirs are complete, and are averaged then. After those, memory holds what the same
    shapes need, and gradients are averaged while backward runs. Windows stay cautious while weights get no gradient.

    Args:
        settings: without `recover` no window is cautious. Where ranks talk in the forward pass (SyncBatchNorm) or
            backward is fixed (`static_graph`), none is either.
        notify: told, in a line each, that blocks of divided weights keep what they have gathered, and of DataParallel.
        optimizer: that may update divided weights while backward computes; None: only after it.

    Attributes:
        several: whether other processes take part, so that a step cannot be repeated alone.
        apart: gradients stay where they are in every window, and `average` is called after backward.
        communication: how long windows wait for messages, where the model itself is a `DistributedDataParallel`.
    """

    def __init__(
        self, model: nn.Module, settings: StepSettings, notify: Callable[[str], None], optimizer: Optimizer | None
    ) -> None:  # fmt: skip
        found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._ddp = found[0] if len(found) == 1 else None
        if any(isinstance(module, nn.DataParallel) and len(module.device_ids) > 1 for module in model.modules()):
            cause = "the model is in DataParallel, which copies it to all GPUs in each step and computes in one process"
            notify(f"{cause}; DistributedDataParallel, a process for each GPU, does not: torchrun --nproc_per_node gpu")
        group = self._ddp.process_group if self._ddp else None
        self.several = distributed.is_initialized() and distributed.get_world_size(group) > 1
        self.communication = Communication(next(model.parameters()).device)
        self._times = self.several and self._ddp is model
        talks = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        self._recover = (
            settings.recover and self.several and self._ddp is not None and not self._ddp.static_graph and not talks
        )
        own = isinstance(self._ddp, Copies) and keeps_statistics_alone(self._ddp)
        self._normalising = [module for module in model.modules() if isinstance(module, _BatchNorm)] if own else []
        self._compress, self._fp16 = settings.compress, settings.precision == "fp16"
        self._hooks = self._send_in_own_way()
        self._gathered = Gathered(model, notify)
        at_once = settings.clip_norm or settings.precision == "fp16"
        may = self.several and not at_once  # one alone may repeat a window, whose weights must not have changed
        self._early = EarlyUpdate(model, optimizer if may else None)
        self.apart = False
        self._left = _CAUTIOUS_WINDOWS
        self._agreed = False
        self._group: Any = None
        if self._recover:  # a group of its own: what the user's code sends is not taken for ours
            members = distributed.get_process_group_ranks(group)
            self._group = distributed.new_group(members, use_local_synchronization=True)

    @property
    def cautious(self) -> bool:
        """Whether the present window is."""
        return self._recover and self._left > 0 and not self.joins

    @property
    def can_go_back(self) -> bool:
        """Whether the others still wait in `agree` to hear that averaging after backward does not work here."""
        return self.apart and self.cautious and not self._agreed

    @property
    def _averages_after(self) -> bool:
        """Whether gradients of the present window stay where they are until backward is done."""
        return self.cautious or self.apart

    @property
    def averages_during(self) -> str:
        """Why gradients are averaged while backward runs, in any step and on any rank; empty if they need not be."""
        ddp = self._ddp
        if ddp is None:
            return "ranks talk to each other without DistributedDataParallel"
        if any(isinstance(module, nn.SyncBatchNorm) for module in ddp.modules()):
            return "SyncBatchNorm lets ranks talk in the forward pass"
        if ddp.static_graph or ddp.find_unused_parameters:
            return "DistributedDataParallel has static_graph or find_unused_parameters"
        return ""

    def obstacle(self, parameters: list[Tensor]) -> str:
        """Why gradients of these, the optimizer's, cannot be averaged after backward here; empty if they can."""
        ddp = self._ddp
        if ddp is None or self.averages_during:
            return self.averages_during
        if len(ddp._comm_hooks) > self._hooks or ddp._join_config.enable:
            return "DistributedDataParallel has a communication hook, or joins"
        if not self._recover:
            return "the step does not recover from memory that runs out"
        shared = {id(parameter) for parameter in self.parameters()}
        if shared != {id(parameter) for parameter in parameters if parameter.requires_grad}:
            return "the optimizer has other weights than the ranks share"
        hooked = any(parameter._post_accumulate_grad_hooks or parameter._backward_hooks for parameter in parameters)
        return "weights have hooks" if hooked else ""

    @property
    def joins(self) -> bool:
        """Whether ranks may run out of batches at different times."""
        return bool(self._ddp and self._ddp._join_config.enable)

    @property
    def _shares_buffers(self) -> bool:
        """Whether the forward pass needs the first rank's buffers.

        Running statistics change nothing while layers learn: the first rank's, of its own part of the batches, are the
        same whether the others have them or not, and an evaluation or a checkpoint takes those (`evaluated`).
        """
        ddp = self._ddp
        if not (ddp and ddp.broadcast_buffers and ddp.modules_buffers):
            return False
        return not self._normalising or not all(module.training for module in self._normalising)

    def begin(self) -> None:
        """Start a window, or start it again: buffers become those of the first rank, as DDP does it.

        DDP would do it in the forward pass, and not as often on a rank whose forward pass broke off.
        """
        self._agreed = False
        if self._times:
            self.communication.begin()
        if self._averages_after and self._ddp and self._shares_buffers:
            with self.communication.waiting():
                self._ddp._sync_buffers()  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Run forward and backward inside; at a window's end they average gradients, unless that is done after it.

        Raises:
            HotloopError: a weight got no gradient, and its bucket was not averaged, or several where DDP expects one;
                or a static graph was left.
        """
        averages = self.several and last and not self._averages_after
        if self._ddp and self._normalising and not self._shares_buffers:
            self._ddp.require_forward_param_sync = False
        if self._ddp is None or self._ddp.static_graph or averages:
            try:
                with self.communication.buffers_of(self._ddp), self._early.backward(last):
                    yield
            except RuntimeError as error:
                if self._ddp and "not compatible with static_graph" in str(error):
                    raise _left_static_graph(self._ddp, []) from error
                if self._ddp and "mark a variable ready only once" in str(error):
                    raise _needs_static_graph(self._ddp) from error
                raise
            if self._ddp and self.several and (averages or self._ddp.static_graph):
                self._check_averaged(self._ddp)
            return
        if self._averages_after:
            self._ddp.require_forward_param_sync = False
        with self.communication.buffers_of(self._ddp), self._ddp.no_sync():
            yield

    def _check_averaged(self, ddp: DistributedDataParallel) -> None:
        """DDP would say it at the next forward pass only: after the update, and after a checkpoint."""
        try:
            ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            without = [name for name, one in ddp.module.named_parameters() if one.requires_grad and one.grad is None]
            raise (_left_static_graph(ddp, without) if ddp.static_graph else _without_gradients(without)) from error
        # What averages in the first step hangs on the output's tensors, as pytree finds them.
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            raise HotloopError(
                "gradients were not averaged: DistributedDataParallel finds no tensors in what the model returns",
                "its static graph needs them in tuples, lists or dicts",
                f"return such, or {_no_static_graph(ddp)}",
            )

    def check_all_have_gradients(self, without: Collection[int]) -> None:
        """Of a window that is averaged after backward, once none is cautious any more.

        Args:
            without: which of `parameters` have none.

        Raises:
            HotloopError: there are some: the others would wait, and the update would move them all the same.
        """
        if without and not self.cautious:
            assert self._ddp is not None
            names = {id(parameter): name for name, parameter in self._ddp.module.named_parameters()}
            parameters = self.parameters()
            raise _without_gradients([names[id(parameters[number])] for number in sorted(without)])

    def agree(self) -> None:
        """Wait until all ranks have their gradients of a cautious window; average them, unless that is done apart.

        Raises:
            PeerOutOfMemory: another rank ran out of memory.
            PeerCannotAverageApart: another rank has to go back to averaging during backward.
            HotloopError: another rank cannot go on; or memory runs out here.
        """
        parameters = self.parameters()
        some = [float(parameter.grad is not None) for parameter in parameters]
        code, missing, *used = self.largest([0.0, float(not all(some)), *some])
        if code == _SMALLER:
            raise PeerOutOfMemory("another rank ran out of memory")
        if code == _STOP:
            raise HotloopError("another rank has no room for a single sample", "it says which", "see its message")
        if code == _DURING:
            raise PeerCannotAverageApart("another rank cannot have its gradients averaged after backward")
        self._agreed = True
        if self.apart:
            return
        assert self._ddp is not None
        if missing and not self._ddp.find_unused_parameters:  # during backward it would wait for those gradients
            self.start_again()
        try:
            for parameter in (parameter for parameter, found in zip(parameters, used, strict=True) if found):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.average([parameter.grad])
        except torch.OutOfMemoryError as error:
            raise no_room("what ranks exchange does not", str(error)) from error

    def average(self, tensors: list[Tensor]) -> None:
        """Make each the mean over the ranks; all ranks call this with the same shapes."""
        for tensor in tensors:
            self._add_up(tensor, self._divided(tensor))

    def part_of(self, scale: Tensor) -> Tensor:
        """What the loss is scaled by if gradients are averaged after backward: `average_parts` adds them up."""
        return scale / distributed.get_world_size(self._process_group) if self._scales else scale

    def average_parts(self, tensors: list[Tensor]) -> None:
        """The same for gradients of a loss that was scaled by `part_of`."""
        for tensor in tensors:
            self._add_up(tensor, self._as_sent(tensor) if self._scales else self._divided(tensor))

    def _add_up(self, tensor: Tensor, sent: Tensor) -> None:
        with self.communication.waiting():
            distributed.all_reduce(sent, group=self._process_group)
        if sent is not tensor:
            tensor.copy_(sent)

    @property
    def _scales(self) -> bool:
        """Whether the division is a part of the loss's scale, which costs nothing; by itself it takes 0.05 ms for
        ResNet-50's gradients on an H200. It is exact for powers of two, and fp16 has no room for it.
        """
        size = distributed.get_world_size(self._process_group)
        return not self._fp16 and size & (size - 1) == 0

    @property
    def _process_group(self) -> Any:
        assert self._ddp is not None
        return self._ddp.process_group

    def _divided(self, tensor: Tensor) -> Tensor:
        """This rank's part of the mean, as it is sent: the tensor itself, or a copy."""
        return self._as_sent(tensor.div_(distributed.get_world_size(self._process_group)))

    def _as_sent(self, tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if self._compress else tensor

    def _send_in_own_way(self) -> int:
        """Let gradients travel otherwise than DDP would have them; how many hooks that takes."""
        ddp = self._ddp
        if isinstance(ddp, Copies) and not next(ddp.parameters()).is_cuda:
            ddp.register_comm_hook(None, self._average_each)
        elif ddp and self._compress:
            ddp.register_comm_hook(self._process_group, bf16_compress_hook)
        else:
            return 0
        return 1

    def _average_each(self, state: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Each gradient of a bucket by itself, as after backward (`average`). Which of three ranks' numbers are added
        first depends on where they lie in what is sent, and a run that goes on has other buckets for some steps.
        """
        gradients = bucket.gradients()
        sent = [self._divided(gradient) for gradient in gradients]
        works: list[Any] = [distributed.all_reduce(one, group=self._process_group, async_op=True) for one in sent]

        def taken(done: object) -> Tensor:
            for gradient, one in zip(gradients, sent, strict=True):
                if one is not gradient:
                    gradient.copy_(one)
            buffer: Tensor = bucket.buffer()
            return buffer

        return torch.futures.collect_all([work.get_future() for work in works]).then(taken)

    def tell(self, stop: bool) -> None:
        """Tell the others, who wait in `agree`, that memory ran out here: to take smaller pieces, or to stop."""
        self._tell(_STOP if stop else _SMALLER)

    def go_back(self) -> None:
        """Tell the others, who wait in `agree`, to average during backward again."""
        self._tell(_DURING)

    def _tell(self, code: float) -> None:
        if self.cautious:
            self.largest([code, 0.0, *[0.0] * len(self.parameters())])

    def window_done(self) -> None:
        """Count a window."""
        self._left = max(0, self._left - 1)
        self._gathered.window_done()
        if self._times:
            self.communication.end()
        if self._ddp:  # for an evaluation; a window that needs it otherwise says so
            self._ddp.require_forward_param_sync = True

    def start_again(self) -> None:
        """The next windows are of another size."""
        self._left = _CAUTIOUS_WINDOWS

    def parameters(self) -> list[Tensor]:
        """What the ranks share, in an order that is the same on all."""
        assert self._ddp is not None
        ignored = self._ddp.parameters_to_ignore
        named = self._ddp.module.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]

    def largest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        assert self._ddp is not None
        numbers = torch.tensor(values, device=next(self._ddp.parameters()).device)
        group = self._group or self._ddp.process_group
        with self.communication.waiting():
            distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=group)
        found: list[float] = numbers.tolist()
        return found


class Copies(DistributedDataParallel):
    """Copies of a job's model, of which all evaluate, and the first one saves, with the first one's buffers."""


def keeps_statistics_alone(model: nn.Module) -> bool:
    """Whether all buffers are running statistics of torch's own batch normalisation; a class of the user's may compute
    with them while it learns.
    """
    owners = [module for module in model.modules() if next(module.buffers(recurse=False), None) is not None]
    return bool(owners) and all(type(one).__module__ == _BatchNorm.__module__ for one in owners)


def spread(model: nn.Module, world: World, job: Job, make: Callable[[], nn.Module]) -> nn.Module:
    """The model for several ranks, as a job's `parallel` says.

    Args:
        model: on the host if it is to be divided, or an outline: each of its blocks, or its tensors, goes to the device
            as a whole for a moment only.
        make: makes the model of an outline, with its numbers.
    """
    if world.size == 1:
        return model
    how = job.parallel
    if how in DIVIDED:
        mesh = mesh_of(world, job.device)
        types = Types(torch.bfloat16 if job.precision in ("bf16", "float8") else None, job.ranks.gradients == "bf16")
        divide(model, mesh, types if "fsdp" in how else None, layers=how in TENSOR)
        if is_outline(model):
            fill(model, make() if world.first else None, job.device)
        return model.to(job.device)
    on_gpu = next(model.parameters()).is_cuda
    return Copies(
        model,
        device_ids=[world.local_rank] if on_gpu else None,
        gradient_as_bucket_view=True,
        static_graph=job.ranks.static_graph,
    )


def inner(model: nn.Module) -> nn.Module:
    """The model itself, without what spreads it over ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def evaluated(trained: nn.Module, averaged: nn.Module | None) -> nn.Module:
    """The model to evaluate: with averaged weights if there are any, and on all ranks with the first one's buffers,
    those of batch normalisation say.
    """
    model = averaged or inner(trained)
    if isinstance(trained, DistributedDataParallel) or is_sharded(trained):
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)
    return model


def _left_static_graph(ddp: DistributedDataParallel, names: Sequence[str]) -> HotloopError:
    return HotloopError(
        f"the weights that get gradients are not those of the first step{': ' if names else ''}{', '.join(names[:3])}",
        "the static graph of DistributedDataParallel holds which they are, and how often each is used",
        _no_static_graph(ddp),
    )


def _needs_static_graph(ddp: DistributedDataParallel) -> HotloopError:
    setting = "--set ranks.static_graph=true" if isinstance(ddp, Copies) else "give it static_graph=True"
    return HotloopError(
        "a weight got several gradients in one backward pass",
        "DistributedDataParallel averages it when the first is there: blocks that share weights, or are run several "
        "times, are recomputed in re-entrant checkpoints",
        f"checkpoint(..., use_reentrant=False), or {setting}",
    )


def _no_static_graph(ddp: DistributedDataParallel) -> str:
    return "--set ranks.static_graph=false" if isinstance(ddp, Copies) else "leave its static_graph=True out"


def _without_gradients(names: Sequence[str]) -> HotloopError:
    return HotloopError(
        f"weights got no gradient in this step{': ' if names else ''}{', '.join(names[:3])}",
        "ranks average gradients of all weights, and wait for each",
        "freeze what nothing uses (requires_grad_(False)), or add 0 times what it computes to the loss; "
        "where no rank uses it in that step, --set parallel=fsdp does too",
    )
