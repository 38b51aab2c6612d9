"""What `pip install hotloop` alone does not bring."""

from importlib.util import find_spec

from hotloop.core.errors import InputError


def require_torch() -> None:
    """Raise InputError where torch is not installed; it is not imported."""
    if find_spec("torch") is None:
        raise InputError("training needs torch", "it is not installed here", 'pip install "hotloop[train]"')
