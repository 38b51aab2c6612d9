"""Ranks that make no progress: found, and shown with what each of them is at."""

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hotloop.core.units import count, format_seconds
from hotloop.train.heartbeat import ENDED, Heartbeat, asked_file, collective_file, heartbeat_files, stacks_file

_START = 3.0
"""Before its first step a rank compiles and reads; so many times the limit."""
_STACKS_SECONDS = 2.0
_WAITS = ("distributed_c10d", "_engine_run_backward", "torch/cuda/streams", "synchronize")
"""In the stack of a rank that waits for others."""


class Watch:
    """Looks at the heartbeats of ranks.

    Args:
        folder: where they write them.
        limit_seconds: without progress on any rank, after which they hang.

    Attributes:
        report: what each rank is at, once they hang, as far as it is known.
    """

    def __init__(self, folder: Path, limit_seconds: float) -> None:
        self.report = ""
        self._folder = folder
        self._limit = limit_seconds
        self._seen: dict[int, tuple[int, str]] = {}
        self._since = time.monotonic()

    def beats(self) -> dict[int, Heartbeat]:
        """Of the ranks that have written one."""
        beats = [Heartbeat(**json.loads(file.read_text())) for file in heartbeat_files(self._folder)]
        return {beat.rank: beat for beat in beats}

    def hung(self) -> str:
        """Who holds the others up, in a line; empty while there is progress."""
        beats = self.beats()
        seen = {rank: (beat.beats, beat.phase) for rank, beat in beats.items()}
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        begun = beats and all(beat.beats for beat in beats.values())
        limit = self._limit if begun else self._limit * _START
        if now - self._since < limit:
            return ""
        if not beats:
            self.report = "each still imports what it needs, or waits for one that does"
            return f"no rank has begun within {format_seconds(limit)}"
        stacks = self._stacks(beats)
        rank = _culprit(beats, stacks)
        self.report = "\n".join(f"--- rank {each}: {self._at(beats[each])}\n{stacks[each]}" for each in sorted(beats))
        at = beats[rank]
        return f"rank {rank} makes no progress for {format_seconds(limit)}: {_words(at)}"

    def _at(self, beat: Heartbeat) -> str:
        file = collective_file(self._folder, beat.rank)
        last = file.read_text() if file.exists() else ""  # none of a rank that holds Python's lock
        return f"{_words(beat)}; last collective: {last}" if last else _words(beat)

    def _stacks(self, beats: Mapping[int, Heartbeat]) -> dict[int, str]:
        asked_file(self._folder).touch()
        living = [beat for beat in beats.values() if beat.phase != ENDED]  # the others' handler is gone
        for beat in living:
            with suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGUSR2)
        time.sleep(_STACKS_SECONDS)  # they are written by a signal handler, which says nothing when it is done
        return {rank: stacks_file(self._folder, rank).read_text() for rank in beats}


def _words(beat: Heartbeat) -> str:
    return f"{beat.phase} after {count(beat.step, 'step')}"


def _culprit(beats: Mapping[int, Heartbeat], stacks: Mapping[int, str]) -> int:
    """The rank that the others wait for: the one that is furthest behind, and does not wait itself."""

    def order(rank: int) -> tuple[bool, int, bool, bool]:
        waits = any(word in stacks[rank] for word in _WAITS)
        return beats[rank].phase == ENDED, beats[rank].beats, beats[rank].phase == "step", waits

    return min(beats, key=order)
