"""All that is found about a launch before it begins."""

from collections.abc import Mapping, Sequence

from hotloop.core.job import LaunchSection
from hotloop.launch.finding import LaunchFinding
from hotloop.launch.network import network_findings
from hotloop.launch.request import Request


def launch_findings(
    request: Request, on: str, shell: Mapping[str, str], interfaces: Sequence[str] | None
) -> list[LaunchFinding]:
    """In the order in which they matter.

    Args:
        on: the engine's name.
        shell: the variables that the launch finds.
        interfaces: of the machine that it runs on; None: not known.
    """
    launch = request.job.launch
    return [*network_findings(launch, request.nodes, shell, interfaces), *_engine(launch, request.gpus, on)]


def _engine(launch: LaunchSection, gpus: int, on: str) -> list[LaunchFinding]:
    without = on == "local" or (on == "slurm" and launch.slurm.containers == "none")
    rules = [
        ("image-unused", bool(launch.image) and without, f"launch.image is not used on {on}: this Python trains",
         "--set launch.slurm.containers=apptainer" if on == "slurm" else '--set launch.image=""'),
        ("cpus-default", on == "slurm" and gpus > 0 and launch.cpus == "auto",
         "launch.cpus is auto: on many clusters that is one processor for all of a machine's processes",
         f"--set launch.cpus={8 * max(1, gpus)}, or what a machine has"),
    ]  # fmt: skip
    return [LaunchFinding(id_, what, fix) for id_, wrong, what, fix in rules if wrong]
