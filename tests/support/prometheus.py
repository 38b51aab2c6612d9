"""Scenes of two ranks on two cards, as promtool's tests of rules take them."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hotloop.core.live import PHASES

STEP_SECONDS, MOMENTS = 30, 280
EXPORTER = {"job": "hotloop", "instance": "node1:9400"}
REASONS = ("power_cap", "thermal_software", "thermal_hardware", "hardware_slowdown", "power_brake")


def missing() -> str:
    """Why rules cannot be tested here; empty: they can."""
    return "" if shutil.which("promtool") else "promtool is not installed: Debian's package prometheus"


def promtool(*arguments: str) -> str:
    """What it printed.

    Raises:
        AssertionError: it found a fault.
    """
    finished = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def growing(a_second: float, start: float = 0) -> str:
    """A counter, or a clock that goes with `a_second` 1."""
    return f"{start}+{a_second * STEP_SECONDS}x{MOMENTS}"


def always(value: float) -> str:
    return f"{value}+0x{MOMENTS}"


def scene(changes: Mapping[str, str | None], phase: str = "step", ranks: int = 2) -> list[dict[str, str]]:
    """Series of a training that goes well, with changes.

    Args:
        changes: values of metrics, without "hotloop_" and "throttled REASON" among them; "NAME/1" for rank 1 and its
            card alone; None: it is absent.
    """
    known = {**_exporter(), **{key: value for rank in range(ranks) for key, value in _rank(rank, phase).items()}}
    for name, values in changes.items():
        plain, _, rank = name.partition("/")
        found = [key for key in known if key[0] == plain and rank in ("", key[1])]
        assert found, f"no such metric in the scene: {name}"
        for key in found:
            known[key] = (known[key][0], values)
    return [{"series": series, "values": values} for series, values in known.values() if values is not None]


def series(name: str, /, **labels: str) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in {**EXPORTER, **labels}.items())
    return f"{name}{{{inner}}}"


def firing(at: str, alerts: Mapping[str, int]) -> dict[str, Any]:
    """That exactly these alerts fire at a time, so often each."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": count} for name, count in alerts.items()]
    return {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": samples
    }  # fmt: skip


def check(folder: Path, rules: Path, scene: Sequence[dict[str, str]], **tests: Any) -> str:
    """Have promtool play a scene to the rules.

    Raises:
        AssertionError: something else came of it.
    """
    test = {"interval": f"{STEP_SECONDS}s", "input_series": list(scene), **tests}
    file = folder / "test.yml"
    # In promtool's own order, which changes, an alert reads what is recorded a step late, or not.
    order = [group["name"] for group in yaml.safe_load(rules.read_text())["groups"]]
    file.write_text(yaml.safe_dump({
        "rule_files": [str(rules)], "evaluation_interval": f"{STEP_SECONDS}s", "group_eval_order": order,
        "tests": [test],
    }))  # fmt: skip
    return promtool("test", "rules", str(file))


def _exporter() -> dict[tuple[str, str, str], tuple[str, str | None]]:
    found: dict[tuple[str, str, str], tuple[str, str | None]] = {("up", "", ""): (series("up"), always(1))}
    for source in ("cards", "jobs"):
        name = "hotloop_exporter_last_collect_timestamp_seconds"
        found["exporter_last_collect_timestamp_seconds", "", source] = (series(name, source=source), growing(1))
    return found


