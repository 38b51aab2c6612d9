"""What is sent to Kubernetes: taken by every version's schema, by JobSet's and Kubeflow's, whatever a job asks for."""

import re
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kube_schemas import VERSIONS, problems

from hotloop.core.errors import InputError
from hotloop.core.job_file import parse_job
from hotloop.launch.kubernetes.engine import Kubernetes
from hotloop.launch.kubernetes.manifests import manifests
from hotloop.launch.kubernetes.names import Place, object_name
from hotloop.launch.kubernetes.text import to_yaml
from hotloop.launch.request import Request, make_request

A_POD = "team/line-node-0-1-z"
A_CONTAINER = f"Container node for pod {A_POD}"
BASIC = {"data": {"train": "images", "batch_size": 4096}, "model": {"name": "resnet18"}}


def request_of(
    launch: dict[str, Any] | None = None, nodes: int = 1, gpus: int = 0, name: str = "line", **job: Any
) -> Request:  # fmt: skip
    """A launch from a folder of somebody's laptop."""
    kubernetes = {"claims": {"training": "/data"}, **(launch or {}).pop("kubernetes", {})}
    whole = {**BASIC, "launch": {"image": "registry.example/hotloop:1", **(launch or {}), "kubernetes": kubernetes}}
    run = {"run": {"dir": f"runs/{name}"}}
    parsed = parse_job({**whole, **run, **job}, "job.toml")
    return make_request(parsed, nodes, gpus, lambda: 0, Path("/home/ada/project"), datetime(2026, 1, 1))


def by_kind(request: Request) -> dict[str, Any]:
    return {one["kind"]: one for one in manifests(request)}


def child_job(jobset_spec: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = jobset_spec["replicatedJobs"][0]["template"]["spec"]
    return spec


def pod(request: Request) -> dict[str, Any]:
    main = manifests(request)[-1]
    if main["kind"] == "TrainJob":
        main = manifests(request)[-2]["spec"]["template"]
    spec = main["spec"] if main.get("kind") == "Job" else child_job(main["spec"])
    return spec["template"]["spec"]  # type: ignore[no-any-return]


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
LABEL_KEYS = st.from_regex(r"([a-z0-9]{1,9}\.example/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?", fullmatch=True)
LABELS = st.from_regex(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?)?", fullmatch=True)
VARIABLES = st.from_regex(r"X_[A-Z0-9_]{1,9}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)
TAINTS = st.builds(
    lambda key, value, effect: key + value + effect, LABEL_KEYS, st.one_of(st.just(""), LABELS.map("={}".format)),
    st.sampled_from(["", ":NoSchedule", ":PreferNoSchedule", ":NoExecute"]),
)  # fmt: skip
TIMES = st.one_of(st.integers(1, 10**6), st.sampled_from([0.25, 1.5])).map("{} s".format)
CLAIMS = st.lists(NAMES, min_size=1, max_size=3, unique=True).map(
    lambda names: {name: f"/mnt/{name}" for name in names}
)
RESOURCES = st.dictionaries(NAMES.map("rdma.example/{}".format), st.integers(1, 10**6), max_size=2)
SECRETS = st.dictionaries(
    VARIABLES, st.builds("{}/{}".format, NAMES, st.sampled_from(["token", "a_B.c"])), max_size=3
)  # fmt: skip
SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "namespace": NAMES, "claims": CLAIMS, "service_account": NAMES, "queue": NAMES, "shm_gib": st.integers(1, 500),
        "priority": NAMES, "pull_secret": NAMES, "node_selector": st.dictionaries(LABEL_KEYS, LABELS, max_size=3),
        "tolerations": st.lists(TAINTS, max_size=3), "resources": RESOURCES, "secrets": SECRETS, "grace": TIMES,
        "deadline": TIMES, "user": st.integers(1, 2**31 - 1),
    },
)  # fmt: skip


