"""A script that trains, made known to whoever watches the machine."""

import atexit
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

from hotloop.attach.patches import Patches
from hotloop.core.live import Publisher, live_folder, number_in_environment, script_name
from hotloop.core.process import most_resident_bytes

_SECONDS = 1.0


class PublishedScript:
    """Tells of a script until it ends: its steps, and what they show by themselves.

    Once a second the loss on which `backward` was called last, the learning rate and the memory at the most; each
    `torch.save`, those of one step as one checkpoint. A loss that lies on a GPU is copied without waiting for it, and
    told a second later. Costs each step about 3 µs, and what is told once a second is in that (bench/live_cost.py).

    Args:
        device: of what is trained.
        way: "run" or "profile".
        folder: of this start, by whose name it is told from others of the same script.

    Attributes:
        optimizer: that steps; None where there is none.
    """

    def __init__(
        self, torch: Any, device: Any, way: str, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.optimizer: Any = None
        self._torch, self._device, self._clock = torch, device, clock
        self._thread, self._due = threading.get_ident(), 0.0
        self._looking = True  # at this step, the whole of it
        self._publisher = Publisher(
            live_folder(), clock, way=way, job=script_name(), run=str(folder), rank=number_in_environment("RANK", 0),
            ranks=number_in_environment("WORLD_SIZE", 1), gpu=gpu_uuid(torch, device), phase="step",
            restarts=number_in_environment("TORCHELASTIC_RESTART_COUNT", 0),
        )  # fmt: skip
        self._seconds, self._waited, self._samples, self._steps = 0.0, 0.0, 0, 0  # since the publisher was told
        self._saves: list[tuple[float, float]] = []
        self._scaled: tuple[Callable[[], Any], Any] = (lambda: None, None)
        self._loss: Any = None
        on_gpu = device.type == "cuda"
        self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self._shown = self._host.numpy()  # as it is read without a function of torch's, which may be watched
        self._copied = torch.cuda.Event() if on_gpu else None
        self._copying = False
        self._patches = Patches()
        self._patches.replace(torch.Tensor, "backward", self._watch_backward)
        self._patches.replace(torch.amp.GradScaler, "scale", self._watch_scale)
        self._patches.replace(torch, "save", self._watch_save)
        atexit.register(self.close)

    def stepped(self, seconds: float, waited: float, step: int, samples: int = 0) -> None:
        """A step has ended.

        Args:
            step: its number.
            samples: that it has learnt from, as far as is known.
        """
        # Little is done in each step: the publisher is told by the second.
        self._steps += 1
        self._seconds += seconds
        self._waited += waited
        self._samples += samples
        if self._looking:
            self._read()
            self._due = self._clock() + _SECONDS
            self._looking = False
        elif self._saves or self._clock() >= self._due:
            self._looking = True
        else:
            return
        self._publisher.stepped(self._seconds, self._waited, self._samples, self._steps)
        self._seconds, self._waited, self._samples, self._steps = 0.0, 0.0, 0, 0
        if self._saves:
            saves, self._saves = self._saves, []
            self._publisher.saved(*map(sum, zip(*saves, strict=True)))
        self._publisher.beat(step)

    def close(self) -> None:
        """Tell nothing more."""
        self._patches.undo()
        self._publisher.close()
        atexit.unregister(self.close)

    def _read(self) -> None:
        rate = self.optimizer.param_groups[0].get("lr") if self.optimizer else None
        if isinstance(rate, (int, float)):
            self._publisher.set(learning_rate=float(rate))
        memory = self._torch.cuda.max_memory_allocated(self._device) if self._copied else most_resident_bytes()
        self._publisher.set(memory_bytes=memory)
        loss, self._loss = self._loss, None
        if self._copied:
            self._copy_loss(loss)
        elif loss is not None:
            self._host.copy_(loss)
            self._publisher.set(loss=float(self._shown))

    def _copy_loss(self, loss: Any) -> None:
        """Tell the one whose copy has come from the GPU by now, and have this one copied."""
        assert self._copied
        if self._torch.cuda.is_current_stream_capturing():
            return
        if self._copying and self._copied.query():
            self._publisher.set(loss=float(self._shown))
            self._copying = False
        if loss is not None and not self._copying:
            self._host.copy_(loss, non_blocking=True)
            self._copied.record()
            self._copying = True

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(tensor, *args, **kwargs)
            if self._looking:
                scaled, loss = self._scaled
                self._note(loss if scaled() is tensor else tensor)
            return done

        return backward

    def _watch_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What is scaled for 16 bits is no loss that anybody knows."""

        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if self._looking and isinstance(scaled, self._torch.Tensor):
                self._scaled = ref(scaled), outputs.detach()
            return scaled

        return scale

    def _note(self, loss: Any) -> None:
        plain = type(loss) is self._torch.Tensor and loss.numel() == 1
        if plain and loss.device == self._device and threading.get_ident() == self._thread:
            self._loss = loss.detach().reshape(())

    def _watch_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            stalls = threading.get_ident() == self._thread
            if stalls:
                self._publisher.enter("saving")
            started = time.perf_counter()
            done = original(*args, **kwargs)
            seconds = time.perf_counter() - started
            self._saves.append((seconds, seconds if stalls else 0.0))
            return done

        return save


def gpu_uuid(torch: Any, device: Any) -> str:
    """As NVML has it; "" for a CPU, and where torch does not tell."""
    if device.type != "cuda":
        return ""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{found}" if found else ""
