"""`hotloop run` on scripts that know nothing of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import Command, Finished

SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __init__(self, count={count}):
        self.features = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return len(self.features)
    def __getitem__(self, index):
        time.sleep({load})
        {item}
        return self.features[index], index

def main(steps={steps}):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), {extra_layer} torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loader = DataLoader(Slow(), 4, shuffle=True, num_workers={workers})
    done, seen = 0, []
    while done < steps:
        for features, index in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(features), index % 4)
            loss.backward()
            optimizer.step()
            done += 1
            seen += index.tolist()
            {extra}
    print("trained", done, seen[-12:], hash(tuple(seen)), f"{{loss.item():.9f}}", torch.rand(1).item())

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def write(
    script: Path, load: float = 0.0, workers: int = 0, steps: int = 140, item: str = "", extra: str = "",
    extra_layer: str = "", samples: int = 96,
) -> None:  # fmt: skip
    filled = SCRIPT.format(
        load=load, workers=workers, steps=steps, item=item or "pass", extra=extra or "pass", extra_layer=extra_layer,
        count=samples,
    )  # fmt: skip
    script.write_text(filled)


def plain(script: Path) -> str:
    done = subprocess.run([sys.executable, script.name], capture_output=True, text=True, check=True)
    return done.stdout


def accelerated(hotloop: Command, *options: str, expect: int | None = 0) -> Finished:
    summary = ["--steps", "20", "--json-summary", "summary.json"]
    return hotloop("run", *summary, *options, "--", sys.executable, "train.py", expect=expect, timeout=400)


def summary(folder: Path) -> dict[str, dict[str, object]]:
    found = json.loads((folder / "summary.json").read_text())
    return {**found, "accelerations": {one["name"]: one for one in found["accelerations"]}}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_is_faster_and_what_is_trained_the_same(script: Path, hotloop: Command, workers: int) -> None:
    write(script, load=0.01, workers=workers, samples=400, steps=200)  # the first epoch is longer than what is timed
    done = accelerated(hotloop, "--only", "loader")
    assert done.out == plain(script), "every batch once, in the script's order, with its random numbers"
    found = summary(script.parent)
    loader = found["accelerations"]["loader"]
    assert (found["device"], found["steps"], loader["state"]) == ("cpu", 200, "on")
    assert loader["gain"] > 0.3
    assert loader["count"] > 60
    assert "times as fast" in done.err


@pytest.mark.slow
def test_what_loading_breaks_goes_on_as_the_script_has_it(script: Path, hotloop: Command) -> None:
    """A data set that does not work in a process of its own."""
    write(script, load=0.003, item="assert torch.utils.data.get_worker_info() is None, 'not in a worker'")
    done = accelerated(hotloop, "--only", "loader")
    assert done.out == plain(script)
    loader = summary(script.parent)["accelerations"]["loader"]
    assert (loader["state"], "not in a worker" in loader["why"]) == ("failed", True)
    assert "hotloop: loader was undone: AssertionError" in done.err


@pytest.mark.slow
def test_a_scripts_own_error_is_its_own(script: Path, hotloop: Command) -> None:
    write(script, load=0.003, item="assert index != 95 or main.done < 80, 'damaged'", extra="main.done = done")
    script.write_text(
        script.read_text()
        .replace("def main(", "def main(", 1)
        .replace("    torch.manual_seed(0)", "    main.done = 0; torch.manual_seed(0)")
    )
    done = accelerated(hotloop, expect=1)
    assert "AssertionError: damaged" in done.err
    assert "Traceback" in done.err
    assert "was undone" not in done.err


@pytest.mark.slow
def test_a_data_set_that_changes_between_epochs_is_seen_by_workers(script: Path, hotloop: Command) -> None:
    changes = "loader.dataset.features = loader.dataset.features + (done % 100 == 0)"
    write(script, load=0.01, samples=400, steps=200, extra=changes)
    done = accelerated(hotloop, "--only", "loader")
    assert summary(script.parent)["accelerations"]["loader"]["state"] == "on"
    assert done.out == plain(script)


@pytest.mark.slow
def test_epochs_that_are_left_early(script: Path, hotloop: Command) -> None:
    write(script, load=0.002, extra="\n            if done % 7 == 0: break")
    done = accelerated(hotloop, "--only", "loader")
    assert done.out == plain(script)


@pytest.mark.slow
def test_the_fast_level_trains_to_the_same_loss_and_says_what_each_has_brought(script: Path, hotloop: Command) -> None:
    write(script, load=0.001, steps=400, extra_layer="torch.nn.Dropout(0.1),")
    done = hotloop(
        "run",
        "--steps",
        "20",
        "--level",
        "fast",
        "--json-summary",
        "summary.json",
        "--",
        sys.executable,
        "train.py",
        timeout=400,
    )
    found = summary(script.parent)
    assert found["accelerations"]["compile"]["state"] in ("on", "undone"), done.err
    assert any("losses were compared" in note for note in found["notes"])
    assert {one["state"] for one in found["accelerations"].values()} <= {"on", "undone", "unfit"}


COMPILERS = {
    "none": "torch.compile = None",
    "no backward": """
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor.clone()
    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("no code for the backward pass")
