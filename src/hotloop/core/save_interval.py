"""How far apart checkpoints lose least."""

import math


def young_interval(save_seconds: float, interruption_seconds: float) -> float:
    """Seconds between saves: sqrt(2 · cost of a save · mean time between interruptions).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_seconds * interruption_seconds)


def daly_interval(save_seconds: float, interruption_seconds: float) -> float:
    """The same to a higher order, for saves that cost much of the time between interruptions.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006, eq. 37.
    """
    if save_seconds >= 2 * interruption_seconds:
        return interruption_seconds
    ratio = save_seconds / (2 * interruption_seconds)
    first = young_interval(save_seconds, interruption_seconds)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds
