"""Found by every Python process that `hotloop` starts, children included: starts hotloop there, then makes way for the
user's own `sitecustomize`.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parents[1]


class _Hotloop:
    """Finds hotloop where it lies, in environments in which it is not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "hotloop":
            return None
        return spec_from_file_location(name, _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)])


def _start() -> None:
    try:
        sys.meta_path.append(_Hotloop)
        from hotloop.attach.inside import start

        start()
    except Exception as error:  # the user's process goes on in any case
        print(f"hotloop could not start in this process: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


def _make_way() -> None:
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    own = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")  # the user's own
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


try:
    _start()
finally:
    _make_way()
