"""Alert rules in Prometheus's own test program: each fires for its cause alone, and not while all is well."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import MOMENTS, always, check, firing, growing, missing, promtool, scene, series

from hotloop.monitor.dashboards import dashboards
from hotloop.monitor.grafana import Dashboard

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

RULES = Path(str(resources.files("hotloop.monitor").joinpath("rules.yml")))
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
CARD = {"uuid": "GPU-1", "gpu": "1"}
SILENT = f"0+30x40 {1200}+0x{MOMENTS - 41}"
"""A heartbeat that ends after 20 minutes."""

INPUT_BOUND = {"job_data_wait_seconds_total": growing(0.5), "gpu_sm_active_ratio": always(0.4)}
SLOW = {
    "job_communication_seconds_total/0": growing(0.6), "job_communication_seconds_total/1": growing(0.05),
}  # fmt: skip
STARVED = {**SLOW, "job_data_wait_seconds_total/1": growing(0.5)}
LEAK = {"job_memory_bytes/1": growing(1e7, 50e9)}
OVERDUE = {"job_checkpoint_timestamp_seconds": None}

FIRES: dict[str, tuple[dict[str, str | None], int]] = {
    "HotloopInputBound": (INPUT_BOUND, 2),
    "HotloopCommunicationBound": ({"job_communication_seconds_total": growing(0.4)}, 2),
    "HotloopSlowRank": (SLOW, 1),
    "HotloopRankStarved": (STARVED, 1),
    "HotloopPowerCapped": ({"throttled power_cap": always(1)}, 2),
    "HotloopThermalThrottling": (
        {"throttled thermal_hardware/1": always(1), "throttled hardware_slowdown/1": always(1)},
        1,
    ),
    "HotloopHardwareSlowdown": ({"throttled power_brake/1": always(1), "throttled hardware_slowdown/1": always(1)}, 1),
    "HotloopEccUncorrected": ({"gpu_ecc_errors_total/1": f"3+0x100 4+0x{MOMENTS - 101}"}, 1),
    "HotloopRowRemapPending": ({"gpu_row_remap_pending/1": always(1)}, 1),
    "HotloopRowRemapFailed": ({"gpu_row_remap_failed/1": always(1)}, 1),
    "HotloopMemoryLeak": (LEAK, 1),
    "HotloopHang": ({"job_heartbeat_timestamp_seconds": SILENT}, 1),
    "HotloopCheckpointOverdue": (OVERDUE, 1),
    "HotloopCardSilent": ({"gpu_reading_ok/1": always(0)}, 1),
    "HotloopExporterDown": ({"up": always(0)}, 1),
    "HotloopExporterStale": ({"exporter_last_collect_timestamp_seconds": f"0+30x120 3600+0x{MOMENTS - 121}"}, 2),
}
"""Alert -> what is changed in a training that goes well, and how many alerts come of it. The rest has tests below."""

FLAT = {
    "job_steps_total": always(5000), "job_step_seconds_total": always(500), "job_data_wait_seconds_total": always(5),
    "job_samples_total": always(5e5), "job_communication_seconds_total": always(50), "gpu_sm_active_ratio": always(0),
    "gpu_utilization_ratio": always(0),
}  # fmt: skip
NOT_BEGUN = {**FLAT, **dict.fromkeys(["job_steps_total", "job_step_seconds_total", "job_samples_total"], always(0)),
             "job_data_wait_seconds_total": always(0), "job_checkpoint_timestamp_seconds": None}  # fmt: skip
NOTHING_TRAINS: dict[str, str | None] = {
    **dict.fromkeys(name for name in NOT_BEGUN if name.startswith("job_")),
    **dict.fromkeys(["job_info", "job_phase", "job_heartbeat_timestamp_seconds", "job_start_timestamp_seconds"]),
    **dict.fromkeys(["job_memory_bytes", "job_checkpoint_interval_seconds"]),
    "gpu_sm_active_ratio": always(0), "gpu_utilization_ratio": always(0),
}  # fmt: skip

QUIET: dict[str, tuple[dict[str, str | None], str]] = {
    "a training that goes well": ({}, "step"),
    "a checkpoint of an hour": ({**FLAT, "job_heartbeat_timestamp_seconds": SILENT}, "saving"),
    "a validation": (FLAT, "validating"),
    "a validation whose batches take long": ({**FLAT, "job_heartbeat_timestamp_seconds": SILENT}, "validating"),
    "a start": ({**NOT_BEGUN, "job_heartbeat_timestamp_seconds": always(0)}, "starting"),
    "loading": (NOT_BEGUN, "loading"),
    "the end": ({**FLAT, "job_heartbeat_timestamp_seconds": SILENT}, "ending"),
    "an idle shell": ({**NOTHING_TRAINS, "gpu_memory_used_bytes": always(6e8)}, "step"),
    "somebody else's training": (
        {**NOTHING_TRAINS, "gpu_sm_active_ratio": always(0.9), "gpu_utilization_ratio": always(1)}, "step"),
    "a card that is not as new": ({"gpu_sm_active_ratio": None}, "step"),
    "no checkpoints by the clock": ({**OVERDUE, "job_checkpoint_interval_seconds": None}, "step"),
    "memory that a validation raises once": ({"job_memory_bytes": f"5e10+0x80 9e10+0x{MOMENTS - 81}"}, "step"),
    "a first step that compiles": (
        {**NOT_BEGUN, "job_heartbeat_timestamp_seconds": f"0+0x50 1530+30x{MOMENTS - 51}",
         "job_steps_total": f"0+0x50 0+300x{MOMENTS - 51}",
         "job_checkpoint_timestamp_seconds": f"_x51 1530+30x{MOMENTS - 51}"}, "step"),
}  # fmt: skip

TIMES = ("5m", "25m", "45m", "70m")


@pytest.mark.parametrize("alert", FIRES)
def test_it_fires_for_its_cause_and_no_other_does(alert: str, tmp_path: Path) -> None:
    changes, count = FIRES[alert]
    check(tmp_path, RULES, scene(changes), promql_expr_test=[firing("70m", {alert: count})])


@pytest.mark.parametrize("what", QUIET)
def test_nothing_fires_during(what: str, tmp_path: Path) -> None:
    changes, phase = QUIET[what]
    check(tmp_path, RULES, scene(changes, phase), promql_expr_test=[firing(at, {}) for at in TIMES])


@pytest.mark.parametrize("phase", ["starting", "validating", "saving", "ending"])
@pytest.mark.parametrize(
    "alert",
    ["HotloopInputBound", "HotloopCommunicationBound", "HotloopSlowRank", "HotloopRankStarved", "HotloopHang",
     "HotloopCheckpointOverdue"],
)  # fmt: skip
def test_the_same_figures_mean_nothing_in_another_phase(alert: str, phase: str, tmp_path: Path) -> None:
    changes, _ = FIRES[alert]
    check(tmp_path, RULES, scene(changes, phase), promql_expr_test=[firing(at, {}) for at in ("25m", "45m")])


@pytest.mark.parametrize(
    ("xid", "alert"),
    [
        *((xid, "HotloopXidHardware") for xid in ("48", "63", "64", "74", "79", "94", "95", "119", "120")),
        *((xid, "HotloopXidApplication") for xid in ("13", "31", "43", "45")),
        ("16", "HotloopXidOther"),
    ],
)
def test_an_xid_fires_by_its_number_and_ends(xid: str, alert: str, tmp_path: Path) -> None:
    seen = {"series": series("hotloop_gpu_xid_timestamp_seconds", **CARD, xid=xid), "values": f"_x20 600+0x{MOMENTS}"}
    times = [firing("9m", {}), firing("15m", {alert: 1}), firing("75m", {})]
    check(tmp_path, RULES, [*scene({}), seen], promql_expr_test=times)


def test_what_a_program_suffers_from_its_card_is_told_once(tmp_path: Path) -> None:
    name = "hotloop_gpu_xid_timestamp_seconds"
    seen = [{"series": series(name, **CARD, xid=xid), "values": f"_x20 600+0x{MOMENTS}"} for xid in ("79", "45")]
    check(tmp_path, RULES, [*scene({}), *seen], promql_expr_test=[firing("15m", {"HotloopXidHardware": 1})])


def test_a_card_that_is_held_and_not_used(tmp_path: Path) -> None:
    times = [firing("20m", {}), firing("45m", {"HotloopIdleAllocated": 2})]
    check(tmp_path, RULES, scene(NOTHING_TRAINS), promql_expr_test=times)


def test_waiting_for_data_is_told_though_checkpoints_come_every_five_minutes(tmp_path: Path) -> None:
    saving = " ".join(["0+0x7 1+0x1"] * 28)
    stepping = " ".join(["1+0x7 0+0x1"] * 28)
    told = [one for one in scene(INPUT_BOUND) if 'phase="s' not in one["series"] or "starting" in one["series"]]
    for rank in ("0", "1"):
        who = {"job_name": "resnet", "run": "resnet-1", "rank": rank}
        told.append({"series": series("hotloop_job_phase", **who, phase="step"), "values": stepping})
        told.append({"series": series("hotloop_job_phase", **who, phase="saving"), "values": saving})
    times = [firing(at, {"HotloopInputBound": 2}) for at in ("60m", "61m", "64m", "70m")]
    check(tmp_path, RULES, told, promql_expr_test=times)


def test_it_says_which_rank_and_what_to_type(tmp_path: Path) -> None:
    labels = {"severity": "critical", "job": "hotloop", "instance": "node1:9400",
              "job_name": "resnet", "run": "resnet-1", "rank": "1"}  # fmt: skip
    changes = {"job_heartbeat_timestamp_seconds/0": growing(1), "job_heartbeat_timestamp_seconds/1": SILENT}
    annotations = {
        "summary": "resnet hangs",
        "description": "Rank 1 of resnet resnet-1 on node1:9400 has done nothing for 30m 0s, longer than every other "
        "rank, in the middle of its steps. See where it stands: py-spy dump --pid PID, on that machine. Its log may "
        "say why: hotloop explain LOG.",
        "runbook_url": "docs/alerts.md#hotloophang",
    }
    expected = {"alertname": "HotloopHang", "eval_time": "50m",
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}]}  # fmt: skip
    check(tmp_path, RULES, scene(changes), alert_rule_test=[expected])


@pytest.mark.parametrize(("way", "late"), [("run", 1), ("profile", 1), ("library", 0)])
def test_a_script_may_validate_for_long_without_a_sign(way: str, late: int, tmp_path: Path) -> None:
    told = scene({"job_heartbeat_timestamp_seconds": SILENT})
    told = [{**one, "series": one["series"].replace('way="train"', f'way="{way}"')} for one in told]
    times = [firing("75m", {}), firing("85m", {"HotloopHang": late} if late else {})]
    check(tmp_path, RULES, told, promql_expr_test=times)


def jumping(jump: int, at: int, start: int = 0) -> str:
    """A moment that goes with the wall clock, which is set by so many seconds at a scrape."""
    return f"{start}+30x{at - 1} {start + 30 * at + jump}+30x{MOMENTS - at}"


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_clock_that_is_set_is_no_hang_and_no_checkpoint_that_is_late(jump: int, tmp_path: Path) -> None:
    """The exporter sees it a scrape before the training gives its next sign of life. Back: from what was wrong."""
    start = max(0, -jump)
    told = scene({
        "exporter_last_collect_timestamp_seconds": jumping(jump, 100, start),
        "job_heartbeat_timestamp_seconds": jumping(jump, 101, start),
        "job_checkpoint_timestamp_seconds": jumping(jump, 101, start - 300),
        "job_start_timestamp_seconds": f"{start}+0x100 {start + jump}+0x{MOMENTS - 101}",
    })  # fmt: skip
    times: list[dict[str, Any]] = [firing(at, {}) for at in ("49m", "50m", "50m30s", "51m", "52m", "70m")]
    for name in ("hotloop:job_silence:seconds", "hotloop:run_checkpoint_age:seconds"):
        times.append({"expr": f"min_over_time({name}[70m]) < 0", "eval_time": "70m", "exp_samples": []})
    check(tmp_path, RULES, told, promql_expr_test=times)


def test_wasted_seconds_go_to_the_job_that_holds_the_card(tmp_path: Path) -> None:
    expr = "sum by (instance, job_name) (sum_over_time(hotloop:gpu_wasted_seconds:last30s[1h]))"
    labels = '{instance="node1:9400", job_name="resnet"}'
    # two cards, a tenth of an hour each; the range holds both of its ends
    tests: list[dict[str, Any]] = [{
        "expr": f"round({expr})", "eval_time": "80m", "exp_samples": [{"labels": labels, "value": 726}]
    }]  # fmt: skip
    check(tmp_path, RULES, scene({}), promql_expr_test=tests)


def test_two_jobs_share_a_card_s_waste_and_a_free_card_s_is_nobody_s(tmp_path: Path) -> None:
    second = {"job_name": "other", "run": "", "rank": "0", "ranks": "1", "way": "run", "uuid": "GPU-0"}
    told = [
        *scene({"gpu_sm_active_ratio": always(0)}),
        {"series": series("hotloop_job_info", **second), "values": always(1)},
    ]
    told = [one for one in told if not ("job_info" in one["series"] and 'uuid="GPU-1"' in one["series"])]
    samples = [{"labels": f'{{job_name="{name}", gpu="{gpu}"}}', "value": value}
               for name, gpu, value in [("resnet", "0", 15), ("other", "0", 15)]]  # fmt: skip
    samples.append({"labels": '{gpu="1"}', "value": 30})
    expr = "sum by (job_name, gpu) (hotloop:gpu_wasted_seconds:last30s)"
    check(tmp_path, RULES, told, promql_expr_test=[{"expr": expr, "eval_time": "60m", "exp_samples": samples}])


def test_two_runs_of_one_name_are_no_run_of_two_ranks(tmp_path: Path) -> None:
    other = [
        {**one, "series": one["series"].replace("node1", "node2").replace("GPU-", "GPU-2")}
        for one in scene({**SLOW, "job_step_seconds_total": growing(1)})
    ]
    check(tmp_path, RULES, [*scene(SLOW), *other], promql_expr_test=[firing("45m", {"HotloopCommunicationBound": 2})])


def test_the_rules_are_well_formed() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint-fatal", str(RULES))


def test_each_alert_has_a_case_here() -> None:
    elsewhere = {"HotloopXidHardware", "HotloopXidApplication", "HotloopXidOther", "HotloopIdleAllocated"}
    assert set(ALERTS) == set(FIRES) | elsewhere


def test_an_xid_is_in_one_list_alone() -> None:
    lists = {
        name: re.findall(r'xid=~"([^"]+)"', ALERTS[f"HotloopXid{name}"]["expr"]) for name in ("Hardware", "Application")
    }
    (hardware,), (application, masking) = lists["Hardware"], lists["Application"]
    assert hardware == masking
    assert re.findall(r'xid!~"([^"]+)"', ALERTS["HotloopXidOther"]["expr"]) == [f"{application}|{hardware}"]
    assert not set(hardware.split("|")) & set(application.split("|"))


@pytest.mark.parametrize("page", dashboards(), ids=lambda page: page.uid)
def test_a_dashboard_s_queries_are_queries(page: Dashboard, tmp_path: Path) -> None:
    filled = {"$__range": "1h", "$__rate_interval": "5m", "$price": "2.5"}
    records = []
    for panel in page.to_json()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in filled.items():
                expression = expression.replace(name, value)
            records.append({"record": f"query:{len(records)}", "expr": expression})
    assert len(records) > 10
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", str(file))
