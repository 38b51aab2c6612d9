"""What `hotloop plan spot` says of traces that it has not seen.

Each trace of a zone is cut in half: the plan is made from the machines of the first half, and trainings are played
through the second one from many moments, with the planned interval and with Young's. Waste is the share of the paid
time that is no work. What can be predicted at all is told by a plan that knows the lifetimes of the second half. The
traces are public ones in the form of https://github.com/skypilot-org/spot-traces (a clone of it is given with
`--traces`): how many machines a zone gives, tick by tick.

Goals: predicted waste within 20 % of what is played through, nine in ten between its low and high; never more waste
than with Young's interval.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record import publish

from hotloop.plan.advice import Asked, advise
from hotloop.plan.replay import Life, replay
from hotloop.plan.spot import Costs

LEAST_LIVES, STARTS, WORK_LIVES = 20, 200, 10
SAVES = (10.0, 60.0, 300.0)


def lives_of(file: Path) -> list[Life]:
    """The times in which a zone gave a machine."""
    content = json.loads(file.read_text())
    gap, lives, at = content["metadata"]["gap_seconds"], [], 0
    for there, ticks in itertools.groupby(tick > 0 for tick in content["data"]):
        length = len(list(ticks))
        if there:
            lives.append(Life(at * gap, (at + length) * gap, ended=at + length < len(content["data"])))
        at += length
    return lives


def waste(lives: Sequence[Life], work: float, interval: float, costs: Costs) -> tuple[float, float]:
    """Mean share of the paid time that is no work, and the error of that mean."""
    begin = lives[0].start
    shifted = [Life(life.start - begin, life.end - begin, life.ended) for life in lives]
    moments = np.random.default_rng(0).uniform(0.0, shifted[-1].end, STARTS)
    played = [replay(shifted, work, interval, costs, float(moment)) for moment in moments]
    shares = [1 - work / one.paid for one in played]
    return statistics.mean(shares), statistics.stdev(shares) / STARTS**0.5


def of_trace(file: Path, name: str) -> list[dict[str, Any]]:
    lives = lives_of(file)
    if sum(life.ended for life in lives) < LEAST_LIVES:
        return []
    half = len(lives) // 2
    seen, unseen = lives[:half], lives[half:]
    rows = []
    for save in SAVES:
        costs = Costs(save, restart=180.0)
        advice = advise(Asked(costs, lives=tuple(seen)))
        work = WORK_LIVES * advice.mean
        planned, error = waste(unseen, work, advice.outlook.interval, costs)
        young, _ = waste(unseen, work, advice.young, costs)
        known, _ = waste(seen, work, advice.outlook.interval, costs)
        known_lifetimes = advise(Asked(costs, lives=tuple(unseen), interval=advice.outlook.interval))
        predicted = 1 - advice.outlook.paid_share
        rows.append(
            {
                "trace": name, "save": save, "losses": sum(life.ended for life in seen), "mean": advice.mean,
                "mean_unseen": statistics.mean(life.end - life.start for life in unseen),
                "low": advice.waste_low, "high": advice.waste_high, "known": 1 - known_lifetimes.outlook.paid_share,
                "interval": advice.outlook.interval, "young": advice.young, "predicted": predicted,
                "played": planned, "error": error, "young_played": young, "seen_played": known,
            }
        )  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def off(key: str, predicted: str = "predicted") -> list[float]:
        return [abs(row[predicted] / row[key] - 1) for row in rows]

    ranged = [row for row in rows if row["low"] is not None]
    worse = [row for row in rows if row["played"] > row["young_played"] + 2 * row["error"]]
    return {
        "n": len(rows), "traces": len({row["trace"] for row in rows}),
        "off_median": statistics.median(off("played")), "within_20_percent": sum(one <= 0.2 for one in off("played")),
        "within_20_percent_with_lifetimes_known": sum(one <= 0.2 for one in off("played", "known")),
        "between_low_and_high": sum(row["low"] <= row["played"] <= row["high"] for row in ranged), "of": len(ranged),
        "high_to_low_median": statistics.median(row["high"] / row["low"] for row in ranged),
        "off_on_seen_median": statistics.median(off("seen_played")),
        "worse_than_young": [f"{row['trace']}, {row['save']:g} s" for row in worse],
        "youngs_interval": sum(row["interval"] == row["young"] for row in rows),
        "less_waste_than_young_mean": statistics.mean(1 - row["played"] / row["young_played"] for row in rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="a clone of skypilot-org/spot-traces")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    files = sorted(options.traces.glob("*/1-node/**/*.json"))
    rows = [row for file in files for row in of_trace(file, str(file.relative_to(options.traces)))]
    publish(
        "spot",
        {"rows": rows, "summary": summary(rows), "goals": {"off": 0.2, "between_low_and_high": 0.9}},
        options.json,
    )


if __name__ == "__main__":
    main()
