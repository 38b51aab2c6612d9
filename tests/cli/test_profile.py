"""`hotloop profile` on scripts that know nothing of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import Command
from runs import events_in

from hotloop.core.profile import KINDS

SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        {wait}
        return torch.randn(16), index % 4

def main(steps=200):
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    while done < steps:
        for features, labels in DataLoader(Slow(), 8, num_workers={workers}):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            done += 1
            {extra}
    print("trained", done)

if __name__ == "__main__":
    {call}
"""
KEYS = {
    "device", "steps_measured", "step_seconds", "shares", "verdict", "ablations", "overhead_ratio", "findings",
}  # fmt: skip


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def write(script: Path, load: float = 0.0, workers: int | str = 0, extra: str = "pass", call: str = "main()") -> None:
    wait = f"time.sleep({load})" if load else "pass"  # sleep(0) would leave the processor to others, if any want it
    script.write_text(SCRIPT.format(wait=wait, workers=workers, extra=extra, call=call))


def test_slow_loading_is_found_proved_and_named(script: Path, hotloop: Command) -> None:
    write(script, load=0.002)
    done = hotloop("profile", "--steps", "8", "--json", "--", sys.executable, "train.py")
    found = json.loads(done.out)
    assert found.keys() >= KEYS
    assert (done.code, found["verdict"], found["device"], found["steps_measured"] > 4) == (0, "input", "cpu", True)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["shares"]["input"] > 0.5
    (ablation,) = found["ablations"]
    assert ablation["name"] == "cached_batch"
    assert ablation["step_seconds"] < found["step_seconds"]["mean"] / 2
    first = found["findings"][0]
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "for features" in text)
    assert (first["id"], first["location"]) == ("input.no_workers", f"{script}:{line}")
    assert first["gain_at_most"] == pytest.approx(ablation["gain"])
    assert "trained" not in done.out


@pytest.mark.slow
def test_people_read_a_verdict_and_open_a_page(script: Path, hotloop: Command) -> None:
    write(script, load=0.002)
    done = hotloop("profile", "--steps", "8", "--", sys.executable, "train.py")
    assert "input-bound: " in done.out
    assert "fix: DataLoader(..., num_workers=" in done.out
    page = Path("profiles/train-1/report.html").read_text()
    assert "input-bound" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert json.loads(Path("profiles/train-1/trace.json").read_text())["traceEvents"]
    hotloop("profile", "--steps", "8", "--", sys.executable, "train.py")
    assert Path("profiles/train-2/profile.json").exists()


@pytest.mark.slow
def test_python_between_steps_is_found_with_its_line(script: Path, hotloop: Command) -> None:
    write(script, extra="sum(n * n for n in range(300_000))")
    found = json.loads(hotloop("profile", "--steps", "12", "--json", "--", sys.executable, "train.py").out)
    assert found["verdict"] == "other"
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "300_000" in text)
    assert [one["location"] for one in found["findings"] if one["id"] == "other.python"] == [f"{script}:{line}"]


@pytest.mark.slow
def test_weights_that_are_updated_by_hand_are_trained_too(script: Path, hotloop: Command) -> None:
    write(script, load=0.002)
    by_hand = "[p.data.add_(p.grad, alpha=-0.1) for p in model.parameters()]; model.zero_grad()"
    script.write_text(script.read_text().replace("optimizer.step()", by_hand))
    found = json.loads(hotloop("profile", "--steps", "8", "--json", "--", sys.executable, "train.py").out)
    assert found["verdict"] == "input"


@pytest.mark.slow
def test_many_batches_a_step_are_one_step(script: Path, hotloop: Command) -> None:
    write(script, load=0.0005)
    text = script.read_text().replace("optimizer.step()", "if done % 30 == 29: optimizer.step()")
    script.write_text(text.replace("steps=200", "steps=2000"))
    found = json.loads(hotloop("profile", "--steps", "6", "--json", "--", sys.executable, "train.py").out)
    assert found["step_seconds"]["mean"] > 30 * 8 * 0.0005


def test_a_script_may_go_on(script: Path, hotloop: Command) -> None:
    write(script)
    done = hotloop("profile", "--steps", "8", "--go-on", "--json", "--", sys.executable, "train.py")
    assert "trained 200" in done.err
    assert json.loads(done.out)["ablations"] == []


