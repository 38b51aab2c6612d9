"""`hotloop launch` on this machine, and what it refuses before anything is written. Slurm: tests/engines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from command import Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import SUPPORT, paced_job, weights_of

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.machine import Gpu, Machine, read_machine
from hotloop.launch.held import usable_gpus
from hotloop.launch.local import Local
from hotloop.launch.request import Request, make_request
from hotloop.launch.slurm import Slurm, _seconds

JOB = paced_job(10)
_NOW = datetime(2026, 1, 2)
SLOW = ["--set", "task.arguments.seconds=0.05"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    yield file
    for process in tmp_path.glob("runs/.launch/*/process"):  # none is left if a test has passed
        os.killpg(int(process.read_text().split()[0]), signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def ended(job: Path, name: str = "line") -> None:
    """A process that has ended has nothing to be ended."""
    (job.parent / f"runs/.launch/{name}/process").unlink()


def test_it_trains_after_the_command_has_ended_and_says_how_it_stands(hotloop: Command, job: Path) -> None:
    done = hotloop("launch", "job.toml", *SLOW, expect=0)
    assert "line on local as" in done.out
    assert "hotloop launch logs line --follow" in done.out
    stand = json.loads(hotloop("launch", "status", "line", "--json", expect=0).out)
    assert (stand["state"], stand["on"], stand["nodes"]) == ("running", "local", 1)
    log = hotloop("launch", "logs", "line", "--follow", expect=0).out
    assert "finished after 100 steps" in log
    assert " finished " in hotloop("launch", "status", expect=0).out
    start = json.loads((job.parent / "runs/line/starts.jsonl").read_text())
    assert start["launched"].startswith(f"local {stand['id']} on ")
    ended(job)


@pytest.mark.slow
def test_cancelled_saves_and_another_launch_goes_on(hotloop: Command, job: Path) -> None:
    hotloop("train", "job.toml", "--set", "run.dir=undisturbed", expect=0)
    hotloop("launch", "job.toml", *SLOW, expect=0)
    wait_until(lambda: list(job.parent.glob("runs/line/checkpoints/epoch-*")), "a checkpoint")
    in_use = hotloop("launch", "job.toml", expect=2)
    assert "launch line on local trains in it" in in_use.err
    assert "line is to stop" in hotloop("launch", "cancel", "line", expect=0).out
    log = hotloop("launch", "logs", "line", "--follow", expect=0).out
    assert "saved, as SIGTERM asked" in log
    assert json.loads(hotloop("launch", "status", "line", "--json").out)["state"] == "cancelled"
    ended(job)
    done = hotloop("launch", "job.toml", *SLOW, "--watch", expect=0)
    assert "finished after 100 steps" in done.out
    assert [line for line in done.err.splitlines() if line.startswith("hotloop: ")][-1] == "hotloop: finished"
    left, expected = weights_of(job.parent / "runs/line"), weights_of(job.parent / "undisturbed")
    assert all(torch.equal(left[name], expected[name]) for name in expected)
    ended(job, "line-2")


@pytest.mark.slow
def test_what_fails_says_why_and_what_is_killed_is_lost(hotloop: Command, job: Path) -> None:
    done = hotloop("launch", "job.toml", "--watch", "--json", "--set", "task.name=tiny:VectorLoss", expect=1)
    found = json.loads(done.out)
    assert found["state"] == "failed"
    assert "loss" in found["reason"]
    ended(job)
    hotloop("launch", "job.toml", *SLOW, "--set", "run.dir=runs/other", expect=0)
    stand = json.loads(hotloop("launch", "status", "other", "--json").out)
    os.killpg(int(stand["id"]), signal.SIGKILL)
    wait_until(lambda: json.loads(hotloop("launch", "status", "other", "--json").out)["state"] == "lost", "its end")
    ended(job, "other")
    assert "other has ended already: lost" in hotloop("launch", "cancel", "other", expect=0).out


@pytest.mark.slow
def test_launches_are_found_from_where_they_were_made_and_above(hotloop: Command, job: Path) -> None:
    assert "no launches in ." in hotloop("launch", "status", expect=0).out
    hotloop("launch", "status", "--root", "nowhere", expect=2)
    done = hotloop("launch", "job.toml", "--watch", "--json", "--set", "train.epochs=1", expect=0)
    ended(job)
    by_id = hotloop("launch", "status", json.loads(done.out)["id"], "--json", expect=0)
    assert json.loads(by_id.out)["name"] == "line"
    below = hotloop("launch", "status", "line", "--root", "runs", "--json", expect=0)
    assert json.loads(below.out)["state"] == "finished"
    missing = hotloop("launch", "status", "another", expect=2)
    assert missing.err.splitlines()[0] == "error: no launch another"
    assert ": line" in missing.err


def test_dry_runs_write_nothing(hotloop: Command, job: Path) -> None:
    done = hotloop("launch", "job.toml", "--on", "slurm", "--nodes", "2", "--gpus", "2", "--dry-run", expect=0)
    assert "#SBATCH --nodes=2" in done.out
    assert "#SBATCH --gres=gpu:2" in done.out
    planned = json.loads(hotloop("launch", "job.toml", "--dry-run", "--json", expect=0).out)
    assert list(planned["documents"]) == ["launch.sh"]
    assert not (job.parent / "runs").exists()


def test_a_sweep_is_one_array_of_jobs(hotloop: Command, job: Path) -> None:
    sweep = ["--sweep", "seed=[1, 2]", "--sweep", 'optimizer.name=["sgd", "adamw"]']
    planned = hotloop("launch", "job.toml", "--on", "slurm", *sweep, "--dry-run", expect=0)
    assert "#SBATCH --array=0-3" in planned.out
    assert planned.err.splitlines()[1] == 'line-1: seed=1, optimizer.name="adamw"'


def test_what_is_set_for_nccl_is_shown_and_contradictions_are_said(hotloop: Command, job: Path) -> None:
    settings = ["--set", "launch.interface=eth0", "--set", "launch.network=infiniband"]
    wrong = ["--set", 'launch.environment={NCCL_IB_DISABLE="1", NCCL_DEBUG="INFO"}']
    done = hotloop(
        "launch", "job.toml", "--on", "slurm", "--gpus", "1", *settings, *wrong, "--dry-run", "--json", expect=0
    )
    planned = json.loads(done.out)
    assert planned["environment"]["NCCL_SOCKET_IFNAME"] == planned["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert {one["id"] for one in planned["findings"]} == {"infiniband-disabled", "debug-always", "cpus-default"}
    assert "export NCCL_NET=IB" in planned["documents"]["launch.sh"]
    quiet = hotloop("launch", "job.toml", "--on", "slurm", "--gpus", "1", "--dry-run", "--json", expect=0)
    assert json.loads(quiet.out)["environment"] == {}, "nothing is set that was not asked for"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "2"], "2 machines on local"),
        (["--nodes", "2", "--dry-run"], "2 machines on local"),
        (["--on", "slurm", "--set", "device=cuda"], "how many GPUs of each machine are wanted is not said"),
        (["--set", "device=cuda", "--gpus", "99", "--set", "data.batch_size=99"], "99 GPUs are asked for, and this"),
        (["--on", "slurm"], "there is no sinfo here"),
        (["--on", "slurm", "--gpus", "5"], "data.batch_size = 4 is less than the 5 processes"),
        (["--gpus", "1", "--set", "device=cuda", "--set", "ranks.processes=2"], "ranks.processes = 2 is more than"),
        (["--set", "launch.environment.WANDB_API_KEY=x"], "launch.environment.WANDB_API_KEY looks like a secret"),
        (["--set", "data.train=s3://me:hunter2@bucket/x"], "data.train looks like a secret"),
        (["--set", 'launch.setup=["export WANDB_KEY_API_TOKEN=0123456789abcdef"]'], "launch.setup looks like a secret"),
        (["--set", "launch.environment.hl_folder=x"], "launch.environment.hl_folder is hotloop's own"),
        (["--nodes", "2", "--on", "slurm", "--set", "parallel=none"], 'parallel = "none" does not go with 2 machines'),
        (
            ["--on", "slurm", "--gpus", "1", "--sweep", "launch.environment.A=[1, 2]"],
            "the runs of this sweep differ in",
        ),
        (["--on", "slurm", "--gpus", "1", "--set", "launch.slurm.notice=3 steps"], 'launch.slurm.notice = "3 steps"'),
        (["--set", 'launch.environment={"A-B"="1"}'], "'A-B' is no variable of a shell"),
        (["--set", "launch.slurm.time=soon"], 'launch.slurm.time = "soon"'),
        (["--set", "launch.nodes=0"], "launch.nodes = 0"),
        (["--sweep", "seed=1"], "--sweep 'seed=1'"),
        (["--sweep", "seed=[1, 2]"], "a sweep of 2 on local"),
        (["--on", "slurm", "--sweep", f"seed={list(range(2000))}"], "a sweep of 2,000"),
        (["--on", "slurm", "--sweep", "seed=[1, -1]"], "seed = -1"),
        (["--on", "nomad"], "'nomad' is not one of"),
    ],
)
def test_what_cannot_be_launched_leaves_nothing(
    hotloop: Command, job: Path, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(job.parent))  # no Slurm on it
    done = hotloop("launch", "job.toml", *options, expect=2)
    assert said in done.err
    assert done.err.splitlines()[0].startswith("error: ")
    assert not (job.parent / "runs").exists()


def test_what_only_looks_like_a_secret_is_let_through(hotloop: Command, job: Path) -> None:
    harmless = (
        'launch.environment={TOKENIZERS_PARALLELISM=false, MAX_TOKENS=4096, GOOGLE_APPLICATION_CREDENTIALS="/k.json"}'
    )
    options = ["--set", harmless, "--set", "data.train=/data/sk-learn-datasets-version-2024"]
    planned = json.loads(hotloop("launch", "job.toml", *options, "--dry-run", "--json", expect=0).out)
    assert planned["environment"]["MAX_TOKENS"] == "4096"
    assert planned["environment"]["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.slow
def test_launches_at_once_are_several_and_one_run_is_had_by_one(hotloop: Command, job: Path) -> None:
    """Of those that are named by the time, each has a name of its own; of the same run, one is refused."""
    command = [sys.executable, "-m", "hotloop", "launch", "job.toml", "--set", "train.epochs=1", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    job.write_text(job.read_text().replace('[run]\ndir = "runs/line"', ""))
    several = [subprocess.Popen(command, cwd=job.parent, env=environment, stdout=-1, text=True) for _ in range(3)]
    names = {json.loads(one.communicate(timeout=60)[0])["name"] for one in several}
    assert len(names) == 3
    for name in names:
        assert "finished after 10 steps" in hotloop("launch", "logs", name, "--follow", expect=0).out
        ended(job, name)
    same = [*command, "--set", "run.dir=runs/same"]
    both = [subprocess.Popen(same, cwd=job.parent, env=environment, stdout=-1, stderr=-1) for _ in range(2)]
    for one in both:
        one.communicate(timeout=60)
    assert sorted(one.returncode for one in both) == [0, 2]
    hotloop("launch", "logs", "same", "--follow", expect=0)
    ended(job, "same")


def sinfo(text: str, code: int = 0) -> Slurm:
    """Of a cluster that answers so."""
    said = "" if code == 0 else "slurm_load_partitions: Unable to contact slurm controller"
    return Slurm(lambda command, /, text_=text: subprocess.CompletedProcess(command, code, text_, said))


def request_of(folder: Path, **sections: object) -> Request:
    raw = {"device": "cpu", "data": {"train": "x"}, "model": {"name": "m"}, "run": {"dir": "runs/a"}, **sections}
    return make_request(Job.model_validate(raw), 1, None, lambda: 0, folder, _NOW)


@pytest.mark.parametrize(
    ("machines", "gpus", "cpus"),
    [
        ("gpu|4|gpu:h100:8(S:0-1)|128", 2, "32"),
        ("gpu|4|gpu:8|128\nold|9|gpu:v100:4|32+\nplain|99|(null)|256", 4, "32"),
        ("gpu|4|gpu:8|4", 1, "1"),
    ],
)
def test_of_a_machines_processors_as_many_are_asked_for_as_its_gpus_have(
    tmp_path: Path, machines: str, gpus: int, cpus: str
) -> None:
    slurm = sinfo(machines)
    asked = request_of(tmp_path, launch={"gpus": gpus, "nodes": 4})
    assert "cpus-default" in [one.id for one in slurm.documents([asked])[0].findings]
    slurm.check(asked)
    document = slurm.documents([asked])[0]
    assert f"#SBATCH --cpus-per-task={cpus}\n" in document.text
    assert "cpus-default" not in [one.id for one in document.findings]


def test_a_slurm_that_does_not_answer_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Slurm does not answer"):
        sinfo("", code=1).check(request_of(tmp_path))


def test_data_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    """Here it is an error, but for lines before that may fetch it; on a login node the machines may have it."""
    (tmp_path / "shards").mkdir()
    there = {"train": "shards/train-{000..003}.tar", "val": "s3://bucket/val"}
    Local().check(request_of(tmp_path, data=there))
    Local().check(request_of(tmp_path, launch={"setup": ["fetch"]}))
    with pytest.raises(InputError, match=f"data.val: there is no {tmp_path}/gone"):
        Local().check(request_of(tmp_path, data={**there, "val": "gone"}))
    document = Slurm().documents([request_of(tmp_path, data={**there, "val": "gone"})])[0]
    assert [one.id for one in document.findings] == ["data-not-here"]
    assert f"{tmp_path}/shards {tmp_path}/gone" in document.text, "each machine is asked for them"
    container = {"image": "a.sif", "slurm": {"containers": "apptainer"}}
    bound = Slurm().documents([request_of(tmp_path, data={"train": "/data/train"}, launch=container)])[0]
    assert "--bind /data/train " in bound.text


CARDS = [Gpu("NVIDIA H100", f"GPU-{number}a", 80 * 2**30) for number in range(4)]


@pytest.mark.parametrize(
    ("visible", "usable"),
    [(None, "0123"), ("2,0", "20"), ("GPU-3,GPU-1", "31"), ("", ""), ("1,9,2", "1"), (" 1 ,2", "12")],
)
def test_gpus_that_a_shell_hides_are_not_there(visible: str | None, usable: str) -> None:
    found = usable_gpus(with_cards(), {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert found == [f"GPU-{number}a" for number in usable]


def with_cards() -> Machine:
    return replace(read_machine(), gpus=tuple(CARDS))


def test_gpus_that_another_launch_holds_are_not_had_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as what it has started lives, in whatever folder it was launched."""
    monkeypatch.setenv("HOTLOOP_LIVE", str(tmp_path / "live"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    os.mkfifo(tmp_path / "gate")
    local = Local(with_cards)

    def launched(name: str, gpus: int) -> int:
        settings = {"gpus": gpus, "setup": [f"read < {tmp_path}/gate", "exit 0"]}
        asked = request_of(tmp_path / name, device="cuda", launch=settings)
        asked.folder.mkdir(parents=True)
        return int(local.submit([asked])[0])

    first = launched("one", 2)
    with pytest.raises(InputError) as caught:
        launched("two", 2)
    assert caught.value.what == "GPU 0 is held by launch a"
    assert caught.value.fix == "CUDA_VISIBLE_DEVICES=GPU-2a,GPU-3a hotloop launch ..."
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    second = launched("three", 2)
    for number in (first, second):
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    last = launched("four", 4)
    os.kill(last, signal.SIGKILL)
    os.waitpid(last, 0)


@pytest.mark.slow
def test_lines_of_setup_break_nothing_of_ours(hotloop: Command, job: Path) -> None:
    lines = ["false", "folder=/nowhere; run_dir=x; job_file=y", "sleep 0.1", "set -eu"]
    setup = f"launch.setup={json.dumps(lines)}"
    done = hotloop("launch", "job.toml", "--watch", "--set", "train.epochs=1", "--set", setup, expect=0)
    assert "finished after 10 steps" in done.out
    ended(job)


def test_what_is_cancelled_while_it_is_set_up_does_not_begin(hotloop: Command, job: Path) -> None:
    waits = 'launch.setup=["touch here; while [ ! -e go ]; do sleep 0.05; done"]'
    hotloop("launch", "job.toml", "--set", waits, expect=0)
    wait_until(lambda: (job.parent / "here").exists(), "its setup")
    hotloop("launch", "cancel", "line", expect=0)
    (job.parent / "go").touch()
    assert "line has written nothing" in hotloop("launch", "logs", "line", "--follow", expect=0).err
    assert json.loads(hotloop("launch", "status", "line", "--json").out)["state"] == "cancelled"
    assert not (job.parent / "runs/line").exists()
    ended(job)


@pytest.mark.slow
def test_a_record_of_another_version_is_a_row(hotloop: Command, job: Path) -> None:
    hotloop("launch", "job.toml", "--watch", "--set", "train.epochs=1", expect=0)
    ended(job)
    file = job.parent / "runs/.launch/line/launch.json"
    file.write_text(file.read_text().replace('"local"', '"moon"'))
    assert "no engine moon" in hotloop("launch", "status", expect=0).out


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 0), ("90", 5400), ("1:30", 90), ("12:00:00", 43200), ("2-00:00:00", 172800), ("1-12", 129600)],
)
def test_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert _seconds(text) == seconds


odd = st.text(st.characters(exclude_characters='\0/\n"\\', exclude_categories=["Cs"]), min_size=1, max_size=20)
odd_values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=odd.filter(lambda text: text.strip(". ")), value=odd_values)
def test_whatever_a_folder_is_called_the_scripts_mean_it(tmp_path: Path, name: str, value: str) -> None:
    """Spaces, quotes, dollars, stars: in the folder, and in a variable."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    raw = {"device": "cpu", "data": {"train": "x"}, "model": {"name": "m"}, "run": {"dir": "runs/a"},
           "launch": {"environment": {"ODD": value}}}  # fmt: skip
    request = make_request(Job.model_validate(raw), 1, 0, lambda: 0, folder, _NOW)
    for engine in (Local(), Slurm()):
        script = engine.documents([request])[0].text
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        head = script[script.index("# A signal") : script.index("# How this start")].replace("rm -f", ":")
        ask = 'printf "%s\\0" "$PWD" "$ODD" "$hl_folder"'
        done = subprocess.run(["bash", "-c", f"{head}\n{ask}"], capture_output=True, check=True)
        found = done.stdout.decode().split("\0")[:3]
        assert found == [str(folder), value, str(request.folder)]
