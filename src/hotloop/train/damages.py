"""Files that could not be read, as they are met."""

from collections.abc import Callable, Sequence

from hotloop.core.units import count, escaped
from hotloop.train.source import Source
from hotloop.train.world import World


class Damages:
    """What the sources of this rank have met since it started.

    Args:
        warn: told, in a line.
    """

    def __init__(self, sources: Sequence[Source], world: World, warn: Callable[[str], None]) -> None:
        self._sources = sources
        self._world = world
        self._warn = warn
        self._told = 0

    def met(self) -> dict[str, str]:
        """Files and reasons."""
        return {name: reason for source in self._sources for name, reason in source.damages.items()}

    def met_by_all(self) -> dict[str, str]:
        """Those of all ranks, which all have to ask for."""
        return {name: reason for part in self._world.gathered(self.met()) for name, reason in part.items()}

    def tell(self) -> None:
        """At the first, and when they have more than doubled: a class that is gone must not wait for the run's end."""
        met = list(self.met().items())
        if len(met) > 2 * self._told:
            self._told = len(met)
            name, reason = met[-1]
            self._warn(f"{count(len(met), 'damaged file')} since this start; {escaped(name)}: {reason}")
