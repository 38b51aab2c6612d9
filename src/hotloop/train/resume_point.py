"""Which checkpoint a start goes on from: the newest here or in object storage, or one that was named."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hotloop.core.errors import CheckpointError, HotloopError, InputError
from hotloop.core.job import Job
from hotloop.core.process import parent_started
from hotloop.core.run import Run
from hotloop.train.checkpoint.checkpointer import (
    Checkpointer,
    Loaded,
    all_checkpoints,
    load_checkpoint,
    named_checkpoint,
    newest_path,
)
from hotloop.train.checkpoint.copies import Copies, remove_left
from hotloop.train.checkpoint.files import Position, position_of
from hotloop.train.checkpoint.hashes import HashedTogether, Hashes
from hotloop.train.heartbeat import Heart
from hotloop.train.loop import Parts
from hotloop.train.resolve import Choice
from hotloop.train.resume import check_device, check_identity, set_aside
from hotloop.train.world import SAVED, World, under_torchrun

Notify = Callable[[str], None]


def started_again(job: Job, resume: str, world: World, notify: Notify) -> tuple[Job, str]:
    """The job and what it resumes: after a restart the run that these ranks, or the same command, have begun.

    Raises:
        HotloopError: that run is no longer there.
    """
    begun = world.noted("run")
    run = Run(Path(job.run.dir)) if world.first and job.run.dir else None
    if run and under_torchrun() and _has_begun(run, saved=resume != "never"):
        return job, "auto"
    if begun:
        if not Path(begun).is_dir():
            raise gone(Path(begun))
        job = job.model_copy(update={"run": job.run.model_copy(update={"dir": begun})})
        return job, "auto" if resume == "never" or world.noted(SAVED) else resume
    if run and (own := saved_since(run, job, resume)):
        new = f"to begin there again: --set run.dir=NEW --resume {resume}"
        notify(f"going on from {own}, which the same command has saved after it began from {resume}; {new}")
        return job, "auto"
    return job, resume


def _has_begun(run: Run, saved: bool) -> bool:
    """Whether ranks that the same torchrun has started have begun a run, or have saved in it."""
    newest = (newest_path(run.checkpoints) if saved else run.machine_file) if run.exists else None
    return bool(newest and newest.stat().st_mtime >= parent_started())


def saved_since(run: Run, job: Job, resume: str) -> Path | None:
    """What a start has saved that was told by the same command to go on from a checkpoint by name.

    A launcher that repeats a command loses nothing by it.
    """
    itself = (run.directory.resolve(), run.checkpoints.resolve())
    if resume in ("auto", "never") or Path(resume).resolve() in itself or not run.origin_file.is_file():
        return None
    try:
        origin = json.loads(run.origin_file.read_text())
        command_hash, position = origin["command_hash"], (int(origin["epoch"]), int(origin["step"]))
    except (ValueError, KeyError, TypeError):
        return None
    saved = [path for at, path in all_checkpoints(run.checkpoints) if at >= position]
    return saved[0] if saved and command_hash == hash_of_command(job, resume) else None


def hash_of_command(job: Job, resume: str) -> str:
    """The same for the same command alone."""
    return hashlib.sha256(f"{job.model_dump_json()} {os.path.abspath(resume)}".encode()).hexdigest()


def gone(directory: Path) -> HotloopError:
    """A run's directory is not there any more."""
    return HotloopError(
        f"{directory} has gone",
        "the run's directory was deleted or moved, or its disk is no longer mounted, while it trained",
        "bring it back and start the same command again; anew: --set run.dir=NEW",
    )


def looked_up(job: Job, resume: str, notify: Notify, heart: Heart) -> Loaded | None:
    """The checkpoint that was asked for by name, on the first rank; the run that is not to be continued steps aside."""
    together = HashedTogether(heart.world)
    with heart.working():
        if not heart.world.first:
            together.serve()
            return None
        if resume == "never" and job.run.dir:
            _set_aside(job, Path(job.run.dir), notify)
        named = resume not in ("auto", "never")
        loaded = named_checkpoint(Path(resume), notify, lazily=True, hashes=together) if named else None
        together.end()
    return loaded


def _set_aside(job: Job, directory: Path, notify: Notify) -> None:
    if job.checkpoint.copy_to:  # before anything is renamed
        _refuse_earlier(Copies(job.checkpoint, job.storage, directory.absolute().name), "never")
    if aside := set_aside(directory):
        notify(f"the earlier run is now {aside}")


