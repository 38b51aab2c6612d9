"""What is tuned: a job or a script, on this machine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hotloop.attach.command import attached_environment
from hotloop.attach.inside import Attachment
from hotloop.core.environment import has_allocator_settings
from hotloop.core.job import Job
from hotloop.core.job_file import load_job
from hotloop.core.machine import read_machine, usable_cpus
from hotloop.tune.job_trials import JobTrials
from hotloop.tune.script_trials import ScriptTrials
from hotloop.tune.space import Knob, Surroundings, job_space, script_space


def job_target(file: Path, overrides: Sequence[str]) -> tuple[tuple[Knob, ...], JobTrials, Job]:
    """A job file.

    Raises:
        InputError: it, its data or its model cannot be used.
    """
    job = load_job(file, overrides)
    sys.path.append(str(Path.cwd()))
    from hotloop.train.prepare import resolved_job

    resolved, read = resolved_job(job, read_machine())
    from hotloop.train.numa import has_several_nodes

    place = Surroundings(
        usable_cpus(), resolved.device == "cuda", has_several_nodes(os.sched_getaffinity(0)),
        not has_allocator_settings(os.environ),
    )  # fmt: skip
    space = job_space(resolved, place, read, job.task.name == "images")
    return space, JobTrials(resolved, os.environ), resolved


def script_target(command: Sequence[str], level: str) -> tuple[tuple[Knob, ...], ScriptTrials, None]:
    """A command.

    Raises:
        InputError: there is no such program.
    """
    attached_environment(command, Attachment({}, "", {}), os.environ)
    return script_space(usable_cpus(), level), ScriptTrials(command, os.environ), None
