"""What pods of a JobSet run, run here: they save when one is told to stop, and go on when all are started again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import Command
from ports import free_port
from runs import SUPPORT, read_until, weights_of, write_small_job


def container_command(
    manifest: dict[str, Any], index: int, restart: int, port: int
) -> tuple[list[str], dict[str, str]]:
    """Command and variables of a pod's container, as a kubelet gives them; hosts are this machine."""
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    name = f"{manifest['metadata']['name']}-node-0-{index}"
    fields = {"metadata.name": name, "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']": str(restart)}
    variables = {"JOB_COMPLETION_INDEX": str(index)}
    for one in container["env"]:
        given = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        variables[one["name"]] = expanded(given, variables)
    words = [expanded(word, variables) for word in container["command"]]
    host = f"{manifest['metadata']['name']}-node-0-0.{manifest['spec']['network']['subdomain']}"
    return [word.replace(f"{host}:29500", f"127.0.0.1:{port}") for word in words], variables


def expanded(text: str, variables: dict[str, str]) -> str:
    """As k8s.io/kubernetes/third_party/forked/golang/expansion."""
    out, rest = "", text
    while "$" in rest:
        before, _, rest = rest.partition("$")
        out += before
        if rest.startswith("$"):
            out, rest = out + "$", rest[1:]
        elif rest.startswith("(") and ")" in rest:
            name, _, rest = rest[1:].partition(")")
            out += variables.get(name, f"$({name})")
        else:
            out += "$"
    return out + rest


@pytest.mark.slow
def test_what_pods_run_saves_at_sigterm_and_goes_on_after_a_restart(
    hotloop: Command, make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of the manifests, run here: one pod is told to stop, both end with 75, and the restart finishes it."""
    write_small_job(make_images, tmp_path)
    steady = ["--set", "ranks.processes=1", "--set", "train.epochs=30", "--set", "data.last_batch=drop"]
    steady += ["--set", "checkpoint.every=2 steps"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    hotloop("train", "job.toml", *steady, "--set", "ranks.processes=2", "--set", "run.dir=undisturbed", expect=0)
    launch = [
        "--set",
        f"launch.kubernetes.claims.training={tmp_path}",
        "--set",
        'launch.environment.OMP_NUM_THREADS="1"',
    ]
    launch += ["--set", "run.dir=pods", "--set", "launch.setup=['echo \"in $PWD, $((1 + 1))\"']"]
    done = hotloop(
        "launch",
        "job.toml",
        "--on",
        "kubernetes",
        "--nodes",
        "2",
        "--gpus",
        "0",
        *steady,
        *launch,
        "--dry-run",
        expect=0,
    )
    sent = {one["kind"]: one for one in yaml.safe_load_all(done.out)}
    (tmp_path / "mounted.toml").write_text(sent["ConfigMap"]["data"]["job.toml"])
    for restart, code in ((0, 75), (1, 0)):
        port = free_port()
        with ExitStack() as stack:
            pods = [stack.enter_context(pod(sent["JobSet"], index, restart, port, tmp_path)) for index in range(2)]
            if code == 75:
                read_until(pods[0], "saved")
                pods[1].send_signal(signal.SIGTERM)
            ends = [one.communicate(timeout=240) for one in pods]
        assert [one.returncode for one in pods] == [code, code], ends
        assert ends[0][0].startswith(f"in {tmp_path}, 2\n")
    counted = json.loads((tmp_path / ".launch/pods/starts.json").read_text())
    assert counted["fruitless"] == 0, "the first start has saved something"
    left, expected = weights_of(tmp_path / "pods"), weights_of(tmp_path / "undisturbed")
    assert all(torch.equal(left[name], expected[name]) for name in expected)
    starts = [json.loads(line)["launched"] for line in (tmp_path / "pods/starts.jsonl").read_text().splitlines()]
    assert starts == [f"kubernetes pods, restart {number}, pod pods-node-0-0" for number in (0, 1)]


def test_a_pod_that_is_always_stopped_before_it_has_saved_is_not_started_for_ever(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text('model.name = "m"\ndata.train = "x"\nrun.dir = "run"\n')
    (tmp_path / "starts.json").write_text('{"saved": [], "fruitless": 4}')
    monkeypatch.setenv("HOTLOOP_STARTS", str(tmp_path / "starts.json"))
    said = hotloop("train", "job.toml", expect=2).err.splitlines()
    assert said[0] == "error: 5 starts in a row have saved nothing"
    assert len(said) == 3


def pod(manifest: dict[str, Any], index: int, restart: int, port: int, folder: Path) -> "subprocess.Popen[str]":
    """The process of one."""
    words, variables = container_command(manifest, index, restart, port)
    here = {"/etc/hotloop/job.toml": [str(folder / "mounted.toml")], "hotloop": [sys.executable, "-m", "hotloop"]}
    command = [part for word in words for part in here.get(word, [word])]
    kept = {key: value for key, value in variables.items() if key not in ("HOME", "TORCHINDUCTOR_CACHE_DIR")}
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, **kept, "PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
