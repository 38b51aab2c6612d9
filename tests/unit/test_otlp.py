"""The scrape page and the collector get the same."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'hotloop[otlp]'")
from collector import collector, labels, points
from opentelemetry.sdk.resources import Resource

from hotloop.core.live import Live
from hotloop.monitor.demo import Demo
from hotloop.monitor.families import Family, job_families
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.otlp import Pusher, Starts, metrics_data
from hotloop.monitor.reading import JobsReading

NOW = 1_000_000_000


def test_names_labels_values_and_kinds_are_those_of_the_page() -> None:
    metrics = Metrics(Demo(now=lambda: NOW))
    scraped = {}
    for family in parse(generate_latest(metrics).decode()):
        for one in family.samples:
            scraped[one.name, frozenset(one.labels.items())] = (
                one.value,
                family.type == "counter",
                family.documentation,
            )
    with collector() as there:
        pusher = Pusher(f"http://127.0.0.1:{there.port}", metrics, 15, pytest.fail)
        assert pusher.push() == ""
        sent = there.next().metrics
    pushed = {
        (name, frozenset(labels(point).items())): (point.as_double, metric.sum.is_monotonic, metric.description)
        for name, metric in sent.items()
        for point in points(metric)
    }
    assert pushed == scraped
    assert {metric.sum.aggregation_temporality for metric in sent.values() if metric.HasField("sum")} == {2}
    units = {"job_step_seconds_total": "s", "gpu_memory_used_bytes": "By", "gpu_sm_active_ratio": "1", "job_loss": ""}
    assert {name: sent[f"hotloop_{name}"].unit for name in units} == units


LIVE = Live(1, 1, 1, "train", "a", run="runs/a-1", begun=100.0, steps=20)


def starts_of(starts: Starts, families: list[Family], now: int) -> dict[str, int]:
    data = metrics_data(families, Resource({}), starts, now)
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {one.name: point.start_time_unix_nano for one in metrics for point in one.data.data_points}


def test_a_jobs_totals_begin_with_its_process() -> None:
    starts = Starts()
    for begun, steps in ((100, 20), (150, 5)):
        families = list(job_families(JobsReading((replace(LIVE, begun=float(begun), steps=steps),))))
        assert starts_of(starts, families, 200 * 10**9)["hotloop_job_steps_total"] == begun * 10**9


def test_other_totals_begin_when_they_are_first_seen_or_fall() -> None:
    starts = Starts()
    told = []
    for now, value in ((10, 5), (20, 7), (30, 7), (40, 1), (50, 2), (60, None), (70, 9)):
        rows = [] if value is None else [(("GPU-1",), float(value))]
        told.append(starts_of(starts, [Family("gpu_energy_joules_total", "", ("uuid",), rows)], now))
    assert [one.get("hotloop_gpu_energy_joules_total") for one in told] == [10, 10, 10, 40, 40, None, 70]


def test_no_total_begins_after_it_was_told_though_the_clock_was_set_back() -> None:
    starts = Starts()
    hour = 3600 * 10**9
    for now in (2 * hour, hour, hour + 1):
        families = [
            *job_families(JobsReading((replace(LIVE, begun=6000.0),))),
            Family("gpu_energy_joules_total", "", ("uuid",), [(("GPU-1",), 5.0)]),
        ]
        found = starts_of(starts, families, now)
        assert 0 < found["hotloop_gpu_energy_joules_total"] <= now
        assert 0 < found["hotloop_job_steps_total"] <= now
