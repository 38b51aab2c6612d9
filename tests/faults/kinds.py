"""What is done to a training: each kind starts it, disturbs it, and says what must have come of that."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from faults.trials import STEPS, Started, Trial, started

STOPPED_EARLY = 75
_LAST_STEPS = 2 * 23
"""In which a signal may find a run that ends before ranks have agreed to stop."""
_HANG_SECONDS = 60.0
"""For a rank that stands still to be found by a limit of 6 s, and told."""


@dataclass(frozen=True)
class Outcome:
    """Of a start that was disturbed.

    Attributes:
        done: to whom or what, and when, in words; empty: it ended before anything could be done.
        wrong: what should not have been; empty if all was as it should.
        hung: it did not end, or left processes behind.
        damaged: a checkpoint that must not be continued.
    """

    done: str = ""
    wrong: str = ""
    hung: bool = False
    damaged: str = ""


Kind = Callable[[Trial, random.Random, float], Outcome]
"""Disturbs a trial; the float is how many seconds an undisturbed one takes."""


def killed(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """SIGKILL to any of its processes, at any moment. Of several ranks all are started again; one ends as it is. What
    loads data or writes checkpoints for them is done without.
    """
    done, codes = "", (0,)
    with started(trial) as training:
        _wait(trial, training, moments, seconds)
        if there := training.processes():
            victim = moments.choice(there)
            done = training.role(victim)
            _kill(victim)
            codes = (-signal.SIGKILL,) if victim == training.process.pid else (0,)
    if codes != (0,) and training.code == 0 and trial.result["status"] == "finished":  # it was ending
        codes, done = (0,), ""
    return _ended(training, codes, done)


def terminated(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """SIGTERM at any moment: saved and 75, or it was about to end, or had not begun to listen."""
    with started(trial) as training:
        _wait(trial, training, moments, seconds)
        before, here = trial.logged_step, training.process.poll() is None
        training.process.send_signal(signal.SIGTERM)
    if not here:
        return _ended(training, (0,), "")
    deaf, over = before == 0, before >= STEPS - _LAST_STEPS
    codes = (STOPPED_EARLY, *[-signal.SIGTERM] * deaf, *[0] * over)
    return _stopped(trial, training, codes, "training" if before else "starting")


def notified(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """A notice while it starts, compiles, loads, trains, validates or saves, in turns."""
    notice = trial.run.with_suffix(".notice")
    code = trial.run.with_suffix(".code")
    trial = replace(trial, variables={**trial.variables, "TORCHINDUCTOR_CACHE_DIR": str(code)})  # not others' code
    phases = (
        ["compiling"] if trial.setting == "compiled" else ["starting", "loading", "training", "validating", "saving"]
    )
    phase = phases[trial.number % len(phases)]
    with started(trial, f"preemption.file={notice}", "preemption.every=0.1") as training:
        begun: dict[str, Callable[[], bool]] = {
            "starting": lambda: "starting" in training.phases(),
            "compiling": lambda: any(code.rglob("*.cpp")),
            "loading": lambda: bool(trial.logged_step and training.workers()),
            "training": lambda: bool(trial.logged_step),
            "validating": lambda: "validating" in training.phases(),
            "saving": lambda: any((trial.run / "checkpoints").glob(".epoch-*")),
        }
        done = ""
        while not done and training.wait_until(begun[phase]):
            with _held(training.workers() if phase in ("loading", "validating") else []):
                if phase != "validating" or begun[phase]():
                    notice.touch()
                    done = phase
    notice.unlink(missing_ok=True)
    over = trial.logged_step == STEPS  # in the last validation, say
    return _stopped(trial, training, (STOPPED_EARLY, *[0] * (over or not done)), done)


def worker_killed(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """SIGKILL to a process that loads data: the training goes on with another, and says so."""
    done = ""
    with started(trial) as training:
        if training.wait_until(lambda: bool(trial.logged_step and training.workers())):
            worker = moments.choice(training.workers() or [0])
            done = "worker" if worker else ""
            if worker:
                _kill(worker)
    outcome = _ended(training, (0,), done)
    told = not done or trial.logged_step < STEPS or "data worker" in training.err
    return outcome if told else replace(outcome, wrong=outcome.wrong or "that a worker died was not told")


def hung(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """A rank stops for good: it is named, with what each is at, and the job ends soon."""
    number = trial.number % 2
    with started(trial, "ranks.timeout=6 s") as training:
        began = training.wait_until(lambda: bool(trial.records("checkpoint")))
        stopped = training.rank(number) if began else None
        if stopped:
            _kill(stopped, signal.SIGSTOP)
        began_at = time.monotonic()
    if not stopped:
        return _ended(training, (0,), "")
    outcome = _ended(training, (1,), f"rank {number}")
    said = (f"rank {number} makes no progress", "--- rank 0: ", "--- rank 1: ")
    if missing := [words for words in said if words not in training.err]:
        outcome = replace(outcome, wrong=outcome.wrong or f"not told: {missing}")
    if (took := time.monotonic() - began_at) > _HANG_SECONDS:
        outcome = replace(outcome, wrong=outcome.wrong or f"it took {took:.0f} s to end")
    return outcome


@contextmanager
def _held(processes: list[int]) -> Iterator[None]:
    """They stand still for a second more than what is done inside takes: a batch is waited for."""
    for process in processes:
        _kill(process, signal.SIGSTOP)
    yield
    if processes:
        time.sleep(1.0)
    for process in processes:
        _kill(process, signal.SIGCONT)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def disk_full(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """No room for the third checkpoint: the two before it stand."""
    size = 8_000_000 + moments.randrange(9_000_000)  # a checkpoint has 6 MB, and three are there while one is written
    with _small_disk(trial.run, size), started(trial) as training:
        pass
    outcome = _ended(training, (1,), "full")
    told = "No space left" in training.err
    return outcome if told else replace(outcome, wrong=outcome.wrong or f"not told: {training.err[-300:]}")


@contextmanager
def _small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """A disk of that size at a place; afterwards what is on it lies there without."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder], check=True)
    aside = folder.with_suffix(".aside")
    try:
        yield
        shutil.copytree(folder, aside, symlinks=True)
    finally:
        subprocess.run(["umount", folder], check=True)
    folder.rmdir()
    aside.rename(folder)


