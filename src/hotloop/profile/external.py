"""Other profilers, started so that they record steps after warm-up and nothing else."""

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hotloop.attach.command import run_attached
from hotloop.attach.inside import Attachment
from hotloop.core.errors import HotloopError, InputError
from hotloop.profile.folder import made
from hotloop.profile.measured import Measured
from hotloop.profile.plan import Plan


@dataclass(frozen=True)
class Tool:
    """A profiler.

    Attributes:
        options: of its own; {out} stands for its file without a suffix, {control} for a pipe by which it is switched.
        suffix: of its file.
        view: how to look at that.
        source: where it is to be had.
    """

    program: str
    options: tuple[str, ...]
    suffix: str
    view: str
    source: str

    def command(self, out: Path, control: Path) -> list[str]:
        """What starts it, up to the command that it records."""
        return [self.program, *(option.format(out=out, control=control) for option in self.options)]


TOOLS = {
    "nsys": Tool(
        "nsys",
        (
            "profile", "--trace=cuda,nvtx,osrt,cudnn,cublas", "--sample=process-tree",
            "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--output={out}",
        ),
        ".nsys-rep", "nsys-ui", "https://developer.nvidia.com/nsight-systems",
    ),
    "ncu": Tool(
        "ncu",
        ("--profile-from-start=off", "--target-processes=all", "--set=basic", "--export={out}"),
        ".ncu-rep", "ncu-ui", "https://developer.nvidia.com/nsight-compute",
    ),
    "perf": Tool(
        "perf",
        (
            "record", "--quiet", "--freq=499", "--call-graph=fp", "--delay=-1", "--control=fifo:{control}",
            "--output={out}.data", "--",
        ),
        ".data", "perf report -i", "the package linux-perf or linux-tools",
    ),
}  # fmt: skip


def record(
    name: str, command: Sequence[str], plan: Plan, environment: Mapping[str, str], results: Path
) -> tuple[int, Path]:
    """Run a command under another profiler, which records `plan.steps` steps of it.

    Args:
        results: a folder to be made, for its file.

    Returns:
        the command's exit code, and the file.

    Raises:
        InputError: the profiler, or the command's program, is not there.
        HotloopError: nothing was recorded.
    """
    tool = TOOLS[name]
    out = results / name
    if not shutil.which(tool.program, path=environment.get("PATH")):
        whole = shlex.join([*tool.command(out, Path("CONTROL")), *command])
        raise InputError(f"{tool.program} is not installed", f"it would have been started as: {whole}", tool.source)
    with made(results), tempfile.TemporaryDirectory(prefix="hotloop-") as folder:
        control = Path(folder) / "control"
        os.mkfifo(control)
        # Python 3.12 and newer tell perf the names of their functions: https://docs.python.org/3/howto/perf_profiling.html
        inside = {**environment, "PYTHONPERFSUPPORT": "1"} if name == "perf" else environment
        settings = asdict(replace(plan, tool=name, ablate=False))
        attachment = Attachment({"torch": "hotloop.profile.watch:begin"}, folder, settings)
        code = run_attached([*tool.command(out.absolute(), control), *command], attachment, inside).code
        recorded = [Measured.load(file) for file in Path(folder).glob("measured-*.json")]
    file = out.with_suffix(tool.suffix)
    if not file.exists() or not any(one.complete for one in recorded):
        shutil.rmtree(results, ignore_errors=True)  # gone if it was empty
        seen = max((one.steps_seen for one in recorded), default=0)
        notes = "; ".join(note for one in recorded for note in one.unseen if "Error" in note)
        cause = f"{seen} steps were seen; {notes or 'warm-up alone takes 15'}"
        raise HotloopError("nothing was recorded", cause, f"try {tool.program} by itself: {tool.program} --version")
    return code, file
