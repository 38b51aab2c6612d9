"""How busy a card's parts are, by its performance monitoring (GPM; Hopper and newer).

The card counts by itself; a figure is what was counted between two samples: it holds all of the time between scrapes.
"""

from threading import Lock
from typing import Any

from hotloop.monitor.numbers import scaled

_METRICS = {
    "sm_active": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_active": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
_ONE_BY_ONE = Lock()
"""NVML's performance monitoring is not safe for threads, whatever cards they ask: of exporters on four H200 (driver
580.159.04) 3 of 5 died within it at their second scrape, and none of 16 with one call at a time.
"""
_PATIENCE_SECONDS = 0.2
"""For the other cards. One that hangs while it counts takes the activity of all, and nothing else."""


class Activity:
    """The activity of one card since the last look. Not for several threads."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._supported: bool | None = None
        self._samples: list[Any] = []
        self._taken = 0
        self._asked: Any = None
        self._answers: list[Any] = []

    def read(self, handle: Any) -> dict[str, float | None]:
        """Shares by the names of `Card`; nothing at the first look, where it does not count, or while another hangs.

        Raises:
            NVMLError: it should, and does not.
        """
        if not _ONE_BY_ONE.acquire(timeout=_PATIENCE_SECONDS):
            return {}
        try:
            return self._read(handle)
        finally:
            _ONE_BY_ONE.release()

    def _read(self, handle: Any) -> dict[str, float | None]:
        nvml = self._nvml
        if self._supported is None:
            self._supported = bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
            if self._supported:
                self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
                self._ask()
        if not self._supported:
            return {}
        now = self._samples[self._taken % 2]
        nvml.nvmlGpmSampleGet(handle, now)
        self._taken += 1
        return self._between(self._samples[self._taken % 2], now) if self._taken > 1 else {}

    def _ask(self) -> None:
        """Make the question; it has room for hundreds of metrics, so it is made once."""
        nvml = self._nvml
        self._asked = nvml.c_nvmlGpmMetricsGet_t()
        self._asked.version, self._asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_METRICS)
        self._answers = self._asked.metrics[: len(_METRICS)]
        for answer, constant in zip(self._answers, _METRICS.values(), strict=True):
            answer.metricId = getattr(nvml, constant)

    def _between(self, before: Any, now: Any) -> dict[str, float | None]:
        nvml = self._nvml
        self._asked.sample1, self._asked.sample2 = before, now
        for answer in self._answers:  # what is not answered now was answered before
            answer.nvmlReturn = nvml.NVML_ERROR_UNKNOWN
        nvml.nvmlGpmMetricsGet(self._asked)
        return {
            name: scaled(answer.value, 0.01)
            for name, answer in zip(_METRICS, self._answers, strict=True)
            if answer.nvmlReturn == nvml.NVML_SUCCESS and 0 <= answer.value <= 100
        }