def _rank(rank: int, phase: str) -> dict[tuple[str, str, str], tuple[str, str | None]]:
    card = {"uuid": f"GPU-{rank}", "gpu": str(rank)}
    who = {"job_name": "resnet", "run": "resnet-1", "rank": str(rank)}
    cards = {
        "gpu_sm_active_ratio": always(0.9), "gpu_utilization_ratio": always(0.99),
        "gpu_memory_used_bytes": always(60e9), "gpu_memory_total_bytes": always(140e9), "gpu_reading_ok": always(1),
        "gpu_row_remap_pending": always(0), "gpu_row_remap_failed": always(0),
    }  # fmt: skip
    jobs = {
        "job_heartbeat_timestamp_seconds": growing(1), "job_start_timestamp_seconds": always(0),
        "job_steps_total": growing(10), "job_step_seconds_total": growing(1),
        "job_data_wait_seconds_total": growing(0.01), "job_samples_total": growing(1000),
        "job_communication_seconds_total": growing(0.1), "job_memory_bytes": always(50e9),
        "job_checkpoint_timestamp_seconds": growing(1, -300), "job_checkpoint_interval_seconds": always(600),
    }  # fmt: skip
    found: dict[tuple[str, str, str], tuple[str, str | None]] = {}

    def add(name: str, values: str, /, **labels: str) -> None:
        key = f"throttled {labels['reason']}" if "reason" in labels else name
        found[key, str(rank), str(sorted(labels.items()))] = (series(f"hotloop_{name}", **labels), values)

    add("gpu_info", always(1), **card, name="NVIDIA H200", bus_id=f"00000000:0{rank}:00.0", mig="")
    for name, values in cards.items():
        add(name, values, **card)
    for reason in REASONS:
        add("gpu_throttled", always(0), **card, reason=reason)
    for counter in ("volatile", "aggregate"):
        add("gpu_ecc_errors_total", always(0), **card, kind="uncorrected", counter=counter)
    add("job_info", always(1), **who, ranks="2", way="train", uuid=card["uuid"])
    for name, values in jobs.items():
        add(name, values, **who)
    for one in PHASES:
        add("job_phase", always(int(one == phase)), **who, phase=one)
    return found


METRICS = {
    "hotloop_" + name
    for name in [
        "gpu_info",
        "driver_info",
        "gpu_utilization_ratio",
        "gpu_memory_utilization_ratio",
        "gpu_sm_active_ratio",
        "gpu_sm_occupancy_ratio",
        "gpu_tensor_active_ratio",
        "gpu_dram_active_ratio",
        "gpu_memory_used_bytes",
        "gpu_memory_total_bytes",
        "gpu_power_watts",
        "gpu_power_limit_watts",
        "gpu_energy_joules_total",
        "gpu_temperature_celsius",
        "gpu_clock_hertz",
        "gpu_clock_max_hertz",
        "gpu_throttled",
        "gpu_ecc_errors_total",
        "gpu_remapped_rows_total",
        "gpu_row_remap_pending",
        "gpu_row_remap_failed",
        "gpu_retired_pages_total",
        "gpu_xid_errors_total",
        "gpu_xid_timestamp_seconds",
        "gpu_nvlink_receive_bytes_total",
        "gpu_nvlink_transmit_bytes_total",
        "gpu_nvlinks_active",
        "gpu_nvlinks",
        "gpu_pcie_replays_total",
        "gpu_pcie_generation",
        "gpu_pcie_lanes",
        "gpu_processes",
        "gpu_process_memory_bytes",
        "gpu_reading_ok",
        "job_info",
        "job_phase",
        "job_heartbeat_timestamp_seconds",
        "job_start_timestamp_seconds",
        "job_step",
        "job_steps_total",
        "job_step_seconds_total",
        "job_data_wait_seconds_total",
        "job_samples_total",
        "job_loss",
        "job_learning_rate",
        "job_memory_bytes",
        "job_metric",
        "job_communication_seconds_total",
        "job_checkpoints_total",
        "job_checkpoint_timestamp_seconds",
        "job_checkpoint_seconds",
        "job_checkpoint_stall_seconds_total",
        "job_checkpoint_interval_seconds",
        "job_restarts_total",
        "exporter_build_info",
        "exporter_collect_duration_seconds",
        "exporter_collect_failures_total",
        "exporter_last_collect_timestamp_seconds",
        "exporter_answer_age_seconds",
        "exporter_requests_total",
        "exporter_authentication_failures_total",
        "exporter_jobs_ignored",
        "exporter_otlp_pushes_total",
        "exporter_otlp_last_push_timestamp_seconds",
    ]
}
"""What the exporter tells."""