torch.compile = lambda function: lambda *inputs: Fails.apply(function(*inputs))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_model_that_does_not_compile_goes_on_without(script: Path, hotloop: Command, compiler: str) -> None:
    write(script, steps=150)
    script.write_text(script.read_text().replace("import torch\n", f"import torch\n{COMPILERS[compiler]}\n", 1))
    done = accelerated(hotloop, "--only", "compile")
    compiled = summary(script.parent)["accelerations"]["compile"]
    assert (compiled["state"], done.out) == ("failed", plain(script))


@pytest.mark.slow
def test_what_waits_once_steps_are_shorter_is_tried_then(script: Path, hotloop: Command) -> None:
    """Loading hides behind the model, until the model is compiled; here to something that does not sleep."""
    write(script, load=0.004, workers=1, samples=800, steps=200, extra_layer="Sleeps(),")
    sleeps = """
class Sleeps(torch.nn.Module):
    seconds = 0.06
    def forward(self, tensor):
        time.sleep(self.seconds)
        return tensor
def compiled(function):
    Sleeps.seconds = 0.0
    return function
torch.compile = compiled
"""
    script.write_text(script.read_text().replace("import torch\n", f"import torch\n{sleeps}\n", 1))
    done = accelerated(hotloop, "--only", "loader", "--only", "compile")
    found = summary(script.parent)
    assert done.out == plain(script)
    assert {name: one["state"] for name, one in found["accelerations"].items()} == {"loader": "on", "compile": "on"}


def test_exit_codes_arguments_and_input_are_the_scripts(script: Path, hotloop: Command) -> None:
    script.write_text("import sys, torch; print(sys.argv, __name__); sys.exit(7)")
    done = hotloop("run", "--steps", "20", "--", sys.executable, "train.py", "--level", "x", expect=7)
    assert done.out == "['train.py', '--level', 'x'] __main__\n"
    assert "note: nothing was accelerated: no training was seen" in done.err


