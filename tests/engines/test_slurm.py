"""Jobs on a real Slurm: interrupted in every way it has, and at the end as if nothing had been."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import Command
from runs import MOMENTUM, paced_job, weights_of
from slurm import Cluster, missing, slurm, wait_until

JOB = paced_job(
    30,
    MOMENTUM
    + """[launch]
gpus = 4
[launch.environment]
OMP_NUM_THREADS = "1"
""",
)
pytestmark = pytest.mark.slurm
SLOW = ["--set", "task.arguments.seconds=0.05"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if absent := missing():
        pytest.skip(f"no Slurm can be started here: there is no {', '.join(absent)}")
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def job(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    """Weights of a run on one machine, once there are any."""
    return {}


@pytest.fixture
def expected(
    hotloop: Command, job: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if not undisturbed:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        hotloop("train", "job.toml", "--set", "ranks.processes=2", "--set", "run.dir=undisturbed", expect=0)
        monkeypatch.delenv("OMP_NUM_THREADS")
        undisturbed.update(weights_of(job.parent / "undisturbed"))
    return undisturbed


def launched(hotloop: Command, *options: str, on: tuple[str, ...] = ("--on", "slurm", "--nodes", "2")) -> str:
    """Its number."""
    done = hotloop("launch", "job.toml", *on, *SLOW, "--set", "ranks.processes=1", *options, "--json", expect=0)
    number: str = json.loads(done.out)["id"]
    return number


def has_saved(folder: Path) -> bool:
    return bool(list(folder.glob("runs/line/checkpoints/epoch-*")))


def state(hotloop: Command, number: str) -> str:
    stand: str = json.loads(hotloop("launch", "status", number, "--json", expect=0).out)["state"]
    return stand


def assert_equal(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    left = weights_of(folder / "runs/line")
    assert left.keys() == expected.keys()
    assert all(torch.equal(left[name], expected[name]) for name in expected)


def watched_to_the_end(hotloop: Command, number: str) -> str:
    """What it has written, once it has ended."""
    return hotloop("launch", "logs", number, "--follow", expect=0, timeout=500).out


def starts(folder: Path) -> list[str]:
    lines = (folder / "runs/line/starts.jsonl").read_text().splitlines()
    return [json.loads(line)["launched"] for line in lines]


@pytest.mark.slow
def test_a_job_of_higher_priority_costs_nothing(
    hotloop: Command, job: Path, cluster: Cluster, expected: dict[str, torch.Tensor]
) -> None:
    """It is told to stop, saves, makes room at once, and goes on when that has ended."""
    number = launched(hotloop)
    wait_until(lambda: has_saved(job.parent), "a checkpoint")
    urgent = cluster.call("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null",
                          "--wrap=sleep 2")  # fmt: skip
    wait_until(lambda: cluster.state(urgent) == "COMPLETED", "the urgent job's end")
    log = watched_to_the_end(hotloop, number)
    assert state(hotloop, number) == "finished", log
    assert "stopped early (exit code" in log
    assert "finished after 300 steps" in log
    assert_equal(job.parent, expected)
    assert starts(job.parent) == [f"slurm {number}, start {start} on n[1-2]" for start in (1, 2)]
    stand = json.loads(hotloop("launch", "status", number, "--json", expect=0).out)
    assert (stand["starts"], stand["nodes"], stand["gpus"]) == (2, 2, 4)


@pytest.mark.slow
def test_a_time_limit_is_as_far_as_each_start_goes(
    hotloop: Command, job: Path, cluster: Cluster, expected: dict[str, torch.Tensor]
) -> None:
    """Slurm counts limits in minutes and tells of one 30 to 90 s before it, here; training takes more."""
    slow = ["--set", "task.arguments.seconds=0.3", "--set", "launch.slurm.time=2", "--set", "launch.slurm.notice=30 s"]
    number = launched(hotloop, *slow)
    log = watched_to_the_end(hotloop, number)
    assert state(hotloop, number) == "finished", log
    assert "saved, as" in log
    assert log.count("hotloop: start ") >= 2
    assert_equal(job.parent, expected)


@pytest.mark.slow
def test_a_node_that_is_drained_and_one_that_is_lost(
    hotloop: Command, job: Path, cluster: Cluster, expected: dict[str, torch.Tensor]
) -> None:
    number = launched(hotloop)
    wait_until(lambda: has_saved(job.parent), "a checkpoint")
    cluster.call("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=fans")
    cluster.call("scontrol", "requeue", number)
    wait_until(lambda: state(hotloop, number) == "waiting", "the drained node's end")
    cluster.call("scontrol", "update", "NodeName=n1", "State=RESUME")
    cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")
    wait_until(lambda: len(starts(job.parent)) == 2, "another start")
    cluster.end_node("n2")
    wait_until(lambda: cluster.state(number) in ("PENDING", "COMPLETING"), "the lost node's end")
    cluster.start_node("n2")
    wait_until(lambda: cluster.state(number) == "PENDING", "its place in the queue")
    cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")
    log = watched_to_the_end(hotloop, number)
    assert state(hotloop, number) == "finished", log
    assert_equal(job.parent, expected)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["hotloop", "scancel"])
def test_what_is_cancelled_saves_and_does_not_come_back(
    hotloop: Command, job: Path, cluster: Cluster, expected: dict[str, torch.Tensor], by: str
) -> None:
    number = launched(hotloop)
    wait_until(lambda: has_saved(job.parent), "a checkpoint")
    if by == "hotloop":
        assert "line is to stop" in hotloop("launch", "cancel", "line", expect=0).out
    else:
        cluster.call("scancel", number)
    wait_until(lambda: cluster.state(number) in ("COMPLETED", "CANCELLED", "FAILED"), "its end")
    assert state(hotloop, number) == "cancelled"
    result = json.loads((job.parent / "runs/line/result.json").read_text())
    assert result["status"] == "preempted", "it has saved"
    again = launched(hotloop, on=("--on", "slurm", "--nodes", "2"))
    watched_to_the_end(hotloop, again)
    assert_equal(job.parent, expected)


def test_what_fails_is_not_started_again_and_says_why(hotloop: Command, job: Path, cluster: Cluster) -> None:
    done = hotloop("launch", "job.toml", "--on", "slurm", "--watch", "--set", "task.name=tiny:VectorLoss", expect=1)
    assert "hotloop: failed" in done.err
    assert "loss" in done.err
    assert done.out.count("hotloop: start ") == 1


@pytest.mark.slow
def test_starts_that_save_nothing_come_to_an_end(hotloop: Command, job: Path, cluster: Cluster) -> None:
    """Killed before the first save each time, as one that needs more memory than there is."""
    doomed = ["--set", "task.name=tiny:Doomed", "--set", "checkpoint.every=100 steps"]
    done = hotloop("launch", "job.toml", "--on", "slurm", "--watch", *doomed, expect=1, timeout=500)
    assert done.out.count("hotloop: start ") == 3, done.out
    assert "hotloop: failed (3 starts in a row have saved nothing)" in done.err


def test_a_job_that_waits_is_cancelled_too(hotloop: Command, job: Path, cluster: Cluster) -> None:
    done = hotloop(
        "launch", "job.toml", "--on", "slurm", "--set", 'launch.slurm.options=["--hold"]', "--json", expect=0
    )
    number = json.loads(done.out)["id"]
    stand = json.loads(hotloop("launch", "status", number, "--json", expect=0).out)
    assert (stand["state"], stand["reason"]) == ("waiting", "JobHeldUser")
    asked = cluster.call("squeue", "--noheader", f"--jobs={number}", "--Format=cpus-per-task")
    assert asked == "2", "all of a machine's, as it takes all of its GPUs"
    done = hotloop("launch", "job.toml", "--on", "slurm", expect=2)
    assert "runs/line is in use" in done.err
    hotloop("launch", "cancel", number, expect=0)
    assert state(hotloop, number) == "cancelled"
    assert "has ended already" in hotloop("launch", "cancel", number, expect=0).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "5", "--set", "ranks.processes=1"], "5 GPUs of a machine are asked for; the largest has 4"),
        (["--nodes", "3", "--set", "ranks.processes=1"], "3 machines are asked for, and there are 2"),
        (["--set", "launch.cpus=3"], "3 processors of a machine are asked for; the largest has 2"),
        (["--set", "launch.slurm.partition=night"], 'launch.slurm.partition = "night" does not exist'),
        (["--set", 'launch.slurm.options=["--gres=tpu:1"]'], "Slurm refuses it"),
        (["--set", "launch.memory_gib=999"], "Slurm refuses it"),
        (["--set", "launch.slurm.containers=apptainer"], "a container needs an image"),
        (["--set", "launch.slurm.time=2"], 'launch.slurm.time = "2" leaves no time to train'),
        (["--set", "launch.environment.HF_TOKEN=abc"], "launch.environment.HF_TOKEN looks like a secret"),
    ],
)
def test_what_slurm_would_refuse_leaves_nothing(
    hotloop: Command, job: Path, cluster: Cluster, options: list[str], said: str
) -> None:
    done = hotloop("launch", "job.toml", "--on", "slurm", *options, expect=2)
    assert said in done.err
    assert not list(job.parent.glob("runs/.launch/*/"))
    assert not cluster.call("squeue", "--noheader")


def test_files_that_a_node_does_not_see_are_said(hotloop: Command, job: Path, cluster: Cluster) -> None:
    """As where a home is on the login node alone; here, a folder that is gone when the job starts."""
    held = ["--set", 'launch.slurm.options=["--hold"]']
    done = hotloop("launch", "job.toml", "--on", "slurm", *held, "--json", expect=0)
    launch = json.loads(done.out)
    (Path(launch["folder"]) / "job.toml").unlink()
    cluster.call("scontrol", "release", launch["id"])
    watched_to_the_end(hotloop, launch["id"])
    stand = json.loads(hotloop("launch", "status", launch["id"], "--json", expect=0).out)
    assert stand["state"] == "failed"
    assert "job.toml does not exist on n" in stand["reason"]


@pytest.mark.slow
def test_the_job_as_launched_is_what_trains(hotloop: Command, job: Path, cluster: Cluster) -> None:
    """Whatever becomes of the user's file while it waits."""
    held = ["--set", 'launch.slurm.options=["--hold"]', "--set", "train.epochs=1"]
    done = hotloop("launch", "job.toml", "--on", "slurm", *held, "--json", expect=0)
    job.unlink()
    cluster.call("scontrol", "release", json.loads(done.out)["id"])
    watched_to_the_end(hotloop, json.loads(done.out)["id"])
    kept = tomllib.loads((job.parent / "runs/line/job.toml").read_text())
    assert (kept["train"]["epochs"], kept["launch"]["gpus"]) == (1, 4)


