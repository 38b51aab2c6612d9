"""`hotloop plan`: a job, unless one of its commands is named."""

import click

from hotloop.cli.lazy import LazyGroup

_COMMANDS = {
    "job": ("hotloop.cli.plan_job:job", "Say what a job needs, how long it takes, where, for how much."),
    "spot": (
        "hotloop.cli.plan_spot:spot",
        "Say whether machines that may be taken away pay.",
    ),
    "catalog": ("hotloop.cli.plan_catalog:catalog", "Show the prices that are known, or take new ones."),
}


class _Plans(LazyGroup):
    """What is no command is a job file."""

    named = _COMMANDS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = next((word for word in args if not word.startswith("-")), "")
        helped = {"-h", "--help"} & set(args)
        if args and named not in _COMMANDS and not (helped and not named):
            args = ["job", *args]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] JOB | spot | catalog"]


@click.group(cls=_Plans, context_settings={"help_option_names": ["-h", "--help"]})
def plan() -> None:
    """Say what a training will need and cost, before it starts.

    hotloop plan job.toml is short for hotloop plan job job.toml.
    """
