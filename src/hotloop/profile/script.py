"""Profile a script from outside: start it, let it be measured inside, and conclude."""

import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hotloop.attach.command import NOT_ENTERED, Ended, run_attached
from hotloop.attach.inside import Attachment
from hotloop.core.errors import HotloopError
from hotloop.core.files import write_atomic
from hotloop.core.profile import Profile
from hotloop.core.units import count
from hotloop.pages.profile import render_profile
from hotloop.profile.conclude import conclude, read_measured
from hotloop.profile.folder import made
from hotloop.profile.measured import Measured
from hotloop.profile.plan import Plan
from hotloop.profile.tensorboard import check_tensorboard, write_events

_ENTRY = "hotloop.profile.watch:begin"
_FEWER_STEPS = "measure fewer steps: hotloop profile --steps 6 -- python train.py"
_SIGNALS = 128
"""Exit codes beyond it are of commands that a signal has ended."""
_INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Who sends one wants the script's own exit code."""
_INTERRUPTED = {_SIGNALS + number for number in _INTERRUPTS}


@dataclass(frozen=True)
class Outcome:
    """What came of profiling a script.

    Attributes:
        code: the script's own exit code.
        profile: None if it failed before enough was measured.
        failure: then, what to do about it.
    """

    code: int
    profile: Profile | None
    failure: HotloopError | None = None


def profile_script(
    command: Sequence[str], plan: Plan, environment: Mapping[str, str], results: Path, output: int | None = None,
    tensorboard: bool = False,
) -> Outcome:  # fmt: skip
    """Run a command and measure the training in it.

    Args:
        results: a folder to be made: `profile.json`, `report.html` and `trace.json`; gone if nothing was measured.
        tensorboard: whether a folder `tensorboard` with events is written as well.
        output: a file descriptor for what the command writes to its standard output, in place of ours.

    Raises:
        InputError: there is no such program, or the folder cannot be made.
        HotloopError: it ended well, and no training was seen in it.
    """
    if tensorboard:
        check_tensorboard()
    with made(results), tempfile.TemporaryDirectory(prefix="hotloop-") as name:
        folder = Path(name)
        ended = run_attached(command, Attachment({"torch": _ENTRY}, name, asdict(plan)), environment, output)
        code = ended.code
        measured = read_measured(folder)
        enough = [one for one in measured if one.is_enough]
        if not enough and not code:
            raise _nothing_seen(command, ended, measured)
        if not enough:
            return Outcome(code, None, _ended_early(ended, measured))
        interrupted = code in _INTERRUPTED or bool(ended.signals & _INTERRUPTS)
        if not interrupted and any(one.left_out for one in enough):
            code = 0  # what was left out may have broken it; a note tells it
        profile, line, trace = conclude(enough, folder, command)
        files = {"report": str(results / "report.html"), "json": str(results / "profile.json")}
        if trace:
            shutil.move(trace, results / "trace.json")
            files["trace"] = str(results / "trace.json")
        if tensorboard:
            watched = next(one for one in enough if one.is_enough).block("watched")
            assert watched
            write_events(results / "tensorboard", profile, watched.steps)
            files["tensorboard"] = str(results / "tensorboard")
        profile = replace(profile, files=files)
        page = render_profile(profile, *((line.times, line.span, line.memory) if line else ({}, (0.0, 0.0), ())))
        write_atomic(results / "report.html", page.encode(errors="backslashreplace"))
        write_atomic(results / "profile.json", profile.to_json().encode())
    return Outcome(code, profile)


def _nothing_seen(command: Sequence[str], ended: Ended, measured: Sequence[Measured]) -> HotloopError:
    """Why a script that ended well has no profile."""
    what = f"{' '.join(command)}: nothing was measured"
    if not ended.entered:
        return HotloopError(what, NOT_ENTERED, "hotloop profile -- python train.py")
    if measured:
        return HotloopError(what, _unfinished(measured), f"let it train longer, more epochs say; or {_FEWER_STEPS}")
    cause = "no optimizer of torch's stepped in it, and nothing went backward"
    return HotloopError(what, cause, "profile the command that trains: hotloop profile -- python train.py")


def _ended_early(ended: Ended, measured: Sequence[Measured]) -> HotloopError:
    """Why a script that failed, or was interrupted, has no profile."""
    what = f"the command ended with code {ended.code} before enough was measured"
    if not ended.entered:
        return HotloopError(what, NOT_ENTERED, "run the command by itself, and mend what ends it")
    if ended.code > _SIGNALS or ended.signals:
        return HotloopError(what, _unfinished(measured), f"let it run until hotloop ends it; or {_FEWER_STEPS}")
    return HotloopError(what, _unfinished(measured), "run the command by itself, and mend what ends it")


def _unfinished(measured: Sequence[Measured]) -> str:
    """How far processes came none of which was measured to the end."""
    if not measured:
        return "it ended before the first step of an optimizer"
    failed = [note for one in measured for note in one.unseen if "Error: " in note]
    seen = max((one.steps_seen for one in measured), default=0)
    ended = f"it ended after {count(seen, 'step')}" if seen else "it ended"  # one that ends by os._exit has not counted
    return (
        "; ".join(failed) or f"{ended}, before warm-up, watching and tracing were over: some 15 s, and 40 steps or more"
    )
