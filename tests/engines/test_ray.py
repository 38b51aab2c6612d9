"""Jobs on a real Ray: a worker is killed, a node is taken away, and at the end all is as if nothing had been."""

import json
import os
import signal
import sys
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import torch
from command import Command
from ports import free_port
from ray_cluster import Cluster, missing, ray_cluster, wait_until, worker_of
from runs import MOMENTUM, paced_job, weights_of

from hotloop.core.errors import InputError
from hotloop.core.job_file import load_job
from hotloop.launch.ray import Ray
from hotloop.launch.request import make_request

JOB = paced_job(
    15,
    MOMENTUM
    + """[ranks]
processes = 2
[launch.environment]
OMP_NUM_THREADS = "1"
""",
)
pytestmark = pytest.mark.ray
SLOW = ("--set", "task.arguments.seconds=0.08")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if absent := missing():
        pytest.skip(f"no Ray can be started here: {absent}")
    with ray_cluster() as started:
        yield started


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    """Weights of a run without Ray, once there are any."""
    return {}


@pytest.fixture
def expected(
    hotloop: Command, job: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if not undisturbed:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        hotloop("train", "job.toml", "--set", "run.dir=undisturbed", expect=0)
        monkeypatch.delenv("OMP_NUM_THREADS")
        undisturbed.update(weights_of(job.parent / "undisturbed"))
    return undisturbed


def launched(hotloop: Command, address: str, *options: str) -> str:
    done = hotloop(
        "launch", "job.toml", "--on", "ray", "--set", f"launch.ray.address={address}", *options, "--json", expect=0
    )
    identity: str = json.loads(done.out)["id"]
    return identity


def status(hotloop: Command, name: str = "line") -> tuple[str, str]:
    stand = json.loads(hotloop("launch", "status", name, "--json", expect=0).out)
    return stand["state"], stand["reason"]


def watched_to_the_end(hotloop: Command, name: str = "line") -> str:
    return hotloop("launch", "logs", name, "--follow", expect=0, timeout=180).out


def has_saved(folder: Path) -> bool:
    return bool(list(folder.glob("runs/line/checkpoints/*step-*")))


def starts(folder: Path) -> list[str]:
    lines = (folder / "runs/line/starts.jsonl").read_text().splitlines()
    return [json.loads(line)["launched"] for line in lines]


def assert_equal(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    left = weights_of(folder / "runs/line")
    assert left.keys() == expected.keys()
    assert all(torch.equal(left[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_killed_worker_costs_nothing(
    hotloop: Command, job: Path, cluster: Cluster, expected: dict[str, torch.Tensor]
) -> None:
    launched(hotloop, cluster.address, *SLOW)
    wait_until(lambda: has_saved(job.parent), "a checkpoint")
    assert status(hotloop)[0] == "running"
    log = job.parent / "runs/.launch/line/log.txt"
    os.kill(worker_of(log.read_text(), rank=1), signal.SIGKILL)
    written = watched_to_the_end(hotloop)
    assert status(hotloop) == ("finished", ""), written
    assert "continuing at step" in written
    assert "finished after 150 steps" in written
    assert len(starts(job.parent)) == 2
    assert all(launch.startswith("ray line on ") for launch in starts(job.parent))
    assert_equal(job.parent, expected)


@pytest.mark.slow
def test_a_sweep_is_a_launch_for_each_run_and_they_wait_for_each_other(
    hotloop: Command, job: Path, cluster: Cluster
) -> None:
    """Two workers each, of a processor each: of two runs one has to wait."""
    sweep = ("--sweep", "seed=[3, 4]", "--set", "train.epochs=1", "--set", "launch.cpus=2")
    done = hotloop("launch", "job.toml", "--on", "ray", "--set", f"launch.ray.address={cluster.web}", *sweep, expect=0)
    assert "line-1: seed=4" in done.err
    for place in range(2):
        written = watched_to_the_end(hotloop, f"line-{place}")
        assert status(hotloop, f"line-{place}") == ("finished", ""), written
        kept = tomllib.loads((job.parent / f"runs/line-{place}/job.toml").read_text())
        assert kept["seed"] == 3 + place


@pytest.mark.slow
def test_what_waits_for_machines_is_cancelled_too(hotloop: Command, job: Path, cluster: Cluster) -> None:
    options = ("--set", "ranks.processes=4", "--set", "launch.ray.autoscaling=true")
    launched(hotloop, cluster.address, *options)
    log = job.parent / "runs/.launch/line/log.txt"
    wait_until(lambda: "Requesting resources" in log.read_text(), "a request for machines")
    assert status(hotloop) == ("waiting", "its workers have not begun")
    hotloop("launch", "cancel", "line", expect=0)
    wait_until(lambda: status(hotloop)[0] != "waiting", "its end")
    assert status(hotloop) == ("cancelled", "")
    assert not (job.parent / "runs/line").exists()


def test_what_fails_is_not_started_again_and_says_why(hotloop: Command, job: Path, cluster: Cluster) -> None:
    wrong = ("--set", "task.name=tiny:VectorLoss", "--set", f"launch.ray.address={cluster.address}")
    done = hotloop("launch", "job.toml", "--on", "ray", "--watch", *wrong, expect=1)
    assert "hotloop: failed" in done.err
    error = done.out[done.out.index("error: ") :].splitlines()
    assert "loss" in error[0]
    assert [line.split(":")[0] for line in error[:3]] == ["error", "cause", "fix"]
    assert len(starts(job.parent)) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "2"], "4 workers of 1 CPU each are asked for; Ray has room for 2"),
        (["--gpus", "2"], "2 workers of 1 GPU, 1 CPU each are asked for; Ray has room for 0"),
        (["--set", "launch.memory_gib=1000000"], "Ray has room for 0"),
        (["--set", "launch.image=a.sif"], 'launch.image = "a.sif"'),
        (["--set", 'launch.setup=["module load cuda"]'], "launch.setup has 'module load cuda'"),
        (["--set", "launch.ray.address=ray://127.0.0.1:10001"], "is no address that a job can be sent to"),
        (["--set", "launch.ray.max_failures=-2"], "launch.ray.max_failures"),
        (["--set", "launch.ray.runtime_env.env_vars.HF_TOKEN=hf_abcdefghijklmnopqrstuvwx"], "looks like a secret"),
    ],
)
def test_what_ray_cannot_do_leaves_nothing(
    hotloop: Command, job: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.web)
    done = hotloop("launch", "job.toml", "--on", "ray", *options, expect=2)
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 3
    assert not list(job.parent.glob("runs/.launch/*"))


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_no_ray_at_an_address_says_what_to_type(hotloop: Command, job: Path, cluster: Cluster, scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    done = hotloop("launch", "job.toml", "--on", "ray", "--set", f"launch.ray.address={address}", expect=2)
    assert f"error: there is no Ray at {address}" in done.err
    assert "ray start --head" in done.err
    assert not list(job.parent.glob("runs/.launch/*"))


def test_without_ray_it_says_what_to_install(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    request = make_request(load_job(job, []), 1, 0, lambda: 0, job.parent, datetime(2026, 11, 23))
    with pytest.raises(InputError, match=r'pip install "hotloop\[ray\]"'):
        Ray().check(request)


def test_what_would_be_sent_is_shown_without_asking_anybody(
    hotloop: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://nowhere.invalid:8265")
    options = ("--nodes", "2", "--gpus", "4", "--set", "ranks.processes=auto", "--set", "data.batch_size=8")
    more = ("--set", "launch.memory_gib=64", "--set", "launch.cpus=32", "--set", "launch.network=ethernet")
    done = hotloop("launch", "job.toml", "--on", "ray", *options, *more, "--dry-run", expect=0)
    for line in (
        "num_workers = 8", "GPU = 1", "CPU = 8", f"memory = {16 * 2**30}", "max_failures = 3", 'NCCL_IB_DISABLE = "1"',
        'RAY_USAGE_STATS_ENABLED = "0"', 'OMP_NUM_THREADS = "1"',
    ):  # fmt: skip
        assert line in done.out.splitlines()
    assert "python -P -m hotloop launch ray-driver" in done.out


@pytest.mark.slow
def test_a_cancelled_job_and_a_node_that_is_taken_away_cost_nothing(
    hotloop: Command, job: Path, cluster: Cluster, expected: dict[str, torch.Tensor]
) -> None:
    """The first by the dashboard. Ray is told of a node's end ahead: all ranks save, and go on elsewhere.

    It is the last test of this file, as a node is gone after it.
    """
    identity = launched(hotloop, cluster.web, *SLOW)
    assert identity.startswith("raysubmit_")
    wait_until(lambda: has_saved(job.parent), "a checkpoint")
    again = hotloop("launch", "job.toml", "--on", "ray", "--set", f"launch.ray.address={cluster.web}", expect=2)
    assert "runs/line is in use" in again.err
    cluster.add_node("second")
    assert "line is to stop" in hotloop("launch", "cancel", identity, expect=0).out
    wait_until(lambda: status(hotloop)[0] != "running", "its end")
    assert status(hotloop) == ("cancelled", "")
    assert json.loads((job.parent / "runs/line/result.json").read_text())["status"] == "preempted", "it has saved"
    assert len(starts(job.parent)) == 1
    wait_until(lambda: "second" in cluster.nodes(), "second node of Ray")
    with cluster.drainer() as drain:
        launched(hotloop, cluster.address, *SLOW, "--set", "launch.ray.max_failures=0")
        wait_until(lambda: len(starts(job.parent)) == 2, "another start")
        drain()
    written = watched_to_the_end(hotloop, "line-2")
    assert status(hotloop, "line-2") == ("finished", ""), written
    assert "saved, as Ray drains" in written
    assert "hotloop: stopped early; starting it again" in written
    assert starts(job.parent)[0].startswith("ray line on ")
    assert [launch.startswith("ray line-2 on ") for launch in starts(job.parent)] == [False, True, True]
    assert_equal(job.parent, expected)