def open_copies(job: Job, run: Run, resume: str, stack: ExitStack) -> Copies | None:
    """Where the run's checkpoints are copied to, if they are.

    Raises:
        InputError: the store does not answer, or holds copies of an earlier run that is not to be continued.
    """
    remove_left(run.checkpoints)
    if not job.checkpoint.copy_to:
        return None
    copies = Copies(job.checkpoint, job.storage, run.directory.name)
    stack.callback(copies.close)
    if resume != "auto" and not newest_path(run.checkpoints):
        _refuse_earlier(copies, resume)
    return copies


def _refuse_earlier(copies: Copies, resume: str) -> None:
    if copies.positions():
        raise InputError(
            f"{copies.url} has checkpoints of an earlier run", f"--resume {resume} does not continue them",
            "--set checkpoint.copy_to=OTHER, or remove them there",
        )  # fmt: skip


def find(parts: Parts, named: Loaded | None, choices: list[Choice], command_hash: str) -> Loaded | None:
    """The checkpoint to go on from: on all ranks the one that the first has chosen, and all have verified.

    Args:
        named: that was asked for; None: the newest, if there is one.
        command_hash: of what has started this, by `hash_of_command`.

    Raises:
        InputError: it is of something else; the store does not answer.
        CheckpointError: there are some, and none can be used now.
    """
    world, together = parts.world, HashedTogether(parts.world)
    if not world.first:
        together.serve()
        chosen = world.from_first(None)
        return load_checkpoint(chosen, lazily=True, hashes=None) if chosen else None
    checkpointer = Checkpointer(parts.run.checkpoints, warn=parts.observer.warn)
    loaded = named or _newest(parts, checkpointer, together)
    if loaded:
        check_identity(loaded, parts.identity)
        check_device(loaded, choices)
    if named:
        if parts.copies:
            parts.copies.drop_newer(named.position, or_same=not is_own(named, parts.run))
        checkpointer.abandon_for(named)
        parts.run.write_origin(named.path, named.position, command_hash)
    together.end()
    world.from_first(loaded.path if loaded else None)
    return loaded


def is_own(loaded: Loaded, run: Run) -> bool:
    """Whether it is one of those that the run has saved, and counts."""
    at_home = loaded.path.resolve().parent == run.checkpoints.resolve()
    return at_home and position_of(loaded.path.name) == loaded.position


def _newest(parts: Parts, checkpointer: Checkpointer, hashes: Hashes) -> Loaded | None:
    """The newest that is whole. Object storage may have a newer one: this disk may be of a machine that was away."""
    here = newest_path(parts.run.checkpoints)
    _fetch(parts, position_of(here.name) if here else None)
    newest = newest_path(parts.run.checkpoints)
    try:
        loaded = checkpointer.latest(lazily=True, hashes=hashes)
    except CheckpointError as error:  # those here are damaged and set aside
        if newest_path(parts.run.checkpoints) or not parts.copies:
            raise
        parts.observer.warn(error.what)
        if not (newest and _fetch(parts, None)):
            raise
        return checkpointer.latest(lazily=True, hashes=hashes)
    if loaded and loaded.path != newest and _fetch(parts, loaded.position):
        return checkpointer.latest(lazily=True, hashes=hashes)
    return loaded


def _fetch(parts: Parts, after: Position | None) -> bool:
    """Bring the newest copy that can be used, if it is newer than that; whether there is one."""
    folder = parts.run.checkpoints
    if not parts.copies:
        return False
    fetched = parts.copies.fetch_newest(folder, parts.observer.warn, _alive(parts.heart, folder), after)
    if fetched:
        parts.observer.warn(f"{fetched} was fetched from {parts.copies.url}")
    return fetched is not None


_ALIVE_SECONDS = 10.0


def _alive(heart: Heart, folder: Path) -> Callable[[], None]:
    """To be called while the first rank alone has much to do: the others, which wait to `serve`, hear of it."""
    told = time.monotonic()

    def alive() -> None:
        nonlocal told
        heart.beat()
        if time.monotonic() - told > _ALIVE_SECONDS:
            HashedTogether(heart.world)(folder, ())
            told = time.monotonic()

    return alive
