"""Settings of a script that trials have found: a TOML file."""

from pathlib import Path

from hotloop.accelerate.plan import Plan, chosen
from hotloop.core.errors import InputError
from hotloop.core.files import read_toml


def read_settings(file: Path) -> Plan:
    """The plan that a file asks for.

    Raises:
        InputError: it cannot be read, or says something else.
    """
    from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

    class Run(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)

        accelerations: list[str]
        workers: NonNegativeInt = 0
        prefetch_factor: NonNegativeInt = 0
        threads: NonNegativeInt = 0

    fix = f"hotloop tune --out {file} -- python train.py"
    content = read_toml(file, fix)
    try:
        found = Run.model_validate(content.get("run", {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["run", *map(str, first["loc"])])
        raise InputError(f"{file} is no file of settings", f"{where}: {first['msg']}", fix) from error
    names = chosen("exact", only=found.accelerations) if found.accelerations else ()
    return Plan(names, found.workers, found.prefetch_factor, found.threads, measure=False, asked=True)
