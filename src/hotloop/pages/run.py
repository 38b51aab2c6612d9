"""The report of a run, made from its directory alone."""

import json
from typing import Any

from hotloop import __version__
from hotloop.core.files import write_atomic
from hotloop.core.run import Run
from hotloop.pages.environment import environment


def write_report(run: Run) -> None:
    """Write `report.html` from the files of a run that has ended."""
    # Names of files may be no UTF-8.
    write_atomic(run.report_file, render_report(run).encode(errors="backslashreplace"))


def render_report(run: Run) -> str:
    """The report page of a run that has ended, as HTML without any outside reference. About 1 s."""
    result = run.result()
    assert result is not None
    records = run.metrics()
    epochs = [record for record in records if record["event"] == "epoch"]
    examples: list[dict[str, Any]] = json.loads(run.examples_file.read_text()) if run.examples_file.exists() else []
    return (
        environment()
        .get_template("run.html")
        .render(
            run=run,
            result=result,
            epochs=epochs,
            metric_names=sorted({name for record in epochs for name in record if name.startswith("val_")}),
            charts=_charts([record for record in records if record["event"] == "step"], epochs),
            wrong=[example for example in examples if not example["correct"]],
            right=[example for example in examples if example["correct"]],
            job=run.job_file.read_text(),
            machine=json.loads(run.machine_file.read_text()),
            version=__version__,
        )
    )


def _charts(steps: list[dict[str, Any]], epochs: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    from hotloop.pages.charts import Chart, Series

    def by_step(label: str, key: str) -> Series:
        known = [record for record in steps if record[key] is not None]
        return Series(label, [record["step"] for record in known], [record[key] for record in known])

    def by_epoch(label: str, key: str, x: str = "epoch") -> Series:
        known = [record for record in epochs if record.get(key) is not None]
        offset = 1 if x == "epoch" else 0
        return Series(label, [record[x] + offset for record in known], [record[key] for record in known])

    loss = [by_step("training", "loss"), by_epoch("validation", "val_loss", "step")]
    scores = sorted({name for record in epochs for name in record if name.startswith("val_")} - {"val_loss"})
    charts = [Chart("Loss", "step", [series for series in loss if series.x])]
    if scores:
        series = [by_epoch(name.removeprefix("val_"), name) for name in scores]
        charts.append(Chart("Validation", "epoch", series, marks=True))
    charts += [
        Chart("Samples per second", "step", [by_step("samples per second", "samples_per_second")], from_zero=True),
        Chart("Share of time waiting for data", "epoch", [by_epoch("", "data_wait_share")], percent=True, marks=True),
        Chart("Learning rate", "step", [by_step("learning rate", "learning_rate")], from_zero=True),
    ]
    return [(chart.title, chart.to_svg()) for chart in charts if any(series.x for series in chart.series)]