@pytest.mark.parametrize(
    ("call", "extra", "arguments", "expected"),
    [
        ("sys.argv = ['other']; main()", "pass", [], ""),
        ("import threading; t = threading.Thread(target=main); t.start(); t.join()", "pass", [], ""),
        (
            "try:\n        main()\n    except BaseException as error:\n        print('caught'); raise",
            "pass",
            [],
            "caught",
        ),
        pytest.param("sys.stderr.close(); main()", "pass", [], "", marks=pytest.mark.slow),
        ("sys.stderr = None; main()", "pass", [], ""),
        ("torch.optim.SGD([{'params': []}], lr=0.1).step(); main()", "pass", [], ""),
    ],
    ids=["argv", "thread", "caught", "closed", "no errors", "idle optimizer"],
)
def test_unusual_scripts_are_profiled(
    script: Path, hotloop: Command, call: str, extra: str, arguments: list[str], expected: str
) -> None:
    write(script, load=0.002, call=call, extra=extra)
    done = hotloop("profile", "--steps", "8", "--json", "--", sys.executable, "train.py", *arguments)
    assert json.loads(done.out)["verdict"] == "input"
    assert expected in done.err


@pytest.mark.slow
def test_a_thread_that_trains_is_not_waited_for_when_it_has_ended(script: Path, hotloop: Command) -> None:
    """The script's main thread gives it batches, and would wait for ever once nobody takes them."""
    taken = "import queue, threading; given = queue.Queue(1); threading.Thread(target=main, daemon=True).start()"
    write(script, load=0.002, call=f"{taken}\n    while True: given.put(None)", extra="given.get()")
    done = hotloop("profile", "--steps", "8", "--json", "--", sys.executable, "train.py", expect=0)
    assert json.loads(done.out)["device"] == "cpu"
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_script_that_catches_its_end_again_and_again_is_ended(script: Path, hotloop: Command) -> None:
    caught = "while True:\n        try:\n            main()\n        except BaseException:\n            pass"
    write(script, load=0.002, call=caught)
    assert json.loads(hotloop("profile", "--steps", "8", "--json", "--", sys.executable, "train.py").out)


@pytest.mark.slow
def test_workers_that_are_spawned_are_left_alone(script: Path, hotloop: Command) -> None:
    write(script, load=0.001, workers="1, multiprocessing_context='spawn'")
    script.write_text(script.read_text().replace("return 64", "return 6400"))
    found = json.loads(hotloop("profile", "--steps", "8", "--json", "--", sys.executable, "train.py").out)
    assert found["verdict"] == "input"
    assert found["findings"][0]["id"] == "input.slow_storage"


@pytest.mark.slow
def test_a_crash_is_the_scripts_own(script: Path, hotloop: Command) -> None:
    write(script, extra="assert done < 5, 'broken'")
    done = hotloop("profile", "--", sys.executable, "train.py", expect=1)
    assert "AssertionError: broken" in done.err
    assert "hotloop: the command ended with code 1 before enough was measured" in done.err
    assert not Path("profiles").exists()


