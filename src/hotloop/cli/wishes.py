"""Options that say what driver, cards and versions there are, shared by commands that ask the versions table."""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.versions.solve import Wish
    from hotloop.versions.table import Table

F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLES = {"driver": "580.95.05", "python": "3.12", "cuda": "12.8", "glibc": "2.31"}


def typed(context: click.Context, option: click.Parameter, value: str) -> str:
    """What was typed for an option. A shell's variable that is empty would pass for an option that was left out."""
    if not value and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
        raise InputError(
            f"--{option.name} is empty", "a shell's variable without a value, as a rule", "name it, or leave it out"
        )
    return value


def wish_options(python: str) -> Callable[[F], F]:
    """Add --driver, --gpu, --sm, --python, --torch and --cuda to a command.

    Args:
        python: in the help, which one is meant if none is named.
    """
    options = (
        click.option("--driver", default="", callback=typed, metavar="VERSION", help="Of NVIDIA's driver: 535.104.05."),
        click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="A card: V100, RTX 4090; may be repeated."),
        click.option("--sm", "capabilities", multiple=True, metavar="N",
                     help="A card's compute capability: 90; or 9.0."),
        click.option("--python", default="", callback=typed, metavar="VERSION", help=f"3.11; otherwise {python}."),
        click.option("--torch", default="", callback=typed, metavar="SPEC",
                     help='Which torch is wanted: "2.11", ">=2.8".'),
        click.option("--cuda", default="", callback=typed, metavar="VERSION",
                     help="Which CUDA is wanted: 12, or 12.8."),
    )  # fmt: skip

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def read_wish(
    table: "Table", gpus: Sequence[str], capabilities: Sequence[str], given: Mapping[str, str], torch: str, *,
    aarch64: bool, example: str,
) -> "Wish":  # fmt: skip
    """What was typed, and what this machine has, unless a driver or a card is named.

    Args:
        given: driver, python, cuda and glibc as typed; empty ones are not asked about.
        example: a command for a machine without a driver.

    Raises:
        InputError: something typed is no version or no card; or nothing is named, and there is no driver here.
    """
    from hotloop.versions.solve import Wish
    from hotloop.versions.table import capability_of, has_arm, specifier_of, version_of

    here = {} if given.get("driver") or gpus or capabilities else _this_machine(example)
    cards = {*map(table.capability, gpus), *map(capability_of, capabilities), *here.pop("cards", ())}
    known = {}
    for name, text in given.items():
        if text:
            version = version_of(text, f"--{name}", _EXAMPLES[name])
            known[name] = text
            if name == "python" and (version.major != 3 or len(version.release) < 2):
                raise InputError(
                    f"--python {text} is no version of Python 3", "3 and a number after it", "--python 3.12"
                )
    processor = {"processor": "aarch64"} if aarch64 or any(map(has_arm, gpus)) else {}
    return Wish(**{**here, **known, **processor, "cards": tuple(sorted(cards)), "torch": specifier_of(torch)})


def _this_machine(example: str) -> dict[str, Any]:
    from hotloop.core.machine import read_machine
    from hotloop.versions.table import capability_of

    machine = read_machine()
    if not machine.driver:
        raise InputError("there is no NVIDIA driver here", "nothing to resolve for is named", example)
    return {
        "driver": machine.driver,
        "cards": tuple(capability_of(gpu.capability) for gpu in machine.gpus if gpu.capability),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "glibc": platform.libc_ver()[1],
        "processor": platform.machine(),
    }
