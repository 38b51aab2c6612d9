"""One training step: forward, backward, and at the end of a window unscale, clip, step, average.

On a GPU the whole of it is captured into a CUDA graph once it has run a few times as it stands, and replayed from then
on: a step then costs the host one launch.
"""

import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hotloop.core.errors import HotloopError
from hotloop.train.average import Averaged
from hotloop.train.blocks import has_batch_norm
from hotloop.train.buffers import Buffers
from hotloop.train.checkpoint.parts import read_whole
from hotloop.train.compiler import Breaks, compile_model, compiler_errors, first_words, undo_compile
from hotloop.train.counter import Counter
from hotloop.train.execute import WARM_UP, Executor, uncompiled
from hotloop.train.gradients import Gradients
from hotloop.train.loss_ring import LossRing
from hotloop.train.optimizer import Rates, compiled_update, fuse_again
from hotloop.train.pace import Pace
from hotloop.train.padding import pad
from hotloop.train.pieces import Pieces, batch_size, cut, memory_errors, no_room, release
from hotloop.train.ranks import PeerCannotAverageApart, PeerOutOfMemory, Ranks, inner
from hotloop.train.schedule import Schedule
from hotloop.train.sharded import divided_model, divided_optimizer
from hotloop.train.step_input import Loss, check_parts, check_scalar
from hotloop.train.step_settings import StepSettings
from hotloop.train.trial import Trial, start_trial

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
_LOG = logging.getLogger("hotloop")
_DEFAULTS = StepSettings()
_MOST_CHANGES = 5
"""How often other settings than the learning rate may change before capturing no longer pays."""


