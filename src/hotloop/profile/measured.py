"""What is measured inside a script's process, as plain data that travels to the one that started it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ENOUGH = 6
"""Steps for a mean of slow ones."""
_BUSY = 0.7
"""Share of the time on a processor from which on a worker is held up by computing, and not by waiting."""


@dataclass(frozen=True)
class StepTime:
    """One step: from the end of an optimizer's step to the end of its next.

    Attributes:
        seconds: by the host's clock.
        input: of those, waiting in a DataLoader.
        compiling: in torch.compile.
        loads: batches taken.
        regular: whether it was one like others: no epoch began or ended, nothing but training was done.
    """

    seconds: float
    input: float = 0.0
    compiling: float = 0.0
    loads: int = 0
    regular: bool = True


@dataclass(frozen=True)
class LoaderFacts:
    """A DataLoader as it was found.

    Attributes:
        line: where it is iterated over, "FILE:LINE".
        dataset: name of its class.
        workers_busy: share of the time in which a worker was on a processor or waited for one, a mean over them;
            without workers, that the loading itself was.
        epoch_start_seconds: each time that an iteration began, until its first batch.
        can_be_replaced: whether other workers can take their place while the script runs: forks, asked for by the main
            thread.
    """

    line: str = ""
    workers: int = 0
    batch_size: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int = 0
    dataset: str = ""
    workers_busy: float = 0.0
    epoch_start_seconds: tuple[float, ...] = ()
    can_be_replaced: bool = True

    @property
    def is_busy(self) -> bool:
        """Whether those who load are held up by computing."""
        return self.workers_busy >= _BUSY


@dataclass(frozen=True)
class Block:
    """Steps under one condition.

    Attributes:
        name: "watched", "bare" (without any hook) or an ablation.
        queued: share of the time in which a thread of ours was ready but had no processor.
        late: share of the time in which the thread that trains was.
        lines: how often a line of the script was seen at work, "FILE:LINE".
        device_seconds: of each step by the GPU's own events; empty on a CPU.
        own: seconds of the host a step that our stand-ins took.
        looks: how often lines were looked for.
        in_models: how often one was seen while a module was being called.
    """

    name: str
    steps: tuple[StepTime, ...]
    queued: float = 0.0
    late: float = 0.0
    lines: Mapping[str, int] = field(default_factory=dict)
    device_seconds: tuple[float, ...] = ()
    own: float = 0.0
    looks: int = 0
    in_models: int = 0

    def plus(self, more: "Block") -> "Block":
        """With further steps under the same condition."""
        parts = len(self.steps), len(more.steps)
        queued = (self.queued * parts[0] + more.queued * parts[1]) / sum(parts)
        late = (self.late * parts[0] + more.late * parts[1]) / sum(parts)
        seconds = self.device_seconds + more.device_seconds
        return replace(self, steps=self.steps + more.steps, queued=queued, late=late, device_seconds=seconds)


@dataclass(frozen=True)
class Measured:
    """What one process has found.

    Attributes:
        device: "cuda" or "cpu", where the optimizer's parameters are.
        device_name: of the card or the processor.
        steps_seen: optimizer steps from the start on.
        complete: whether all blocks that were planned have been measured.
        unseen: what could not be measured, and why.
        sync_lines: seconds a step by line that waited for the GPU, "FILE:LINE CALL".
        waits: how often a step waits for it.
        memory: bytes allocated and reserved, and counts a step of what the allocator did.
        facts: of torch and the model, such as threads, precision switches, modules of note.
        hooks_ratio: the part of a watched step that our own code took on the host.
        trace: the file with the Chrome trace; empty if there is none.
        left_out: what is being left out now; if the script fails meanwhile, that is why.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: str = "cpu"
    device_name: str = ""
    steps_seen: int = 0
    complete: bool = False
    unseen: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    loader: LoaderFacts | None = None
    sync_lines: Mapping[str, float] = field(default_factory=dict)
    waits: float = 0.0
    memory: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    hooks_ratio: float = 0.0
    trace: str = ""
    left_out: str = ""

    def block(self, name: str) -> Block | None:
        """The block of that name."""
        return next((block for block in self.blocks if block.name == name), None)

    @property
    def is_enough(self) -> bool:
        """Whether anything can be concluded from it: without a trace nothing tells computing from the rest."""
        watched = self.block("watched")
        got_past_the_trace = bool(self.trace or self.left_out or self.complete)
        return watched is not None and len(watched.steps) >= ENOUGH and got_past_the_trace

    def with_block(self, block: Block) -> "Measured":
        """With it, or with its steps added to the block of its name."""
        known = self.block(block.name)
        blocks = tuple(one.plus(block) if one is known else one for one in self.blocks)
        return replace(self, blocks=blocks if known else (*blocks, block))

    def seen(self, name: str, lines: Mapping[str, int], looks: int, in_models: int) -> "Measured":
        """With what was seen at work in the steps of that block."""
        return replace(
            self,
            blocks=tuple(
                replace(block, lines=lines, looks=looks, in_models=in_models) if block.name == name else block
                for block in self.blocks
            ),
        )

    def without_block(self, name: str) -> "Measured":
        """Without what was measured under that name."""
        return replace(self, blocks=tuple(block for block in self.blocks if block.name != name))

    def save(self, folder: Path) -> None:
        """Write it to a file of this process's in `folder`."""
        file = folder / f"measured-{os.getpid()}.json"
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(file)

    @classmethod
    def load(cls, file: Path) -> "Measured":
        """Read what a rank has written."""
        from pydantic import TypeAdapter  # which the script's environment may not have

        return TypeAdapter(cls).validate_json(file.read_bytes())