@settings(max_examples=150)
@given(
    section=SECTIONS, nodes=st.integers(1, 64), gpus=st.integers(0, 16),
    several=st.sampled_from(["jobset", "trainjob"]), one=st.sampled_from(["auto", "jobset", "trainjob"]),
    memory=st.one_of(st.just("auto"), st.integers(501, 4000)),
    cpus=st.one_of(st.just("auto"), st.integers(1, 512)), environment=st.dictionaries(VARIABLES, TEXTS, max_size=3),
    setup=st.lists(TEXTS, max_size=2), restarts=st.integers(0, 50), version=st.sampled_from(VERSIONS),
    name=st.from_regex(r"[\w.-]{1,90}", fullmatch=True).filter(lambda text: text.strip(".")),
)  # fmt: skip
def test_whatever_a_job_asks_for_every_version_takes_it(
    section: dict[str, Any], nodes: int, gpus: int, several: str, one: str, memory: Any, cpus: Any,
    environment: dict[str, str], setup: list[str], restarts: int, version: str, name: str,
) -> None:  # fmt: skip
    kubernetes = {**section, "kind": one if nodes == 1 else several}
    launch = {"kubernetes": kubernetes, "memory_gib": memory, "cpus": cpus, "environment": environment, "setup": setup}
    run = f"{next(iter(section['claims'].values()))}/{name}" if "claims" in section else f"runs/{name}"
    kubernetes.setdefault("claims", {"training": "/data"})
    request = request_of(launch, nodes, gpus, run={"dir": run}, ranks={"processes": 1, "restarts": restarts})
    sent = manifests(request)
    assert pod(request)["terminationGracePeriodSeconds"] > 0
    for manifest in sent:
        assert problems(manifest, version) == [], manifest
    assert list(yaml.safe_load_all(to_yaml(sent))) == sent


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("nodes", "kind"), [(1, "auto"), (4, "auto"), (4, "trainjob")])
def test_every_version_takes_every_kind(version: str, nodes: int, kind: str) -> None:
    request = request_of({"kubernetes": {"kind": kind}, "memory_gib": 64, "cpus": 8}, nodes, 8)
    assert [problems(one, version) for one in manifests(request)] == [[]] * (4 if kind == "trainjob" else 3)


def test_the_schemas_would_tell() -> None:
    """As they do of what is wrong at any depth."""
    job, jobset = by_kind(request_of())["Job"], by_kind(request_of(nodes=2))["JobSet"]
    runtime = by_kind(request_of({"kubernetes": {"kind": "trainjob"}}, 2))["TrainingRuntime"]
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    assert any("nvidia.com/gpu" in one for one in problems(job))
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "Again"
    child_job(jobset["spec"])["template"]["spec"]["grace"] = 1
    found = problems(jobset)
    assert any("'Again' is not one of" in one for one in found)
    assert any("'grace' was unexpected" in one for one in found)
    runtime["spec"]["template"]["spec"]["restarts"] = 1
    assert any("'restarts' was unexpected" in one for one in problems(runtime))


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_models_of_jobset_and_kubeflow_drop_nothing(kind: str) -> None:
    from kubeflow_trainer_api import models

    launch = {"kubernetes": {"kind": kind, "queue": "gpus", "deadline": "2 h", "secrets": {"A": "b/c"}}}
    made = by_kind(request_of({**launch, "memory_gib": 64}, 4, 8))
    checked = {"TrainJob": models.TrainerV1alpha1TrainJob, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}
    for name, model in checked.items() if kind == "trainjob" else ():
        assert without_nothing(model.from_dict(made[name]).to_dict()) == made[name]
    spec = made["JobSet"]["spec"] if kind == "jobset" else made["TrainingRuntime"]["spec"]["template"]["spec"]
    assert without_nothing(models.JobsetV1alpha2JobSetSpec.from_dict(spec).to_dict()) == spec


def without_nothing(value: Any) -> Any:
    """What a model has added of itself, left out."""
    if isinstance(value, dict):
        return {key: without_nothing(inner) for key, inner in value.items() if inner is not None}
    return [without_nothing(inner) for inner in value] if isinstance(value, list) else value


