import os
from pathlib import Path

import pytest

from hotloop.core.machine import read_machine, usable_cpus, usable_memory_bytes


def recorded(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


AFFINITY = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, AFFINITY),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000"}, AFFINITY),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000"}, 1),
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/cpu.max": "100000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/box\n2:devices:/\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ({"proc/self/cgroup": "5:cpu:/box\n", "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1"}, AFFINITY),
    ],
)
def test_a_containers_quota_counts(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    assert usable_cpus(recorded(tmp_path, files)) == cpus


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    root = recorded(tmp_path, {"proc/meminfo": "MemTotal:  2048 kB\nMemFree: 1 kB\n", "proc/self/cgroup": "0::/\n"})
    assert usable_memory_bytes(root) == 2048 * 1024
    recorded(root, {"sys/fs/cgroup/memory.max": "1000000"})
    assert usable_memory_bytes(root) == 1_000_000
    recorded(root, {"sys/fs/cgroup/memory.max": "max"})
    assert usable_memory_bytes(root) == 2048 * 1024


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.cpus >= 1
    assert machine.memory_bytes > 1 << 28
    assert "numpy" in machine.packages
