"""Ranks that make no progress: found, and shown with what each of them is at."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hotloop.core.units import count, format_seconds
from hotloop.train.heartbeat import ENDED, Heartbeat, asked_file, collective_file, heartbeat_files, stacks_file

_START = 3.0
"""Until its first step is done a rank reads, verifies and compiles; so many times the limit."""
_STACKS_SECONDS = 2.0
_ASK_SECONDS, _OTHERS_SECONDS = 5.0, 10.0
"""Between two questions how other machines get on; for one of them to say first who holds all up."""
_WAITS = ("distributed_c10d", "_engine_run_backward", "torch/cuda/streams", "synchronize")
"""In the stack of a rank that waits for others."""


class Watch:
    """Looks at the heartbeats of ranks.

    Args:
        folder: where they write them.
        limit_seconds: without progress on any rank, after which they hang.
        elsewhere: where ranks of other machines train with them: told whether those of this one have made progress,
            it says how often any machine's have, None if nobody answers.

    Attributes:
        report: what each rank of this machine is at, once they hang, as far as it is known.
    """

    def __init__(
        self, folder: Path, limit_seconds: float, elsewhere: Callable[[bool], int | None] | None = None
    ) -> None:  # fmt: skip
        self.report = ""
        self._folder = folder
        self._limit = limit_seconds
        self._elsewhere = elsewhere
        self._beats: dict[str, Heartbeat] = {}
        self._seen: dict[int, tuple[int, int, str]] = {}
        self._since = self._asked = time.monotonic()
        self._count = 0
        self._moved = False
        self._verdict = ""

    def beats(self) -> dict[int, Heartbeat]:
        """Of the ranks that have written one."""
        for file in heartbeat_files(self._folder):
            with suppress(ValueError):  # it is just being written, in place where the disk is full
                self._beats[file.name] = Heartbeat(**json.loads(file.read_text()))
        return {beat.rank: beat for beat in self._beats.values()}

    def hung(self) -> str:
        """Who holds the others up, in a line; empty while there is progress."""
        beats = self.beats()
        seen, now = _signs(beats), time.monotonic()
        if seen != self._seen:
            self._seen, self._since, self._moved, self._verdict = seen, now, True, ""
        if self._elsewhere and self._has_moved_elsewhere(self._elsewhere, now):
            self._since, self._verdict = now, ""
        begun = beats and all(beat.step for beat in beats.values())
        limit = self._limit if begun else self._limit * _START
        if now - self._since < limit:
            return ""
        if self._verdict:  # whoever holds all up may be elsewhere, and is told there
            return self._verdict if now - self._since >= limit + _OTHERS_SECONDS else ""
        if not beats:
            self.report = "each still imports what it needs, or waits for one that does"
            return f"no rank has begun within {format_seconds(limit)}"
        if self._elsewhere and all(beat.phase == ENDED for beat in beats.values()):
            return ""  # their processes wait for other machines' ranks to end
        return self._judged(beats, limit)

    def forgive(self, seconds: float) -> None:
        """For so long all stood still: a scheduler or a container's runtime had suspended this machine's processes."""
        self._since += seconds

    def _has_moved_elsewhere(self, elsewhere: Callable[[bool], int | None], now: float) -> bool:
        """Ranks wait for those of other machines without a sign of life of their own, for a disk say."""
        if now - self._asked < min(_ASK_SECONDS, self._limit / 4):
            return False
        before, told = self._count, elsewhere(self._moved)
        self._count, self._asked, self._moved = before if told is None else told, now, False
        return self._count != before

    def shown(self) -> str:
        """What each rank is at, now. Takes two seconds."""
        beats = self.beats()
        return self._shown(beats, self._stacks(beats))

    def _shown(self, beats: Mapping[int, Heartbeat], stacks: Mapping[int, str]) -> str:
        return "\n".join(f"--- rank {each}: {self._at(beats[each])}\n{stacks[each]}" for each in sorted(beats))

    def _judged(self, beats: Mapping[int, Heartbeat], limit: float) -> str:
        stacks = self._stacks(beats)
        if _signs(self.beats()) != self._seen:
            return ""
        rank = _culprit(beats, stacks)
        self.report = self._shown(beats, stacks)
        found = f"rank {rank} makes no progress for {format_seconds(limit)}: {_words(beats[rank])}"
        if self._elsewhere and _waits(stacks[rank]):
            self._verdict = f"{found}; it waits, as all of this machine do"
            return ""
        return found

    def _at(self, beat: Heartbeat) -> str:
        file = collective_file(self._folder, beat.rank)
        last = file.read_text() if file.exists() else ""  # none of a rank that holds Python's lock
        return f"{_words(beat)}; last collective: {last}" if last else _words(beat)

    def _stacks(self, beats: Mapping[int, Heartbeat]) -> dict[int, str]:
        for rank in beats:
            collective_file(self._folder, rank).unlink(missing_ok=True)  # of an earlier question
        files = {rank: stacks_file(self._folder, rank) for rank in beats}
        before = {rank: file.stat().st_size for rank, file in files.items()}
        asked_file(self._folder).touch()
        living = [beat for beat in beats.values() if beat.phase != ENDED]  # the others' handler is gone
        for beat in living:
            with suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGUSR2)
        time.sleep(_STACKS_SECONDS)  # they are written by a signal handler, which says nothing when it is done
        return {rank: file.read_bytes()[before[rank] :].decode(errors="replace") for rank, file in files.items()}


def _signs(beats: Mapping[int, Heartbeat]) -> dict[int, tuple[int, int, str]]:
    return {rank: (beat.beats, beat.signs, beat.phase) for rank, beat in beats.items()}


def _words(beat: Heartbeat) -> str:
    return f"{beat.phase} after {count(beat.step, 'step')}"


def _culprit(beats: Mapping[int, Heartbeat], stacks: Mapping[int, str]) -> int:
    """The rank that the others wait for: the one that is furthest behind, and does not wait itself."""

    def order(rank: int) -> tuple[bool, int, bool, bool]:
        return beats[rank].phase == ENDED, beats[rank].beats, beats[rank].phase == "step", _waits(stacks[rank])

    return min(beats, key=order)


def _waits(stack: str) -> bool:
    return any(word in stack for word in _WAITS)