def test_exit_codes_say_what_happens_next() -> None:
    rules = by_kind(request_of())["Job"]["spec"]["podFailurePolicy"]["rules"]
    actions = {one["onExitCodes"]["values"][0]: one["action"] for one in rules if "onExitCodes" in one}
    assert actions == {2: "FailJob", 75: "Ignore"}
    assert rules[-1] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.parametrize(
    ("reason", "message", "action"),
    [
        ("PodFailurePolicy", f"{A_CONTAINER} failed with exit code 75 matching FailJob rule at index 1",
         "RestartJobSetAndIgnoreMaxRestarts"),
        ("PodFailurePolicy", f"Pod {A_POD} has condition DisruptionTarget matching FailJob rule at index 0",
         "RestartJobSetAndIgnoreMaxRestarts"),
        ("PodFailurePolicy", f"{A_CONTAINER} failed with exit code 2 matching FailJob rule at index 2",
         "FailJobSet"),
        ("DeadlineExceeded", "Job was active longer than specified deadline", "FailJobSet"),
        ("BackoffLimitExceeded", "Job has reached the specified backoff limit", "RestartJobSet"),
    ],
)  # fmt: skip
def test_a_jobset_tells_failures_apart_by_what_the_job_controller_writes(
    reason: str, message: str, action: str
) -> None:  # fmt: skip
    """Messages of pod_failure_policy.go and job_controller.go, read as JobSet's controller reads them."""
    policy = by_kind(request_of(nodes=2, ranks={"processes": 1, "restarts": 5}))["JobSet"]["spec"]["failurePolicy"]
    matching = [
        rule["action"] for rule in policy["rules"]
        if reason in rule["onJobFailureReasons"]
        and any(re.search(one, message) for one in rule.get("onJobFailureMessagePatterns", [""]))
    ]  # fmt: skip
    assert [*matching, "RestartJobSet"][0] == action
    assert policy["maxRestarts"] == 5


def test_several_machines_meet_at_the_first() -> None:
    made = by_kind(request_of(nodes=3, gpus=8))["JobSet"]
    container = child_job(made["spec"])["template"]["spec"]["containers"][0]
    assert container["command"][:3] == ["hotloop", "train", "/etc/hotloop/job.toml"]
    assert "line-node-0-0.line:29500" in container["command"]
    assert container["command"][-2:] == ["--rdzv-id", "line-$(HOTLOOP_RESTART)"]
    field = next(one for one in container["env"] if one["name"] == "HOTLOOP_RESTART")["valueFrom"]["fieldRef"]
    assert field["fieldPath"] == "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert made["spec"]["network"]["subdomain"] == made["metadata"]["name"] == "line"
    runtime = by_kind(request_of({"kubernetes": {"kind": "trainjob"}}, 3, 8))["TrainingRuntime"]["spec"]
    assert (
        child_job(runtime["template"]["spec"])["template"]["spec"]["containers"][0]["command"] == container["command"]
    )