class Step:
    """Trains a model by one batch a call.

    Args:
        model: on its device.
        loss: called with model and batch under the step's precision; returns the batch's mean loss.
        optimizer: over the model's parameters, learning rates at their highest. On a GPU its fused or capturable form
            is switched on, and its learning rates become tensors.
        schedule: factor of the learning rate at each step; without one the learning rates are yours to change.
        settings: precision, clipping, averaging, capture.
        notify: told, in a line each, what cannot be done as fast as it could be, and why; logged as a warning without.

    Attributes:
        averaged: a copy of the model with the averaged weights, if `settings.ema` asks for them.
        number: optimizer steps taken.
        losses: of the steps taken, on the device.
        pieces: into how many pieces each batch is cut, because a whole one did not fit; 1 as a rule.
        executor: what runs its work.
        communication: `seconds` in it is how long steps have waited for other ranks' messages, where that is known.

    Example:
        ```python
        step = hotloop.Step(model, lambda model, batch: loss(model(batch[0]), batch[1]), optimizer)
        for batch in loader:
            step(batch)
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        schedule: Schedule | None = None,
        settings: StepSettings = _DEFAULTS,
        notify: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.number = self._changes = 0
        self._loss, self._notify = loss, notify
        check_parts(model, optimizer, settings.precision)
        self._device = next(model.parameters()).device
        self._counter = Counter(self._device)
        self.losses = LossRing(self._counter, self._device)
        self._keeps_gradients = captures = settings.graph and self._device.type == "cuda"
        self._gradients = Gradients(optimizer)
        self._rates = Rates(optimizer, schedule, self._counter, captures)
        self._scaler = GradScaler(self._device.type, enabled=settings.precision == "fp16")
        self._average = Averaged(inner(model), settings.ema) if settings.ema else None
        self._pace: Pace | None = None
        if settings.compile:
            dtype = _AUTOCAST.get(settings.precision) if self._device.type == "cuda" and settings.own_kernels else None
            self._pace = Pace() if compile_model(inner(model), settings.compile, dtype) else None
        self._breaks = Breaks() if settings.compile else None
        self.executor = Executor(
            self._device, settings.graph, bool(settings.compile), WARM_UP, notify, self._capture_failed
        )
        self._pieces = Pieces()
        self._ranks = Ranks(model, settings, notify, None if captures else optimizer)
        self.communication = self._ranks.communication
        self._trial = start_trial(self._ranks, self._gradients, self.executor.give_up) if captures else None
        self._one, self._share = torch.ones((), device=self._device), torch.ones((), device=self._device)
        self._share_on_host = 1.0
        self._latest = self._sum = torch.zeros((), device=self._device)
        self._skipped = torch.zeros((), device=self._device)
        self._window: list[tuple[Any, float]] = []
        self._modules, self._weights = list(model.modules()), list(model.parameters())
        self._constants = self._constants_now()
        self._uncompiled = self._stale = False
        self.executor.captures_alone = self.executor.paused = self._ranks.several
        self._buffers = Buffers(model)
        compiled = settings.compile and captures and settings.precision != "fp16" and not self._rates.obstacle
        compiled = compiled and not self._ranks.several  # one that failed on a rank would have to be agreed on
        self._compiled_update = compiled_update(optimizer) if compiled else None
        if self._rates.obstacle:
            notify(f"the optimizer's step is not captured into the CUDA graph: {self._rates.obstacle}")

    @property
    def averaged(self) -> nn.Module | None:
        return self._average.module if self._average else None

    @property
    def pieces(self) -> int:
        return self._pieces.count

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of the first parameter group."""
        return self._rates.of_step(self.number)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before backward: 1 unless fp16. Waits for the GPU if it is fp16."""
        return float(self._scaler.get_scale())

    @property
    def skipped(self) -> int:
        """Steps whose gradients overflowed fp16 and were left out, the scale lowered. Waits for the GPU."""
        return int(self._skipped.item())

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a graph by now."""
        return self.executor.replays > 0 and not self.executor.reason

    @property
    def not_captured(self) -> str:
        """Why no step is captured; empty while none has to run as it stands."""
        return self.executor.reason

    def autocast(self) -> AbstractContextManager[object]:
        """The step's precision, for evaluation."""
        dtype = _AUTOCAST.get(self.settings.precision)
        return autocast(self._device.type, dtype=dtype) if dtype else nullcontext()

    def __call__(self, batch: Any, share: float = 1.0, last: bool = True) -> Tensor:
        """Train on one batch.

        Args:
            batch: what `loss` takes; tensors in dicts, lists and tuples. Of a window of several it is copied.
            share: the batch's part in its window: its samples over the window's, so that the gradient is the mean over
                the window's samples however short the last one is.
            last: whether the window ends here and the weights change.

        Raises:
            HotloopError: the loss is no tensor of one value, or of no weight; or one sample is too much for the memory.

        Returns:
            The batch's mean loss times its share, a scalar on the device, not waited for.
        """
        self.run(batch, share, last)
        return self._latest.clone()

    def run(self, batch: Any, share: float = 1.0, last: bool = True) -> None:
        """As calling it; the loss of the window stays in `losses`."""
        # A window that is repeated finds its earlier batches as they were: loaders use their memory again.
        self._window.append((batch if last else tree_map_only(Tensor, torch.clone, batch), share))
        try:
            if len(self._window) == 1:
                self._begin_window()
            self._watch_constants()
            if last:
                self._rates.set_for(self.number)
            self._run_window(last)
        except BaseException:
            self._drop_window()  # the next one begins anew
            raise
        if last:
            self._end_window()

    def _begin_window(self) -> None:
        if self._trial:
            self._trial.begin()
        undecided = self._trial and not self._trial.over
        if self._pace and self.executor.reason and not self.executor.objected and not undecided:
            self._pace.begin()

    def _drop_window(self) -> None:
        self._window.clear()
        self._drop_gradients()
        self._counter.back()

    def _drop_gradients(self) -> None:
        """Those of the window so far, and the graphs that write to them."""
        self._gradients.drop()
        self._forget_scaling()
        self.executor.forget()

    def _end_window(self) -> None:
        if len(self._window) > 1:  # waiting for its further batches would count as launching
            self._pace = None
        self._window.clear()
        self._counter.advanced()
        self.losses.written()
        self.number += 1
        self._ranks.window_done()
        if self._pace and self._pace.end():
            self._choose_kernels(self._pace)
        if self._trial and self._trial.end():
            self._drop_gradients()
        if self._pieces.step_done():
            self._start_ranks_again()
            self.executor.forget()
            self._notify(f"step {self.number}: trying pieces of twice the size again")
        self.executor.paused = self._ranks.several and (self._ranks.cautious or not self._ranks.apart)

    def _watch_constants(self) -> None:
        """A graph holds settings of the optimizer, where weights lie, and which layers are frozen: capture anew."""
        constants = self._constants_now()
        if constants != self._constants:
            self._constants = constants
            self._changes += 1
            self._stale = True
            self.executor.forget()
            if self._changes > _MOST_CHANGES:
                self.executor.give_up("the optimizer's settings, where weights lie or which layers learn keep changing")
        if self._stale and len(self._window) == 1:  # a layer that is frozen now has no gradient to go on with
            self._stale = False
            self._drop_gradients()

    def _constants_now(self) -> list[Any]:
        place = Tensor.data_ptr if self._keeps_gradients else id
        weights = [(parameter.requires_grad, place(parameter)) for parameter in self._weights]
        return [*self._rates.constants(), *weights, *[module.training for module in self._modules]]

    def _run_window(self, last: bool) -> None:
        """The window's newest batch; the whole window again where it has to be done in another way."""
        part = len(self._window) - 1
        if part == 0:  # a replay allocates nothing, and needs no way back
            self._buffers.forget() if self.executor.has_graphs else self._buffers.remember()
        again = False
        while part < len(self._window):
            try:
                self._run_part(part, last)
                part += 1
                continue
            except compiler_errors() as error:
                if self._uncompiled:
                    raise
                self._go_on_uncompiled(error)
            except Exception as error:
                if self._trial and self._ranks.can_go_back:
                    self._average_during(self._trial, error)
                elif isinstance(error, torch.OutOfMemoryError) and self.settings.recover:
                    self._recover(error, part, again)
                else:
                    raise
            part, again = 0, True

    def _go_to_start(self) -> None:
        """Nothing of the window has happened."""
        self._drop_gradients()
        self._buffers.go_back()

    def _go_on_uncompiled(self, error: Exception) -> None:
        undo_compile(self.model)
        self._uncompiled = True
        if self._compiled_update:
            self._compiled_update = None
            fuse_again(self.optimizer)
        self._go_to_start()
        self._notify(f"the model does not compile and runs as it stands: {first_words(error)}")

    def _choose_kernels(self, pace: Pace) -> None:
        """Kernels of ours save the device time, and cost the host some, where it launches each of them."""
        self._pace = None
        if pace.is_the_hosts and not self._uncompiled:
            undo_compile(self.model)
            compile_model(inner(self.model), self.settings.compile)
            self._notify("the GPU waits for the host: the model is compiled without hotloop's kernels")

    def _average_during(self, trial: Trial, error: Exception) -> None:
        """The first windows whose gradients were to be averaged after backward do not work, here or on another rank."""
        if not isinstance(error, PeerCannotAverageApart):
            self._ranks.go_back()
        reason = f"gradients cannot be averaged after backward: {first_words(error)}"
        release(error)
        trial.give_up(reason)
        self._go_to_start()

    def _recover(self, error: torch.OutOfMemoryError, part: int, again: bool) -> None:
        """Memory ran out in a part of the window; `again`: not for the first time in it."""
        if self._ranks.several and not self._ranks.cautious:
            raise no_room("a step that other ranks have begun does not", str(error)) from error
        message, elsewhere = str(error), isinstance(error, PeerOutOfMemory)
        release(error)
        self._start_window_again(part, message, elsewhere, again)

    def _start_window_again(self, part: int, message: str, elsewhere: bool, again: bool) -> None:
        graphs_took_it = self.executor.has_graphs and not again
        self._go_to_start()
        if graphs_took_it and not self._ranks.several:  # what they kept is free again: the same size may fit
            return
        self._make_smaller(self._window[part][0], message, elsewhere)
        self._start_ranks_again()
        normalised = ", and batch normalisation sees the pieces" if has_batch_norm(self.model) else ""
        text = f"out of memory; each batch is now trained on in {self._pieces.count} pieces{normalised}"
        self._notify(f"step {self.number + 1}: {text}")

    def _start_ranks_again(self) -> None:
        self._ranks.start_again()
        if self._trial:
            self._trial.restart()

    def _make_smaller(self, batch: Any, message: str, elsewhere: bool) -> None:
        if elsewhere:
            self._pieces.double(max((batch for batch, _ in self._window), key=batch_size))
            return
        try:
            self._pieces.halve(batch, message)
        except HotloopError:
            self._ranks.tell(stop=True)
            raise
        self._ranks.tell(stop=False)

    def _run_part(self, part: int, last: bool) -> None:
        """One batch of the window, in as many pieces as are needed."""
        batch, share = self._window[part]
        if part == 0:
            self._ranks.begin()
        pieces = cut(batch, self._pieces.of(batch))
        ends = last and part == len(self._window) - 1
        values = []
        for number, (piece, piece_share) in enumerate(pieces):
            value = self._run_piece(piece, share * piece_share, part + number == 0, ends and number == len(pieces) - 1)
            values.append(value.clone() if len(pieces) > 1 else value)
        self._latest = torch.stack(values).sum() if len(pieces) > 1 else values[0]

    def _run_piece(self, batch: Any, share: float, first: bool, last: bool) -> Tensor:
        if share != self._share_on_host:
            self._share.fill_(share)
            self._share_on_host = share
        self._gradients.attach(self._keeps(first, last))
        if self.settings.pad_to:
            batch = pad(batch, self._pieces.size(self.settings.pad_to))
        place: Hashable = (first, last, share == 1.0)
        work = partial(self._work, first=first, last=last, weighted=share != 1.0)
        value: Tensor = self.executor.run(place, batch, partial(uncompiled, work) if self._uncompiled else work)
        if self.executor.computed:
            self.executor.computed.record()
        goes_to_graph = self._keeps_gradients and not self.executor.has_graphs and not self.executor.reason
        if goes_to_graph and (name := self._buffers.replaced()):  # a graph stays with the tensors that it found
            self.executor.give_up(f"the model puts a new tensor where its buffer {name} was: write into it")
        if self._breaks and (reason := self._breaks.first()):
            self._notify(f"torch.compile could not take the model in one piece: {reason}")
        self._breaks = None
        if last and self._ranks.apart:
            self._finish_apart()
        if last and self._rates.obstacle:
            self._update()
        return value

    def _finish_apart(self) -> None:
        """The end of a window whose gradients are each rank's own so far."""
        flat = self._gradients.flat
        assert flat is not None
        if self._ranks.cautious:
            if flat.unused:  # backward() would find some: recomputation with use_reentrant hides weights from autograd
                raise RuntimeError(f"{len(flat.unused)} weights have no gradient")
            self._ranks.agree()
        self._ranks.check_all_have_gradients(flat.unused)
        self._ranks.average_parts(flat.tensors)

        def finish(batch: tuple[()]) -> Tensor:
            flat.attach()
            self._finish(self._sum)
            return self._sum

        if self._rates.obstacle:
            finish(())
        else:
            self.executor.run("finish", (), finish)

    def _keeps(self, first: bool, last: bool) -> bool:
        """Whether graphs share gradients; not if the update of the same graph uses them up, or if they are flat."""
        fresh = first and last and not self._rates.obstacle
        return self._keeps_gradients and not fresh and not self._ranks.apart

    def _work(self, batch: Any, first: bool, last: bool, weighted: bool) -> Tensor:
        """What a graph holds: all that is done on the device for one piece."""
        if first:
            self._gradients.zero()
        flat = self._gradients.flat_of(self.model, self._ranks.parameters()) if self._ranks.apart else None
        with memory_errors(), self._ranks.backward(last), flat.stand_ins.in_place() if flat else nullcontext():
            with self.autocast():
                loss = self._loss(self.model, batch)
            check_scalar(loss)
            # As the gradient of the loss, share and scale cost no kernel of their own.
            scale = self._scaler.scale(self._share)
            if flat:
                flat.put(flat.stand_ins.gradients(loss.float(), self._ranks.part_of(scale)), first)
            else:
                self.communication.backward(loss.float(), scale)
        value = loss.detach().float()
        value = value * self._share if weighted else value
        if not (first and last) or self._ranks.apart:
            self._sum.copy_(value) if first else self._sum.add_(value)
        if last and not self._ranks.apart:
            if self._keeps(first, last):
                self._gradients.keep()
            if self._ranks.cautious:
                self._ranks.agree()
            self._finish(value if first else self._sum)
        return value

    def _finish(self, loss: Tensor) -> None:
        """What ends a window on the device, once its gradients are complete."""
        if not self._rates.obstacle:
            self._update()
        self.losses.write(loss)
        self._counter.advance()

    def _capture_failed(self) -> None:
        """Gradients that a capture made were never computed."""
        if not self._gradients.attached:
            self._gradients.release()
        self._forget_scaling()

    def _forget_scaling(self) -> None:
        """Whether gradients have been unscaled belongs to those gradients."""
        if self._scaler.is_enabled():
            self._scaler._per_optimizer_states.clear()

    def _update(self) -> None:
        """Unscale, clip, step, average; device work only.

        Raises:
            HotloopError: memory ran out here, where smaller pieces of a batch do not help.
        """
        try:
            self._rates.apply()
            self._gradients.complete()
            if self.settings.clip_norm:
                self._scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self._gradients.parameters(), self.settings.clip_norm)
            if self._scaler.is_enabled():
                before = self._scaler.scale(self._one)
                self._scaler.step(self.optimizer)
                self._scaler.update()
                self._skipped += self._scaler.scale(self._one) < before
            elif self._compiled_update:
                with torch.compiler.set_stance("default"):  # for a rare shape's batch too, whose model is not compiled
                    self._compiled_update()
            else:
                self.optimizer.step()
        except torch.OutOfMemoryError as error:
            raise no_room("the optimizer's state does not", str(error)) from error
        self._gradients.release()
        if self._average is not None:
            self._average.update()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; weights that are divided among ranks stay so (`DTensor`)."""
        return {
            "model": inner(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "averaged": self._average.state_dict() if self._average else {},
            "number": self.number,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of a step over the same model and optimizer, with this one's settings."""
        inner(self.model).load_state_dict(divided_model(state["model"], inner(self.model)))
        self._rates.load_optimizer(divided_optimizer(state["optimizer"], self.optimizer))
        if state["scaler"]:  # empty if that step was not fp16
            self._scaler.load_state_dict(state["scaler"])
        if self._average is not None:
            self._average.load_state_dict(read_whole(state["averaged"]))
        self._drop_window()
        self.number = state["number"]
        self._skipped.fill_(state["skipped"])
