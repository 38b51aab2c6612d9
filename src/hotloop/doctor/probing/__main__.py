"""Some probes, one after the other."""

import json
import sys
import time
from typing import Any


def _tell(**content: Any) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main(gpu: str, names: list[str]) -> None:
    """Run probes by their names on one GPU ("-": none)."""
    from hotloop.doctor.probing.probes import PROBES, start

    if gpu != "-":
        start(gpu)
    for name in names:
        _tell(began=name)
        started = time.perf_counter()
        rates: list[dict[str, Any]] = []
        try:
            for what, value, unit, *said in PROBES[name](gpu):
                rates.append({"name": what, "value": value, "unit": unit, "said": "".join(said)})
            error = ""
        except Exception as failed:  # whatever a broken card, driver or package raises
            lines = str(failed).strip().splitlines() or [type(failed).__name__]
            # What a rank raised stands at the end of what its parent raises.
            line = lines[-1] if "Traceback" in str(failed) else lines[0]
            wrong = line.partition("wrong result")
            error = f"{wrong[1]}{wrong[2]}" if wrong[1] else f"{type(failed).__name__}: {line}"
        _tell(ended=name, rates=rates, error=error[:300], seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