@pytest.mark.slow
def test_a_sweep_is_an_array_whose_jobs_are_asked_one_by_one(hotloop: Command, job: Path, cluster: Cluster) -> None:
    """One of them is interrupted by a limit of its own array's place, and comes back as itself."""
    options = ["--sweep", "seed=[3, 4]", "--set", "ranks.processes=1", "--set", "launch.gpus=1"]
    done = hotloop("launch", "job.toml", "--on", "slurm", *SLOW, *options, "--json", expect=0)
    first, second = json.loads(done.out)["launches"]
    assert (second["id"], second["name"]) == (f"{first['id'][:-2]}_1", "line-1")
    wait_until(lambda: list(job.parent.glob("runs/line-1/checkpoints/epoch-*")), "a checkpoint")
    cluster.call("scancel", "--batch", "--signal=USR1", second["id"])
    for one, seed in ((first, 3), (second, 4)):
        log = hotloop("launch", "logs", one["name"], "--follow", expect=0, timeout=500).out
        assert "finished after 300 steps" in log
        assert tomllib.loads((Path(one["run_dir"]) / "job.toml").read_text())["seed"] == seed
    again = json.loads(hotloop("launch", "status", "line-1", "--json", expect=0).out)
    assert (again["state"], again["starts"]) == ("finished", 2)
