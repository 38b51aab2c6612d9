"""All that is found about a launch before it begins."""

from collections.abc import Mapping, Sequence

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
    found = network_findings(launch, request.nodes, shell, interfaces)
    if launch.image and (on == "local" or (on == "slurm" and launch.slurm.containers == "none")):
        fix = "--set launch.slurm.containers=apptainer" if on == "slurm" else '--set launch.image=""'
        found.append(LaunchFinding("image-unused", f"launch.image is not used on {on}: this Python trains", fix))
    return found
