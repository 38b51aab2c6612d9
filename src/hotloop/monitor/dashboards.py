"""The dashboards: all machines, one machine, one training."""

from hotloop.monitor.grafana import Dashboard, Panel, Query, Row

FLEET, HOST, JOB = "hotloop-fleet", "hotloop-host", "hotloop-job"

_WASTED = "sum_over_time(hotloop:gpu_wasted_seconds:last30s[$__range]) / 3600"
_MONEY = "price of a GPU hour"


def dashboards() -> list[Dashboard]:
    """All of them."""
    return [_fleet(), _host(), _job()]


def _fleet() -> Dashboard:
    def most_wasted(title: str, key: tuple[str, ...], link: str, selected: str, more: list[Query]) -> Panel:
        by = ", ".join(key)
        wasted = _WASTED.replace("last30s", f"last30s{selected}")
        queries = [
            Query(f"sum by ({by}) ({wasted})", "wasted GPU hours"),
            Query(f"sum by ({by}) ({wasted}) * $price", "wasted money"),
            *more,
        ]
        units = ("h", "none", *["percentunit"] * len(more))
        return Panel(title, "table", queries, units, "In the range of time on top; the largest first.", key, link)

    by_host = [Query("avg by (instance) (avg_over_time(hotloop:gpu_activity:ratio[$__range]))", "activity")]
    by_run = [
        Query(
            "avg by (job_name, run) (avg_over_time(hotloop:job_activity_in_step:ratio[$__range]))", "activity in steps"
        ),
        Query("avg by (job_name, run) (avg_over_time(hotloop:job_data_wait:ratio_rate5m[$__range]))", "waits for data"),
    ]
    firing = 'sum by (alertname, severity, instance, job_name) (ALERTS{alertname=~"Hotloop.+", alertstate="firing"})'
    free = (
        "count by (instance) (hotloop:gpu_activity:ratio unless on (job, instance, uuid) hotloop:job_gpu:info) "
        "or 0 * count by (instance) (hotloop:gpu_activity:ratio)"
    )
    figures = [
        Panel("GPUs", "stat", [Query("count(hotloop_gpu_reading_ok)", "")], "none"),
        Panel("Activity now", "stat", [Query("avg(hotloop:gpu_activity:ratio)", "")], "percentunit"),
        Panel("Wasted GPU hours", "stat", [Query(f"sum({_WASTED})", "")], "h"),
        Panel("Wasted money", "stat", [Query(f"sum({_WASTED}) * $price", "")], "none", f"By the {_MONEY} on top."),
    ]
    tables = [
        most_wasted("Machines", ("instance",), HOST, "", by_host),
        most_wasted("Trainings", ("job_name", "run"), JOB, '{job_name!=""}', by_run),
    ]
    over_time = [
        Panel("Activity", "timeseries", [Query("avg by (instance) (hotloop:gpu_activity:ratio)", "{{instance}}")],
              "percentunit"),
        Panel("GPUs that nobody's training holds", "timeseries",
              [Query(free, "{{instance}}")], "none"),
        Panel("Share of steps that waits for data", "timeseries",
              [Query("avg by (job_name, run) (hotloop:job_data_wait:ratio_rate5m)", "{{job_name}} {{run}}")],
              "percentunit"),
        Panel("Alerts", "table", [Query(firing, "alerts")], "none",
              key=("alertname", "severity", "instance", "job_name")),
    ]  # fmt: skip
    rows = [Row("Now", figures, 4, 4), Row("Most wasted", tables, 2, 10), Row("Over time", over_time)]
    return Dashboard(FLEET, "hotloop: all machines", rows, texts={"price": ("1", _MONEY)})


