"""Where in a user's own code an error came from."""

import linecache
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""Where files begin that are not the user's own."""


def own_line(error: BaseException) -> str:
    """The last line of the user's own that an error passed through, as ": FILE, line N: CODE"; empty without one."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_LIBRARIES)]
    if not frames:
        return ""
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f": {Path(last.filename).name}, line {last.lineno}: {line}"
