"""The documentation builds without a warning, its examples run, its tables are what was measured."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command
from kube_schemas import problems

REPOSITORY = Path(__file__).parents[2]


def call(*command: str, cwd: Path = REPOSITORY) -> str:
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    call(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    job = (tmp_path / "reference/job/index.html").read_text()
    assert "learning_rate" in job
    assert "--resume" in (tmp_path / "reference/cli/index.html").read_text()
    assert "state_dict" in (tmp_path / "reference/library/index.html").read_text()
    assert "--shm-size" in (tmp_path / "causes/dataloader-shm/index.html").read_text()
    assert "fuser -v" in (tmp_path / "findings/gpu-memory-held/index.html").read_text()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    assert "1,797 images" in call(sys.executable, "examples/digits/make_images.py", str(folder))
    return folder


def test_the_digits_are_split_as_the_tutorial_says(images: Path) -> None:
    counts = {split: len(list((images / split).glob("*/*.jpg"))) for split in ("train", "val")}
    assert counts == {"train": 1442, "val": 355}
    assert {len(list((images / "val" / str(digit)).iterdir())) for digit in range(10)} <= {34, 35, 36}


@pytest.mark.slow
def test_the_line_learns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = call(
        sys.executable,
        "-m",
        "hotloop",
        "train",
        "job.toml",
        "--set",
        f"run.dir={run}",
        cwd=REPOSITORY / "examples/line",
    )
    assert "val_largest_error" in out


@pytest.mark.slow
def test_the_text_example_learns(tmp_path: Path) -> None:
    folder = REPOSITORY / "examples/text"
    assert "tokens to train on" in call(sys.executable, str(folder / "make_tokens.py"), str(tmp_path / "tokens"))
    data = [f"data.{split}={tmp_path}/tokens/{split}.npy" for split in ("train", "val")]
    short = ["model.arguments={layers=1,width=32,heads=2,kv_heads=2,hidden=64}", "data.batch_size=256", *data]
    options = [part for value in [*short, f"run.dir={tmp_path}/run"] for part in ("--set", value)]
    out = call(sys.executable, "-m", "hotloop", "train", str(folder / "job.toml"), *options)
    assert float(re.findall(r"val_bits_per_token ([\d.]+)", out)[0]) < 6


@pytest.mark.slow
def test_a_model_of_ones_own_is_divided_as_the_page_says(images: Path, tmp_path: Path, hotloop: Command) -> None:
    page = (REPOSITORY / "docs/several-gpus.md").read_text()
    model, command = re.findall(r"```python\n(.*?)```\n+```console\n\$ hotloop (.*?)\n", page, re.DOTALL)[0]
    (tmp_path / "mlp.py").write_text(model)
    job, *options = command.replace("examples/", f"{REPOSITORY}/examples/").split()[1:]
    settings = ["train.epochs=1", "log.report=false", f"data.train={images}/train", f"data.val={images}/val"]
    options += [part for setting in settings for part in ("--set", setting)]
    results = []
    for more in (["--set", "run.dir=two"], ["--set", "run.dir=one", "--set", "parallel=none"]):
        results.append(json.loads(hotloop("train", job, *options, *more, "--json", expect=0).out)["metrics"])
    assert results[0] == pytest.approx(results[1], rel=1e-3)
    assert list((tmp_path / "two").rglob("part-*-of-00002.safetensors")), "each has its part of a layer"


@pytest.mark.slow
def test_the_own_loop_learns_and_continues(images: Path, tmp_path: Path) -> None:
    out = call(sys.executable, "examples/own_loop.py", str(images), str(tmp_path / "checkpoints"))
    shares = [float(share) for share in re.findall(r"epoch \d: ([\d.]+) of 355", out)]
    assert len(shares) == 6
    assert shares[-1] > 0.95
    again = call(sys.executable, "examples/own_loop.py", str(images), str(tmp_path / "checkpoints"))
    assert again == "", "all epochs were done"


def test_a_loop_over_any_loader_learns() -> None:
    assert float(call(sys.executable, "examples/any_loader.py").split()[1]) < 0.3


def test_the_slow_script_is_profiled_as_the_page_says(tmp_path: Path) -> None:
    script = str(REPOSITORY / "examples/slow_loading.py")
    out = call(sys.executable, "-m", "hotloop", "profile", "--steps", "20", "--", sys.executable, script, cwd=tmp_path)
    page = (REPOSITORY / "docs/profile.md").read_text()
    line = re.findall(r"at examples/slow_loading.py:(\d+)", page)[0]
    fix = re.findall(r"fix: num_workers=\d+(.*)", page)[0]
    # How many depends on how long a step computes, which is longer on a busy machine.
    assert re.search(rf"fix: num_workers=\d+{re.escape(fix)}\n", out)
    for expected in ("input-bound: ", f"at {script}:{line}", "cached batch"):
        assert expected in out
    profile = str(tmp_path / "profiles/slow_loading-1/profile.json")
    compared = call(sys.executable, "-m", "hotloop", "profile", "compare", profile, profile)
    assert re.search(r"step_seconds +\S+ ms +\S+ ms +1.00x", compared)


@pytest.mark.slow
def test_the_slow_script_runs_faster_as_the_page_says(tmp_path: Path) -> None:
    script = str(REPOSITORY / "examples/slow_loading.py")
    options = ["--steps", "20", "--only", "loader", "--json-summary", str(tmp_path / "summary.json")]
    out = call(sys.executable, "-m", "hotloop", "run", *options, "--", sys.executable, script, cwd=tmp_path)
    assert len(re.findall(r"^epoch \d+: [\d.]+$", out, re.MULTILINE)) == 20, "what the script prints, and nothing else"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accelerations"][0]["state"] == "on"
    assert summary["ratio"] > 1.5


def test_which_torch_is_answered_as_the_page_says() -> None:
    page = (REPOSITORY / "docs/resolve.md").read_text()
    examples = re.findall(r"```console\n\$ hotloop (resolve .*)\n((?:.*\n)*?)```", page)
    assert len(examples) == 2
    for command, expected in examples:
        done = subprocess.run(
            [sys.executable, "-m", "hotloop", *command.split()], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == expected


def test_an_image_is_rendered_and_checked_as_the_page_says(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/image.md").read_text()
    examples = re.findall(r"```console\n\$ hotloop (image .*)\n((?:.*\n)*?)```", page)
    assert [command.split()[1] for command, _ in examples] == ["render", "build", "run", "check"]
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for command, expected in examples:
        done = subprocess.run(
            [sys.executable, "-m", "hotloop", *command.split()],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (int("check" in command), expected)


@pytest.mark.parametrize(("command", "code"), [("doctor", 1), ("explain", 0)])
def test_what_is_wrong_is_told_as_the_page_says(command: str, code: int) -> None:
    page = (REPOSITORY / f"docs/{command}.md").read_text()
    arguments, expected = re.findall(rf"```console\n\$ hotloop ({command} .*)\n((?:.*\n)*?)```", page)[0]
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", *arguments.split()],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, expected)


@pytest.mark.slow
def test_a_model_is_exported_and_used_as_the_page_says(
    tmp_path: Path, hotloop: Command, make_images: Callable[..., Path]
) -> None:
    page = (REPOSITORY / "docs/export.md").read_text()
    commands = re.findall(r"^\$ hotloop (.*runs/latest.*|export key .*)$", page, re.MULTILINE)
    assert len(commands) == 7
    settings = [f"data.train = '{make_images()}'", "data.batch_size = 8", "model.name = 'tiny:cnn'"]
    (tmp_path / "job.toml").write_text("\n".join([*settings, "task.image_size = 16", "train.epochs = 1"]))
    hotloop("train", "job.toml", expect=0)
    shown = [hotloop(*command.split(), expect=0).out for command in commands]
    assert "signed by the key given" in shown[2]
    assert shown[3].count("images/class") == shown[6].count("images/class") == 16


def test_a_job_is_planned_as_the_page_says(tmp_path: Path, hotloop: Command, make_images: Callable[..., Path]) -> None:
    page = (REPOSITORY / "docs/plan.md").read_text()
    assert "$ hotloop plan job.toml --prices own.csv" in page
    assert "$ hotloop plan catalog --card H200" in page
    (tmp_path / "own.csv").write_text(re.findall(r"```text\n(instance.*?)```", page, re.DOTALL)[0])
    settings = [f"data.train = '{make_images()}'", "data.batch_size = 8", "model.name = 'resnet18'"]
    (tmp_path / "job.toml").write_text("\n".join([*settings, "task.image_size = 32", "train.epochs = 1"]))
    found = json.loads(hotloop("plan", "job.toml", "--prices", "own.csv", "--card", "H100", "--json", expect=0).out)
    (option,) = found["options"]
    assert option["cost"] == pytest.approx(12.5 * option["seconds"] / 3600)
    assert found["memory"]["peak_bytes"] > 4 * found["model"]["parameters"]
    assert "8 × H200" in hotloop("plan", "catalog", "--card", "H200", expect=0).out


def test_the_readmes_table_is_what_was_measured() -> None:
    assert call(sys.executable, "bench/table.py", "--check") == "", "it prints only what differs"


def test_code_blocks_name_commands_that_exist() -> None:
    from hotloop.cli.main import _COMMANDS

    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]:
        for command in re.findall(r"^\$ (?:\.venv/bin/)?hotloop (\S+)", page.read_text(), re.MULTILINE):
            assert command in _COMMANDS, f"{page}: hotloop {command}"


def test_the_policy_is_the_one_that_its_page_explains(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/storage.md").read_text()
    (tmp_path / "job.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])
    assert "$ hotloop storage policy job.toml > policy.json" in page
    policy = json.loads(call(sys.executable, "-m", "hotloop", "storage", "policy", "job.toml", cwd=tmp_path))
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [one["Sid"] for one in policy["Statement"]]
    assert policy["Statement"][3]["Resource"] == ["arn:aws:s3:::models/flowers/flowers/*"]
    made = call(sys.executable, "-m", "hotloop", "storage", "key", "flowers.key", cwd=tmp_path)
    assert made == "flowers.key: --set storage.client_key=file:flowers.key\n"


def test_what_the_page_on_kubernetes_shows_is_what_a_cluster_takes(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/launch-kubernetes.md").read_text()
    commands = re.findall(r"^\$ hotloop (launch examples\S+ .*--dry-run)", page, re.MULTILINE)
    assert len(commands) == 1
    hotloop = [sys.executable, "-m", "hotloop"]
    assert [one["kind"] for one in taken(call(*hotloop, *commands[0].split()))][-1] == "JobSet"
    job = (REPOSITORY / "examples/digits/job.toml").read_text() + re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "job.toml").write_text(job)
    options = ["--on", "kubernetes", "--gpus", "8", "--dry-run"]
    objects = taken(call(*hotloop, "launch", "job.toml", *options, cwd=tmp_path))
    assert objects[-1]["kind"] == "Job"
    assert objects[-1]["metadata"]["namespace"] == "team"


def taken(text: str) -> list[dict[str, Any]]:
    """Objects that Kubernetes would take."""
    objects: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    assert [problems(one) for one in objects] == [[]] * len(objects)
    return objects


def test_what_ray_is_sent_is_as_its_page_says() -> None:
    page = (REPOSITORY / "docs/launch-ray.md").read_text()
    command = re.findall(r"^\$ hotloop (launch .* --dry-run)$", page, re.MULTILINE)[0]
    sent = call(sys.executable, "-m", "hotloop", *command.split())
    shown = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0]
    assert "num_workers = 8" in shown
    assert shown in sent
