"""Objects of the user's own, named in a job as "module:name"."""

import importlib
from difflib import get_close_matches
from typing import Any

from hotloop.core.errors import InputError


def load_object(reference: str, key: str) -> Any:
    """The object that "module:name" names; `key` is where the job says so.

    Raises:
        InputError: the module cannot be imported, or has nothing of that name.
    """
    module_name, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's file, which may raise anything
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]
        raise InputError(
            f'{key} = "{reference}" cannot be imported',
            f"{type(error).__name__}: {error}",
            "start hotloop in the folder that holds the module" if absent else f"mend {module_name}",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            raise InputError(
                f'{key} = "{reference}": {module_name} has no {part}',
                f"the nearest name is {near[0]}" if near else "nothing in it has a name like that",
                f'--set {key}="{module_name}:{near[0]}"' if near else f"name something that {module_name} defines",
            )
        found = getattr(found, part)
    return found