def _host() -> Dashboard:
    here = '{instance="$instance"}'

    def lines(title: str, unit: str, *queries: tuple[str, str], help_: str = "") -> Panel:
        made = [Query(expr.replace("@", here), f"{{{{gpu}}}} {legend}".strip()) for expr, legend in queries]
        return Panel(title, "timeseries", made, unit, help_)

    use = [
        lines("Activity", "percentunit", ("hotloop:gpu_activity:ratio@", ""),
              help_="Of the multiprocessors where the card tells; else the share of time with any kernel."),
        lines("Tensor cores", "percentunit", ("hotloop_gpu_tensor_active_ratio@", "")),
        lines("Occupancy", "percentunit", ("hotloop_gpu_sm_occupancy_ratio@", "")),
        lines("Memory traffic", "percentunit",
              ("hotloop_gpu_dram_active_ratio@ or hotloop_gpu_memory_utilization_ratio@", "")),
        lines("Memory", "bytes", ("hotloop_gpu_memory_used_bytes@", "used"), ("hotloop_gpu_memory_total_bytes@", "of")),
        Panel("Memory by user", "timeseries",
              [Query(f"sum by (user) (hotloop_gpu_process_memory_bytes{here})", "{{user}}")], "bytes"),
    ]  # fmt: skip
    limits = [
        lines("Power", "watt", ("hotloop_gpu_power_watts@", ""), ("hotloop_gpu_power_limit_watts@", "limit")),
        lines("Temperature", "celsius", ("hotloop_gpu_temperature_celsius@", "{{sensor}}")),
        lines("Clocks", "hertz", ("hotloop_gpu_clock_hertz@", "{{clock}}")),
        lines("Slowed down", "percentunit",
              ("avg_over_time(hotloop_gpu_throttled@[$__rate_interval]) > 0", "{{reason}}"),
              help_="Share of readings, by reason."),
        lines("NVLink", "Bps", ("rate(hotloop_gpu_nvlink_receive_bytes_total@[$__rate_interval])", "receives"),
              ("rate(hotloop_gpu_nvlink_transmit_bytes_total@[$__rate_interval])", "sends")),
    ]  # fmt: skip
    faults = [
        lines("Errors of memory", "none",
              ("increase(hotloop_gpu_ecc_errors_total@[$__range])", "{{kind}} {{counter}}")),
        lines("Xid", "none", ("hotloop_gpu_xid_errors_total@", "Xid {{xid}}")),
        lines("PCIe: replays", "none", ("increase(hotloop_gpu_pcie_replays_total@[$__range])", "")),
        lines("PCIe: lanes", "none", ("hotloop_gpu_pcie_lanes@", "")),
    ]  # fmt: skip
    jobs = Panel(
        "Trainings here", "table",
        [Query(f"count by (job_name, run) (hotloop:job_gpu:info{here})", "GPUs"),
         Query(f"avg by (job_name, run) (hotloop:job_activity_in_step:ratio{here})", "activity in steps"),
         Query(f"avg by (job_name, run) (hotloop:job_data_wait:ratio_rate5m{here})", "waits for data")],
        ("none", "percentunit", "percentunit"), key=("job_name", "run"), link=JOB,
    )  # fmt: skip
    rows = [Row("Trainings", [jobs], 1, 6), Row("Use", use), Row("Limits", limits), Row("Faults", faults)]
    return Dashboard(HOST, "hotloop: one machine", rows, {"instance": "label_values(hotloop_gpu_info, instance)"})


def _job() -> Dashboard:
    this = '{job_name="$job_name", run="$run"}'

    def of_card(metric: str) -> str:
        """A card's metric, for the cards of this training, by rank."""
        cards = f"sum by (job, instance, uuid) ({metric})"
        return f"{cards} * on (job, instance, uuid) group_right () hotloop:job_gpu:info{this}"

    def hardware(title: str, unit: str, metric: str) -> Panel:
        legend = "rank {{rank}}, {{instance}} GPU {{gpu}}"
        return Panel(title, "timeseries", [Query(of_card(metric), legend)], unit)

    def framework(title: str, unit: str, expr: str, help_: str = "", legend: str = "rank {{rank}}") -> Panel:
        return Panel(title, "timeseries", [Query(expr.replace("@", this), legend)], unit, help_)

    cards = [
        hardware("Activity", "percentunit", "hotloop:gpu_activity:ratio"),
        hardware("Tensor cores", "percentunit", "hotloop_gpu_tensor_active_ratio"),
        hardware("Memory in use", "bytes", "hotloop_gpu_memory_used_bytes"),
        hardware("Power", "watt", "hotloop_gpu_power_watts"),
        hardware("Temperature", "celsius", 'hotloop_gpu_temperature_celsius{sensor="gpu"}'),
        hardware("NVLink, received", "Bps", "rate(hotloop_gpu_nvlink_receive_bytes_total[$__rate_interval])"),
    ]
    phases = [Query(f"max by (phase) (hotloop_job_phase{this} == 1)", "{{phase}}")]
    loop = [
        framework("Samples per second", "none", "sum(hotloop:job_samples:rate5m@)", legend="all ranks"),
        framework("A step", "s", "hotloop:job_step_seconds:mean5m@"),
        framework("Share of steps that waits for data", "percentunit", "hotloop:job_data_wait:ratio_rate5m@"),
        framework("Share of steps in communication", "percentunit", "hotloop:job_communication:ratio_rate5m@"),
        framework("A step without communication, over that of the middle rank", "none", "hotloop:job_own_step:ratio@",
                  "A rank that stays above the others holds them up."),
        framework("Memory allocated, at the most", "bytes", "hotloop_job_memory_bytes@"),
        framework("Since the newest checkpoint", "s", "hotloop:run_checkpoint_age:seconds@", legend="age"),
        framework("Share of time that checkpoints held up", "percentunit",
                  "rate(hotloop_job_checkpoint_stall_seconds_total@[$__rate_interval])"),
        Panel("What it does", "state-timeline", phases, "none"),
        framework("Restarts", "none", "max(hotloop_job_restarts_total@)", legend="restarts"),
    ]  # fmt: skip
    own = [
        framework("Loss", "none", "hotloop_job_loss@"),
        framework("Learning rate", "none", "max(hotloop_job_learning_rate@)", legend="learning rate"),
        framework("Metrics", "none", "max by (metric) (hotloop_job_metric@)", legend="{{metric}}"),
        framework("Step", "none", "max(hotloop_job_step@)", legend="step"),
    ]
    variables = {
        "job_name": "label_values(hotloop_job_info, job_name)",
        "run": 'label_values(hotloop_job_info{job_name="$job_name"}, run)',
    }
    rows = [Row("Hardware", cards, 3), Row("Framework", loop), Row("The training's own metrics", own)]
    return Dashboard(JOB, "hotloop: one training", rows, variables)
