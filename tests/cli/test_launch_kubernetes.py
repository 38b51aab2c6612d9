"""`hotloop launch --on kubernetes`: the real client, and a server that answers as an API server does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command, Finished
from kube import Cluster, api_server, write_kubeconfig
from ports import free_port
from runs import read_until

JOB = """
name = "line"
device = "cpu"
[data]
train = "images"
batch_size = 64
[model]
name = "resnet18"
[run]
dir = "runs/line"
[launch]
image = "registry.example/hotloop:1"
gpus = 4
[launch.kubernetes.claims]
training = "/data"
"""
ON = ("--on", "kubernetes")
USED_UP = "compute, requested: count/jobs.batch=1, used: count/jobs.batch=9, limited: count/jobs.batch=9"
ONE_MACHINE = {"accessModes": ["ReadWriteOnce"]}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """With a claim, and a job file beside."""
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with api_server() as started:
        write_kubeconfig(tmp_path / "kubeconfig", started)
        for namespace in started.namespaces:
            started.make("persistentvolumeclaims", "training", namespace, spec={"accessModes": ["ReadWriteMany"]})
            started.make("localqueues", "gpus", namespace)
        yield started


def launched(hotloop: Command, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hotloop("launch", "job.toml", *ON, *options, "--json", expect=0).out)
    return found


def stand(hotloop: Command, name: str = "line") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hotloop("launch", "status", name, "--json", expect=0).out)
    return found


def state(hotloop: Command, name: str = "line") -> tuple[str, str]:
    found = stand(hotloop, name)
    return found["state"], found["reason"]


def made(cluster: Cluster) -> list[str]:
    """What launches have left in the cluster."""
    kinds = ("configmaps", "serviceaccounts", "jobs", "jobsets", "trainjobs", "trainingruntimes")
    return [kind for kind in kinds for namespace in cluster.namespaces if cluster.names(kind, namespace)]


def test_a_dry_run_needs_neither_a_cluster_nor_the_client(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text(JOB.partition("[launch]")[0])
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    code = "import sys; sys.modules['kubernetes'] = None; from hotloop.cli.main import main; main()"
    options = ["launch", "job.toml", *ON, "--nodes", "2", "--gpus", "4", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *options], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [one["kind"] for one in yaml.safe_load_all(done.stdout)] == ["ConfigMap", "ServiceAccount", "JobSet"]
    assert "warning: there is no launch.image; hotloop:" in done.stderr
    assert "warning: there are no launch.kubernetes.claims: the run lies in /workspace" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_refuses_what_no_registry_has(hotloop: Command, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    options = ["launch", str(tmp_path / "job.toml"), *ON, "--gpus", "1", "--dry-run"]
    for image in ("host:5000/team/hotloop:1.0-CUDA", "hotloop@sha256:" + 64 * "a"):
        assert hotloop(*options, "--set", f"launch.image={image}").code == 0
    done = hotloop(*options, "--set", "launch.image=bad image!!")
    assert (done.code, "names no image" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ((), ["configmaps", "serviceaccounts", "jobs"]),
        (("--nodes", "2"), ["configmaps", "serviceaccounts", "jobsets"]),
        (
            ("--nodes", "2", "--set", "launch.kubernetes.kind=trainjob"),
            ["configmaps", "serviceaccounts", "trainjobs", "trainingruntimes"],
        ),
    ],
)
def test_what_is_sent_was_checked_first_and_goes_as_one(
    hotloop: Command, cluster: Cluster, tmp_path: Path, options: tuple[str, ...], kinds: list[str]
) -> None:
    launch = launched(hotloop, *options)
    assert made(cluster) == kinds
    sent = [one for one in cluster.requests if one.startswith("POST") and "reviews" not in one]
    dry = [one for one in sent if one.endswith("dry")]
    assert sent[: len(dry)] == dry
    assert len(dry) == len([kind for kind in kinds if kind != "trainjobs"])
    assert launch["id"] == f"default/{kinds[2].removesuffix('s')}/line"
    assert (tmp_path / "runs/.launch/line/manifest.yaml").exists()
    hotloop("launch", "cancel", "line", expect=0)
    cluster.collect()
    assert made(cluster) == []
    assert state(hotloop) == ("cancelled", "")


@pytest.mark.slow
def test_a_training_from_its_place_in_the_queue_to_its_end(hotloop: Command, cluster: Cluster) -> None:
    launch = launched(hotloop, "--nodes", "2", "--set", "launch.kubernetes.queue=gpus")
    assert cluster.objects["jobsets", "default", "line"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    jobset = cluster.objects["jobsets", "default", "line"]
    jobset["spec"]["suspend"] = True
    assert state(hotloop) == ("waiting", "in Kueue's queue gpus")
    jobset["spec"]["suspend"] = False
    jobset["status"] = {"restarts": 0}
    cluster.make(
        "events", "line-node-0.1", reason="FailedCreate", involvedObject={"name": "line-node-0"},
        message='Error creating: pods "line-node-0-0-x" is forbidden: exceeded quota: gpus, requested: '
        "requests.nvidia.com/gpu=4, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
    )  # fmt: skip
    assert "exceeded quota: gpus" in state(hotloop)[1]
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                     "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}  # fmt: skip
    second = cluster.pod("line", "Pending", 1, conditions=[unschedulable])
    waiting = {
        "name": "node",
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}},
    }
    first = cluster.pod("line", "Pending", 0, containerStatuses=[waiting])
    assert state(hotloop) == ("waiting", "ImagePullBackOff: Back-off pulling image")
    cluster.objects["pods", "default", first]["status"] = {"phase": "Running"}
    found = stand(hotloop)
    assert (found["state"], found["hosts"], found["starts"]) == ("running", "machine-0", 1)
    assert found["reason"].startswith("1 machine of 2 to come: Unschedulable: 0/2 nodes are available")
    cluster.objects["pods", "default", second]["status"] = {"phase": "Running"}
    jobset["status"]["restarts"] = 1
    found = stand(hotloop, launch["id"])
    assert (found["state"], found["hosts"], found["starts"], found["reason"]) == (
        "running", "machine-0,machine-1", 2, "",
    )  # fmt: skip
    cluster.condition("jobsets", "line", "Completed")
    assert state(hotloop) == ("finished", "")
    assert "line has ended already: finished" not in hotloop("launch", "logs", "line", expect=0).out
    assert "has ended already" in hotloop("launch", "cancel", "line", expect=0).out
    assert cluster.deletions == []


@pytest.mark.parametrize(
    ("ended", "condition", "said"),
    [
        (
            {"exitCode": 2, "message": "a\nerror: no job file x\ncause: y\n"},
            {"reason": "PodFailurePolicy"},
            "no job file x",
        ),
        (
            {"exitCode": 137, "reason": "OOMKilled"},
            {"reason": "BackoffLimitExceeded"},
            "out of memory; raise launch.memory_gib",
        ),
        (
            {"exitCode": 75},
            {"reason": "DeadlineExceeded"},
            "it met launch.kubernetes.deadline; what it had saved is there",
        ),
        (
            {"exitCode": 1, "message": "Killed"},
            {"reason": "BackoffLimitExceeded", "message": "Job has reached the limit"},
            "BackoffLimitExceeded: Job has reached the limit",
        ),
    ],
)
def test_what_has_failed_says_why(
    hotloop: Command, cluster: Cluster, ended: dict[str, Any], condition: dict[str, str], said: str
) -> None:
    launched(hotloop)
    cluster.pod("line", "Failed", containerStatuses=[{"name": "node", "state": {"terminated": ended}}])
    cluster.condition("jobs", "line", "Failed", **condition)
    assert state(hotloop) == ("failed", said)
    del cluster.objects["jobs", "default", "line"]
    assert state(hotloop) == ("lost", "the cluster has no job line in namespace default")


def test_logs_of_several_machines_are_told_apart_and_come_whole_whatever_breaks(
    hotloop: Command, cluster: Cluster
) -> None:
    """A pod that has not begun, connections that end early, a restart, a training that goes on meanwhile."""
    launched(hotloop, "--nodes", "2")
    first, second = cluster.pod("line", "Running", 0), cluster.pod("line", "Running", 1)
    cluster.pod("line", "Pending", 0, number=1)
    cluster.write(first, "one", "two", "three")
    cluster.write(second, "one", "zwölf", ended=True)
    assert hotloop("launch", "logs", "line", expect=0).out == "0: one\n0: two\n0: three\n1: one\n1: zwölf\n"
    cluster.logs[first].cut_after = 2
    with subprocess.Popen(
        [sys.executable, "-m", "hotloop", "launch", "logs", "line", "--follow"], stdout=subprocess.PIPE, text=True,
        cwd=Path(os.environ["KUBECONFIG"]).parent, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as child:  # fmt: skip
        assert child.stdout
        seen = sorted(child.stdout.readline() for _ in range(5))
        assert seen == ["0: one\n", "0: three\n", "0: two\n", "1: one\n", "1: zwölf\n"]
        cluster.write(first, "four")
        assert child.stdout.readline() == "0: four\n"
        cluster.write(first, "five", ended=True)
        for pod in (first, second):
            cluster.objects["pods", "default", pod]["status"]["phase"] = "Failed"
        later = cluster.pod("line", "Running", 0, number=2)
        cluster.write(later, "six", ended=True)
        cluster.objects["pods", "default", later]["status"]["phase"] = "Succeeded"
        cluster.condition("jobsets", "line", "Completed")
        assert sorted(child.stdout) == ["0: five\n", "0: six\n"]
    assert child.returncode == 0


def test_watching_shows_the_log_and_exits_as_it_ends(hotloop: Command, cluster: Cluster) -> None:
    launched(hotloop)
    pod = cluster.pod("line", "Succeeded")
    cluster.write(pod, "finished after 300 steps", ended=True)
    cluster.condition("jobs", "line", "Complete")
    assert hotloop("launch", "logs", "line", "--follow", expect=0).out == "finished after 300 steps\n"
    (Path(os.environ["KUBECONFIG"]).parent / "runs/.launch/line/launch.json").unlink()
    cluster.collect()
    for kind in ("jobs", "configmaps", "serviceaccounts"):
        for name in cluster.names(kind):
            del cluster.objects[kind, "default", name]
    with subprocess.Popen(
        [sys.executable, "-m", "hotloop", "launch", "job.toml", *ON, "--watch"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=Path(os.environ["KUBECONFIG"]).parent,
    ) as child:  # fmt: skip
        assert child.stderr
        read_until(child, "hotloop: ")
        name = cluster.names("jobs")[0]
        cluster.condition("jobs", name, "Failed", reason="BackoffLimitExceeded")
        _, err = child.communicate(timeout=60)
    assert "hotloop: failed (BackoffLimitExceeded)" in err
    assert child.returncode == 1


@pytest.mark.slow
def test_what_is_cancelled_has_its_grace_and_keeps_its_log(hotloop: Command, cluster: Cluster) -> None:
    launched(hotloop)
    cluster.write(cluster.pod("line", "Running"), "step 10")
    done = hotloop("launch", "job.toml", *ON, expect=2)
    assert "runs/line is in use" in done.err
    assert "line is to stop" in hotloop("launch", "cancel", "line", expect=0).out
    assert [(one["plural"], one["propagationPolicy"]) for one in cluster.deletions] == [("jobs", "Foreground")]
    assert "gracePeriodSeconds" not in cluster.deletions[0], "that of the pods is theirs to save in"
    assert state(hotloop) == ("running", "it is to save and stop")
    cluster.collect()
    assert state(hotloop) == ("cancelled", "")
    assert hotloop("launch", "logs", "line", expect=0).out == "step 10\n"


def said(done: Finished) -> list[str]:
    """The three lines."""
    lines = done.err.strip().splitlines()[-3:]
    assert [line.partition(":")[0] for line in lines] == ["error", "cause", "fix"], done.err
    return lines


@pytest.mark.parametrize(
    ("arrange", "options", "what", "fix"),
    [
        (lambda it: None, ["--gpus", "9"], "9 GPUs of a machine are asked for; the largest has 8", "--gpus 8"),
        (
            lambda it: None,
            ["--set", "launch.kubernetes.namespace=nowhere"],
            "there is no namespace nowhere",
            "namespace=NAME",
        ),
        (
            lambda it: None,
            ["--set", "launch.kubernetes.context=other"],
            'context = "other" does not exist',
            "context=test",
        ),
        (
            lambda it: None,
            ["--set", 'launch.kubernetes.claims={ images = "/data" }'],
            "there is no claim images",
            "claims.training",
        ),
        (lambda it: None, ["--set", "launch.image="], "there is no launch.image", "hotloop image"),
        (lambda it: None, ["--set", "launch.image=Team/Hot loop"], "names no image", "launch.image=registry.example"),
        (
            lambda it: None,
            ["--set", "launch.kubernetes.claims={}"],
            "there are no launch.kubernetes.claims",
            "claims.CLAIM",
        ),
        (lambda it: None, ["--set", "launch.kubernetes.queue=night"], 'queue = "night" does not exist', "queue=gpus"),
        (
            lambda it: None,
            ["--set", "launch.environment.HF_TOKEN=a"],
            "launch.environment.HF_TOKEN looks like a secret",
            "launch.kubernetes.secrets",
        ),
        (lambda it: it.installed.clear(), ["--nodes", "2"], "the cluster has no JobSet", "jobset/releases/download"),
        (
            lambda it: it.installed.clear(),
            ["--set", "launch.kubernetes.queue=gpus"],
            "the cluster has no Kueue",
            "kueue",
        ),
        (
            lambda it: it.installed.remove("trainer.kubeflow.org/v1alpha1"),
            ["--set", "launch.kubernetes.kind=trainjob"],
            "the cluster has no Kubeflow Trainer",
            "helm install",
        ),
        (
            lambda it: it.denied.add(("create", "jobs")),
            [],
            "you may not create jobs in namespace default",
            "auth can-i",
        ),
        (lambda it: it.denied.add(("patch", "configmaps")), [], "you may not patch configmaps in", "auth can-i"),
        (lambda it: it.denied.add(("list", "pods")), [], "you may not list pods in namespace default", "auth can-i"),
        (
            lambda it: it.make("resourcequotas", "gpus", spec={"hard": {"requests.nvidia.com/gpu": "4"}}),
            ["--nodes", "2"],
            "8 GPUs are asked for; the quota of namespace default is 4",
            "fewer --gpus",
        ),
        (
            lambda it: it.objects["persistentvolumeclaims", "default", "training"]["spec"].update(ONE_MACHINE),
            ["--nodes", "2"],
            "2 machines cannot mount claim training",
            "ReadWriteMany",
        ),
    ],
)
def test_what_can_be_known_is_said_before_anything_is_sent(
    hotloop: Command, cluster: Cluster, tmp_path: Path, arrange: Callable[[Cluster], object], options: list[str],
    what: str, fix: str,
) -> None:  # fmt: skip
    arrange(cluster)
    lines = said(hotloop("launch", "job.toml", *ON, *options, expect=2))
    assert what in lines[0]
    assert fix in lines[2]
    assert [one for one in cluster.requests if one.startswith("POST") and "reviews" not in one] == []
    assert not list(tmp_path.glob("runs/.launch/*/"))


@pytest.mark.parametrize(
    ("arrange", "code", "what", "cause"),
    [
        (
            lambda it: it.quota.update(jobs=USED_UP),
            2,
            "the quota of namespace default does not allow it",
            "exceeded quota: compute",
        ),
        (
            lambda it: it.denied.add(("create", "serviceaccounts")) or it.denied.add(("get", "namespaces")),
            2,
            "you may not create serviceaccounts",
            "no RBAC policy matched",
        ),
        (
            lambda it: it.make("serviceaccounts", "line"),
            2,
            "the name line is taken in namespace default",
            "already exists",
        ),
        (
            lambda it: it.unknown.update(jobs="spec.podReplacementPolicy"),
            2,
            "the cluster does not know a field of jobs",
            'strict decoding error: unknown field "spec.podReplacementPolicy"',
        ),
        (lambda it: it.broken.add("jobs"), 1, "the cluster answers with 500", "etcdserver: request timed out"),
    ],
)
def test_what_the_cluster_refuses_leaves_nothing(
    hotloop: Command, cluster: Cluster, tmp_path: Path, arrange: Callable[[Cluster], object], code: int, what: str,
    cause: str,
) -> None:  # fmt: skip
    arrange(cluster)
    before = made(cluster)
    lines = said(hotloop("launch", "job.toml", *ON, expect=code))
    assert what in lines[0]
    assert cause in lines[1]
    assert made(cluster) == before
    assert not list(tmp_path.glob("runs/.launch/*/"))


def test_a_jobset_that_is_too_old_is_said(hotloop: Command, cluster: Cluster) -> None:
    cluster.unknown["jobsets"] = "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"
    lines = said(hotloop("launch", "job.toml", *ON, "--nodes", "2", expect=2))
    assert "the cluster's JobSet is too old" in lines[0]
    assert "jobset/releases/download" in lines[2]
    assert made(cluster) == []


def test_no_context_no_client_no_cluster_no_login(
    hotloop: Command, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", cluster, token="old")
    assert "the cluster does not accept your login" in said(hotloop("launch", "job.toml", *ON, expect=2))[0]
    nobody = Cluster(port=free_port())
    write_kubeconfig(tmp_path / "kubeconfig", nobody)
    lines = said(hotloop("launch", "job.toml", *ON, expect=1))
    assert f"the cluster at http://127.0.0.1:{nobody.port} does not answer" in lines[0]
    assert "kubectl cluster-info" in lines[2]
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    lines = said(hotloop("launch", "job.toml", *ON, expect=2))
    assert "no Kubernetes cluster is configured here" in lines[0]
    assert "install kubectl" in lines[2]
    code = "import sys; sys.modules['kubernetes'] = None; from hotloop.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", "job.toml", *ON], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert 'pip install "hotloop[kubernetes]"' in done.stderr


def test_a_sweep_is_a_job_for_each_run_or_none(hotloop: Command, cluster: Cluster) -> None:
    cluster.make("jobs", "line-1")
    sweep = ["--sweep", "seed=[3, 4]"]
    lines = said(hotloop("launch", "job.toml", *ON, *sweep, expect=2))
    assert "the name line-1 is taken" in lines[0]
    assert (cluster.names("jobs"), cluster.names("configmaps")) == (["line-1"], [])
    del cluster.objects["jobs", "default", "line-1"]
    found = launched(hotloop, *sweep)["launches"]
    assert [one["id"] for one in found] == ["default/job/line-0", "default/job/line-1"]
    texts = [cluster.objects["configmaps", "default", name]["data"]["job.toml"] for name in ("line-0", "line-1")]
    assert ["seed = 3" in texts[0], "seed = 4" in texts[1]] == [True, True]


def test_a_launch_is_found_where_it_was_sent_whatever_the_context_is_now(
    hotloop: Command, cluster: Cluster, tmp_path: Path
) -> None:
    launched(hotloop, "--set", "launch.kubernetes.namespace=team")
    configuration = json.loads((tmp_path / "kubeconfig").read_text())
    configuration["contexts"].append({"name": "other", "context": {"cluster": "gone", "user": "ada"}})
    configuration["clusters"].append({"name": "gone", "cluster": {"server": "http://127.0.0.1:1"}})
    (tmp_path / "kubeconfig").write_text(json.dumps({**configuration, "current-context": "other"}))
    assert state(hotloop) == ("waiting", "")
    assert stand(hotloop)["id"] == "team/job/line"