@pytest.mark.parametrize(("end", "code"), [("os._exit(0)", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_a_script_that_ends_at_once_is_not_said_to_train_nothing(
    script: Path, hotloop: Command, end: str, code: int
) -> None:
    write(script, steps=16)
    script.write_text(f"import os\n{script.read_text()}\n    {end}\n")
    done = hotloop("run", "--steps", "20", "--", sys.executable, "train.py", expect=code)
    assert "what was accelerated is not known" in done.err
    assert "no training was seen" not in done.err


@pytest.mark.slow
def test_a_child_that_trains_is_accelerated_and_tells_so(script: Path, hotloop: Command) -> None:
    write(script, load=0.002)
    fork = "import multiprocessing; multiprocessing.get_context('fork').Process(target=main).start()"
    script.write_text(script.read_text().replace("\n    main()", f"\n    {fork}"))
    assert accelerated(hotloop, "--only", "loader", "--at-once").out == plain(script)
    assert summary(script.parent)["accelerations"]["loader"]["state"] == "on"


@pytest.mark.slow
def test_an_optimizer_without_weights_is_none_that_trains(script: Path, hotloop: Command) -> None:
    write(script, steps=40)
    idle = "idle = torch.optim.SGD([{'params': []}], lr=0.1)\n    idle.step()\n    done, seen = 0, []"
    script.write_text(script.read_text().replace("done, seen = 0, []", idle))
    assert accelerated(hotloop).out == plain(script)
    assert summary(script.parent)["steps"] == 48


def test_a_script_may_have_its_tensors_made_elsewhere(script: Path, hotloop: Command) -> None:
    """As `torch.set_default_device("cuda")` does."""
    write(script, steps=40)
    step = "lambda: (model(torch.ones(4, 16, device='cpu')).sum().backward(), optimizer.step())"
    elsewhere = f"torch.set_default_device('meta')\n    for step in [{step}] * 40: step()\n    print('trained'); return"
    script.write_text(script.read_text().replace("done, seen = 0, []", elsewhere))
    assert accelerated(hotloop).out == "trained\n"
    assert summary(script.parent)["steps"] == 40


@pytest.mark.slow
def test_a_compiled_model_hears_of_no_hooks_but_the_scripts_own(script: Path, hotloop: Command) -> None:
    write(script, steps=40)
    compiled = "import warnings; warnings.simplefilter('error'); model = torch.compile(model, backend='eager')"
    text = script.read_text().replace("done, seen = 0, []", f"{compiled}\n    done, seen = 0, []")
    script.write_text(text.replace("print(", "print(len(warnings.filters), "))
    assert accelerated(hotloop).out == plain(script)


def test_a_script_that_ends_before_all_was_tried(script: Path, hotloop: Command) -> None:
    write(script, steps=16)
    done = accelerated(hotloop)
    assert "the script ended before all accelerations were tried" in done.err


@pytest.mark.parametrize("handles", [True, False])
def test_sigterm_lets_a_script_save(script: Path, handles: bool) -> None:
    write(script, load=0.001, steps=100000, extra="print('step', flush=True)")
    if handles:
        text = script.read_text().replace(
            "    main()\n",
            "    try:\n        main()\n    except KeyboardInterrupt:\n        print('saved', flush=True)\n",
        )
        script.write_text(text)
    # What is executed on the way out makes Python forget why it ends.
    script.write_text("import atexit\natexit.register(exec, 'pass')\n" + script.read_text())
    command = [sys.executable, "-m", "hotloop", "run", "--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout
        for _ in range(5):
            assert child.stdout.readline() == "step\n"
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
    assert ("saved" in out, child.returncode) == (handles, 0 if handles else 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "spede"], "spede: no such acceleration"),
        (["--settings", "none.toml"], "cannot read none.toml"),
        (["--settings", "none.toml", "--without", "loader"], "--without does not go with --settings"),
        (["--json-summary", "no/such/file"], "no/such/file cannot be written"),
    ],
)
def test_bad_input(options: list[str], message: str, hotloop: Command) -> None:
    done = hotloop("run", *options, "--", "python", "train.py", expect=2)
    assert message in done.err
    assert len(done.err.splitlines()) == 3


def test_a_dry_run_starts_nothing(hotloop: Command, tmp_path: Path) -> None:
    done = hotloop("run", "--dry-run", "--without", "loader", "--", "touch", str(tmp_path / "there"), expect=0)
    assert "prefetch" in done.out
    assert "loader" not in done.out
    assert not (tmp_path / "there").exists()


@pytest.mark.slow
def test_no_process_is_left(script: Path, hotloop: Command) -> None:
    """Workers that are kept between epochs end with the script."""
    marker = f"HOTLOOP_TEST_{os.getpid()}"
    write(script, load=0.002, extra=f"os.environ['{marker}'] = '1'")
    script.write_text("import os\n" + script.read_text())
    accelerated(hotloop, "--only", "loader")
    left = [
        process
        for process in Path("/proc").iterdir()
        if process.name.isdigit()
        and process.name != str(os.getpid())
        and str(script.parent).encode() in _content(process / "cwd")
    ]
    assert left == []


def _content(link: Path) -> bytes:
    try:
        return os.readlink(link).encode()
    except OSError:
        return b""


def test_what_cannot_be_written_at_the_end_is_told_before_the_script_starts(hotloop: Command, tmp_path: Path) -> None:
    """Else hours of training would end with that error, without the table and the script's exit code."""
    os.mkfifo(tmp_path / "pipe")
    done = hotloop("run", "--json-summary", str(tmp_path / "pipe"), "--", sys.executable, "-c", "print(1)", expect=2)
    assert "pipe cannot be written" in done.err
    assert done.out == ""


def test_settings_below_zero_are_refused(hotloop: Command, tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text('[run]\naccelerations = ["loader"]\nworkers = -3\n')
    done = hotloop("run", "--settings", str(file), "--", sys.executable, "-c", "print(1)", expect=2)
    assert "run.workers" in done.err
    assert done.out == ""