def slow_disk(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """Each fsync takes a tenth of a second, and any process is killed meanwhile."""
    library = trial.run.with_suffix(".so")
    text = (
        "#include <unistd.h>\n#include <sys/syscall.h>\n"
        "int fsync(int f) { usleep(100000); return syscall(SYS_fsync, f); }\n"
    )
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", "-o", library]
    subprocess.run(command, input=text, text=True, check=True)
    return killed(replace(trial, variables={**trial.variables, "LD_PRELOAD": str(library)}), moments, seconds)


def damaged(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """A file of the newest checkpoint is cut, changed by a bit, or gone: the one before is continued."""
    with started(trial) as training:
        training.wait_until(lambda: len(trial.checkpoints) >= 2)
        training.process.send_signal(signal.SIGTERM)
    newest = trial.checkpoints[-1]
    files = sorted(newest.iterdir())
    file, way = files[trial.number // 3 % len(files)], ("cut", "flipped", "gone")[trial.number % 3]
    content = bytearray(file.read_bytes())
    match way:
        case "cut":
            file.write_bytes(content[: moments.randrange(len(content))])
        case "flipped":
            content[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
            file.write_bytes(content)
        case "gone":
            file.unlink()
    outcome = _ended(training, (0, STOPPED_EARLY), f"{file.name.partition('-')[0]} {way}")
    return replace(outcome, damaged=newest.name)


def _wait(trial: Trial, training: Started, moments: random.Random, seconds: float) -> None:
    """Until a moment between first breath and last; half of the times while it trains, as that is a part of it only."""
    if moments.random() < 0.5:
        step = moments.randrange(STEPS)
        training.wait_until(lambda: trial.logged_step >= step)
        seconds = 0.05
    until = time.monotonic() + moments.uniform(0, seconds)
    training.wait_until(lambda: time.monotonic() >= until)


def _ended(training: Started, codes: tuple[int, ...], done: str) -> Outcome:
    if training.hung:
        return Outcome(done, hung=True)
    wrong = f"code {training.code}: {training.err[-300:]}"
    return Outcome(done) if training.code in codes else Outcome(done, wrong)


def _stopped(trial: Trial, training: Started, codes: tuple[int, ...], done: str) -> Outcome:
    """With 75 all that was trained is saved."""
    outcome = _ended(training, codes, done)
    if training.code == STOPPED_EARLY and trial.newest_step != trial.logged_step:
        lost = f"stopped after step {trial.logged_step}, saved at step {trial.newest_step}"
        return replace(outcome, wrong=outcome.wrong or lost)
    return outcome


KINDS: dict[str, tuple[Kind, tuple[str, ...], float]] = {
    "killed": (killed, ("one", "ddp", "fsdp", "ddp of 3", "fsdp of 4"), 1.0),
    "terminated": (terminated, ("one", "ddp", "fsdp", "ddp of 3", "fsdp of 4"), 0.5),
    "notified": (notified, ("one", "ddp", "fsdp", "compiled"), 0.2),
    "worker killed": (worker_killed, ("one", "ddp"), 0.1),
    "hung": (hung, ("ddp", "fsdp"), 0.1),
    "disk full": (disk_full, ("one", "ddp", "fsdp"), 0.1),
    "slow disk": (slow_disk, ("one", "fsdp"), 0.1),
    "damaged": (damaged, ("one", "fsdp"), 0.2),
}
"""Each with the settings that take turns, and its trials as a share of the kills."""