def test_a_pod_may_do_nothing_but_train() -> None:
    spec = pod(request_of(gpus=4))
    container = spec["containers"][0]
    assert (spec["automountServiceAccountToken"], spec["serviceAccountName"]) == (False, "line")
    assert by_kind(request_of())["ServiceAccount"]["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    assert writable == {"/tmp", "/home/hotloop", "/dev/shm", "/data"}
    assert container["resources"] == {name: {"nvidia.com/gpu": "4"} for name in ("requests", "limits")}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert spec["terminationGracePeriodSeconds"] == 120


def test_paths_are_those_of_the_container() -> None:
    made = by_kind(request_of())
    kept = tomllib.loads(made["ConfigMap"]["data"]["job.toml"])
    assert kept["run"]["dir"] == "/data/runs/line", "not /home/ada/project/runs/line"
    assert kept["data"]["train"] == "images"
    assert pod(request_of())["containers"][0]["workingDir"] == "/data"
    elsewhere = request_of({"kubernetes": {"directory": "/data/project"}})
    assert tomllib.loads(by_kind(elsewhere)["ConfigMap"]["data"]["job.toml"])["run"]["dir"] == "/data/project/runs/line"


def test_starts_are_counted_where_the_next_one_finds_it() -> None:
    def counted(request: Request) -> list[str]:
        return [one["value"] for one in pod(request)["containers"][0]["env"] if one["name"] == "HOTLOOP_STARTS"]

    assert counted(request_of()) == ["/data/runs/.launch/line/starts.json"]
    assert counted(request_of(nodes=2)) == ["/data/runs/.launch/line/starts.json"]
    without_claim = make_request(
        parse_job({**BASIC, "run": {"dir": "runs/line"}}, "job.toml"), 1, 0, lambda: 0, Path("/home/ada/project"),
        datetime(2026, 1, 1),
    )  # fmt: skip
    assert counted(without_claim) == [], "an empty folder goes with the pod"


def test_secrets_are_named_and_never_written() -> None:
    launch = {"kubernetes": {"secrets": {"HF_TOKEN": "hugging-face/token"}}, "environment": {"PRICE": "$(HOME) $$"}}
    variables = {one["name"]: one for one in pod(request_of(launch))["containers"][0]["env"]}
    assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    assert variables["PRICE"]["value"] == "$$(HOME) $$$$", "Kubernetes would put a folder in its place"


@given(st.from_regex(r"[\w.-]{1,100}", fullmatch=True))
@example("x" * 100)
@example("x" * 46)
@example("-" * 60)
def test_names_become_names_that_pods_and_services_may_have(text: str) -> None:
    name = object_name(text)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-9999-abcde") <= 63
    assert object_name(name) == name
    assert Place.parse(str(Place("team", "jobset", name))) == Place("team", "jobset", name)


def test_names_that_differ_stay_different() -> None:
    names = ["a_b", "a-b", "a.b", "A-b", "x" * 60, "x" * 61, "ä", "ö", "1"]
    assert len({object_name(name) for name in names}) == len(names)
    assert object_name("digits-20260101-120000") == "digits-20260101-120000"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"namespace": "My_Team"}, "'My_Team' is no namespace: small letters, digits"),
        ({"claims": {"Training": "/data"}}, "'Training' is no name that Kubernetes takes"),
        ({"queue": "a b"}, "'a b' is no name that Kubernetes takes"),
        ({"secrets": {"HF_TOKEN": "hugging-face"}}, "'hugging-face' is no SECRET/KEY"),
        ({"tolerations": ["a=b:Never"]}, "'a=b:Never' is no taint: KEY"),
        ({"node_selector": {"gpu type": "a"}}, "'gpu type' is no label that Kubernetes takes"),
        ({"grace": "1 epoch"}, '1 epoch is no time; write "90 s"'),
        ({"user": 0}, "greater than 0"),
        ({"user": 2**31}, "less than 2147483648"),
        ({"resources": {"efa": 4}}, "'efa' is no resource of a device: VENDOR/NAME"),
        ({"kind": "pod"}, "'job', 'jobset'"),
        ({"claims": {"training": "data"}}, 'claims.training = "data" is no place in a container'),
        ({"claims": {"training": "/data/../etc"}}, "is no place in a container"),
        ({"claims": {"training": "/dev/shm"}}, 'claims.training = "/dev/shm" is in use'),
        ({"claims": {"a": "/data", "b": "/data"}}, 'claims.b = "/data" is the place of launch.kubernetes.claims.a'),
        ({"directory": "/code"}, "the run's directory /code/runs/line lies on no claim"),
        ({"kind": "job", "nodes": 2}, 'launch.kubernetes.kind = "job" for 2 machines'),
        ({"shm_gib": 64, "memory_gib": 64}, "launch.kubernetes.shm_gib = 64 is no less than launch.memory_gib = 64"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_with_what_to_change(section: dict[str, Any], said: str) -> None:
    nodes, memory = section.pop("nodes", 1), section.pop("memory_gib", "auto")
    claims = {} if "claims" in section else {"claims": {"training": "/data"}}
    with pytest.raises(InputError) as error:
        manifests(request_of({"kubernetes": {**claims, **section}, "memory_gib": memory}, nodes))
    assert said in str(error.value)
    assert error.value.fix


def test_a_dry_run_says_what_stands_in_for_what_is_missing() -> None:
    job = parse_job({**BASIC, "checkpoint": {"copy_to": "s3://bucket/runs"}}, "job.toml")
    both = make_request(parse_job(BASIC, "job.toml"), 1, 0, lambda: 0, Path("/home/ada"), datetime(2026, 1, 1))
    copied = make_request(job, 1, 0, lambda: 0, Path("/home/ada"), datetime(2026, 1, 1))
    several = make_request(job, 2, 0, lambda: 0, Path("/home/ada"), datetime(2026, 1, 1))
    ids = [[one.id for one in Kubernetes().documents([request])[0].findings] for request in (both, copied, several)]
    assert ids == [["no-image", "run-not-kept"], ["no-image"], ["no-image", "run-not-kept"]]
    outside = request_of(data={**BASIC["data"], "train": "/home/ada/images"})
    assert [one.id for one in Kubernetes().documents([outside])[0].findings] == ["data-outside"]
