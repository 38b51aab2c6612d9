"""Trials of a script: `hotloop run` with some of its accelerations, ended after some steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp

from hotloop.accelerate.plan import Plan, chosen
from hotloop.attach.command import attached_environment
from hotloop.attach.inside import Attachment
from hotloop.core.tuning import Settings
from hotloop.tune.children import command, removed_if_it_fails
from hotloop.tune.running import Running

_ENTRY = "hotloop.accelerate.runner:begin"
_FIRST_STEPS = 5
"""That say how long a step is, before any are told."""
_NUMBERS = ("workers", "prefetch_factor", "threads")


def plan_of(settings: Settings) -> Plan:
    """What `hotloop run` is to do with these settings."""
    workers, factor, threads = (int(settings.get(name, 0)) for name in _NUMBERS)
    names = [name for name, value in settings.items() if name not in _NUMBERS and value]
    if workers:
        names.append("loader")
    if threads:
        names.append("threads")
    return Plan(chosen("exact", only=names) if names else (), workers, factor, threads, measure=False, asked=True)


class ScriptTrials:
    """Starts a command again and again; a context manager. What it writes while it is tried is its own affair."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment

    def __enter__(self) -> "ScriptTrials":
        return self

    def __exit__(self, *_: object) -> None:
        """Each trial has ended by itself."""

    def __call__(self, settings: Settings) -> Running:
        folder = Path(mkdtemp(prefix="hotloop-"))
        plan = {**asdict(plan_of(settings)), "tell": True, "steps": _FIRST_STEPS}
        inside = attached_environment(
            self._command, Attachment({"torch": _ENTRY}, str(folder), plan), self._environment
        )
        with removed_if_it_fails(folder):
            child = command(self._command, {**inside, "PYTHONUNBUFFERED": "1"}, folder)
        return Running(child, folder)
