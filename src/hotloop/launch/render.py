"""Scripts made of templates; every value that is not ours is quoted for the shell."""

import shlex
import sys
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hotloop.launch.request import Request


def render_script(template: str, request: Request, **more: Any) -> str:
    """A script of a template in this folder.

    Args:
        more: what else the template names.
    """
    made = Environment(  # noqa: S701 - a shell's script is no HTML; quote is what escapes
        loader=PackageLoader("hotloop.launch", ""), undefined=StrictUndefined, trim_blocks=False,
        keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= {"quote": lambda value: shlex.quote(str(value)), "line": _line}
    return made.get_template(template).render(request=request, **more)


def this_python() -> list[str]:
    """What runs hotloop here, and on machines that see the same files."""
    return [shlex.quote(sys.executable), "-P", "-m", "hotloop"]  # -P: a job's folder holds no libraries


def _line(text: str) -> str:
    """On one line, for a comment."""
    return " ".join(text.split())