@pytest.mark.parametrize("steps", [20, 28, 34, 44])
def test_a_script_that_ends_meanwhile_ends_well(
    script: Path, hotloop: Command, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """While watched, unwatched, traced and fed again: ranks measure at steps that are known beforehand. What a step
    consists of is known once it was traced.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    write(script, call=f"main({steps})", extra=f"if done == {steps}: break")
    expect = 1 if steps < 40 else 0
    done = hotloop("profile", "--steps", "8", "--", sys.executable, "train.py", expect=expect)
    assert f"trained {steps}" in done.out
    assert ("nothing was measured" in done.err) == (steps < 40)
    assert ("note: the script ended while cached batch was tried" in done.out) == (steps > 40)


def test_interrupted_before_the_trace_it_says_what_to_do(script: Path, hotloop: Command) -> None:
    write(script, extra="if done == 40: raise KeyboardInterrupt")
    done = hotloop("profile", "--", sys.executable, "train.py", expect=130)
    assert "-bound" not in done.out
    assert "ended with code 130 before enough was measured\ncause: it ended after 40 steps" in done.err
    assert "hotloop profile --steps 6" in done.err
    assert not Path("profiles").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expect"), [("KeyboardInterrupt", 130), ("ValueError", 0)])
def test_interrupted_while_parts_are_left_out_its_code_stays(
    script: Path, hotloop: Command, monkeypatch: pytest.MonkeyPatch, name: str, expect: int
) -> None:
    """An error then may come of what was left out."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    write(script, extra=f"if done == 44: raise {name}")
    done = hotloop("profile", "--steps", "8", "--", sys.executable, "train.py", expect=expect)
    assert "note: the script ended while cached batch was tried" in done.out


@pytest.mark.slow
def test_who_sends_a_signal_gets_the_code_of_the_scripts_handler(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While batches are given again, too: an error then may come of that, but a signal does not."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    write(script, extra="if done == 44: print('now', flush=True); time.sleep(100)")
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    script.write_text(handler + script.read_text())
    command = [sys.executable, "-m", "hotloop", "profile", "--steps", "8", "--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert "now\n" in iter(child.stdout.readline, "")
        child.terminate()
        rest = child.communicate(timeout=60)[0]
    assert "note: the script ended while cached batch was tried" in rest
    assert child.returncode == 3


def test_a_process_that_ends_at_once_has_trained_all_the_same(script: Path, hotloop: Command) -> None:
    write(script, call="main(5); import os; os._exit(0)", extra="if done == 5: break")
    done = hotloop("profile", "--", sys.executable, "train.py", expect=1)
    assert "it ended, before warm-up, watching and tracing were over" in done.err


def test_a_command_that_fails_before_it_trains_is_not_told_that_it_was_too_short(hotloop: Command) -> None:
    done = hotloop("profile", "--", sys.executable, "-c", "raise SystemExit(7)", expect=7)
    assert "before the first step of an optimizer" in done.err


@pytest.mark.slow
def test_several_ranks_and_the_slow_one(script: Path, hotloop: Command) -> None:
    write(script, extra="time.sleep(0.03 * (torch.distributed.get_rank() == 1))")
    model, wrapped = "    optimizer =", "    model = torch.nn.parallel.DistributedDataParallel(model)\n    optimizer ="
    text = script.read_text().replace(model, "    torch.distributed.init_process_group('gloo')\n" + wrapped)
    script.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    found = json.loads(hotloop("profile", "--json", "--", *torchrun).out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    slow = [one for one in found["findings"] if one["id"] == "slow_rank"]
    assert [one["title"] for one in slow] == ["rank 1 is slower than the others"]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (["true"], "it started no Python, or one that -I"),
        ([sys.executable, "-I", "-c", "pass"], "started no Python"),
        ([sys.executable, "-c", "pass"], "nothing went backward"),
        ([sys.executable, "train.py"], "it ended after 5 steps"),
    ],
)
def test_where_nothing_is_seen_it_says_why(script: Path, hotloop: Command, command: list[str], cause: str) -> None:
    write(script, call="main(5)", extra="if done == 5: break")
    assert cause in hotloop("profile", "--", *command, expect=1).err


def test_bad_usage(script: Path, hotloop: Command) -> None:
    assert "no such program" in hotloop("profile", "--", "no-such-program", expect=2).err
    script.mkdir()
    assert "exists" in hotloop("profile", "--out", "train.py", "--", "true", expect=2).err
    assert "is no profile" in hotloop("profile", "compare", os.devnull, os.devnull, expect=2).err
    assert "cannot read" in hotloop("profile", "compare", "a.json", "b.json", expect=2).err


def test_tensorboard_gets_the_steps_and_the_shares(script: Path, hotloop: Command) -> None:
    write(script, load=0.001)
    done = hotloop("profile", "--steps", "8", "--tensorboard", "--", sys.executable, "train.py", expect=0)
    assert "hotloop: watching 8 steps" in done.err, "what takes long says what it is at"
    events = events_in(Path("profiles/train-1/tensorboard"))
    steps = events.Scalars("step/seconds")
    assert [one.step for one in steps] == list(range(8))
    assert sum(events.Scalars(f"share/{kind}")[0].value for kind in KINDS) == pytest.approx(1, abs=1e-5)
    assert "Memory in tensors during these steps" in Path("profiles/train-1/report.html").read_text()


def test_perf_records_steps_after_warm_up(script: Path, hotloop: Command) -> None:
    perf = shutil.which("perf")
    allowed = perf and subprocess.run([perf, "record", "-o", "/dev/null", "true"], capture_output=True).returncode == 0
    if not allowed:
        pytest.skip("perf is not installed, or not allowed here")
    write(script)
    done = hotloop("profile", "--perf", "--steps", "20", "--", sys.executable, "train.py", expect=0)
    assert "to look at it: perf report -i profiles/train-1/perf.data" in done.out
    assert perf
    told = subprocess.run(
        [perf, "report", "--stdio", "-i", "profiles/train-1/perf.data"], capture_output=True, text=True
    )
    assert "python" in told.stdout


def test_a_profiler_that_is_not_there_is_named_with_its_command(script: Path, hotloop: Command) -> None:
    if shutil.which("nsys"):
        pytest.skip("nsys is installed here")
    write(script)
    done = hotloop("profile", "--nsys", "--", sys.executable, "train.py", expect=2)
    assert "nsys is not installed" in done.err
    assert "nsys profile --trace=cuda" in done.err
    assert not Path("profiles").exists()
