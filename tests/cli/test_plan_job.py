"""`hotloop plan JOB`: what it says of a job, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import Command

JOB = """
[task]
name = "{task}"
{more}
[data]
train = "made by the task"
batch_size = 8
[model]
name = "tiny"
"""
OWN = "instance,card,gpus,on_demand,spot,provider,region\nmine,H100,1,4.0,1.5,us,here\nlarge,H100,2,8.0,,us,here\n"


BUFFERED = """
import tiny, torch

class Buffered(tiny.Regression):
    def model(self):
        model = super().model()
        model.register_buffer("saved", torch.zeros(1_000_000))
        model.register_buffer("made_anew", torch.zeros(2_000_000), persistent=False)
        return model
"""


TEAMS = """
import tiny

class Teams(tiny.Regression):
    def model(self):
        model = super().model()
        model.divide = lambda mesh: None
        return model
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., str]:
    """Writes a job file, and a table of prices beside it."""

    def write(task: str = "tiny:Regression", more: str = "") -> str:
        (tmp_path / "job.toml").write_text(JOB.format(task=task, more=more))
        (tmp_path / "own.csv").write_text(OWN)
        (tmp_path / "teams.py").write_text(TEAMS)
        return "job.toml"

    return write


def test_memory_time_and_prices_are_told(hotloop: Command, job: Callable[..., str]) -> None:
    done = hotloop("plan", job(), "--card", "H100", "--prices", "own.csv", expect=0)
    assert "on 1 × H100 (bf16" in done.out
    for word in ("memory", "time", "a step", "us mine", "us large", "spot, if a machine lives", "saved (us mine)"):
        assert word in done.out
    assert "newer ones" in done.out, "the prices have no date"


def test_gpus_that_make_no_whole_teams_are_left_out(hotloop: Command, job: Callable[..., str]) -> None:
    words = ("plan", job("teams:Teams"), "--card", "H100", "--prices", "own.csv", "--set", "ranks.tensor=4")
    for parallel, others in (("fsdp+tp", {1, 8}), ("tp", {1})):
        asked = (*words, "--set", f"parallel={parallel}")
        found = json.loads(hotloop(*asked, "--gpus", "4", "--json", expect=0).out)
        assert {one["gpus"] for one in found["ways"]} == others, "and the 4 that are asked for"
        assert [one["gpus"] for one in found["options"]] == [1]
        assert "2 GPUs in teams of 4" in hotloop(*asked, "--gpus", "2", expect=2).err
    assert "teams are whole\nfix:   --gpus 4" in hotloop(*asked, "--gpus", "8", expect=2).err


def test_a_team_shares_samples(hotloop: Command, job: Callable[..., str]) -> None:
    words = ("plan", job("teams:Teams"), "--card", "H100", "--set", "data.batch_size=1", "--set", "ranks.tensor=2")
    hotloop(*words, "--gpus", "2", "--set", "parallel=tp", expect=0)
    refused = hotloop(*words, "--gpus", "4", "--set", "parallel=fsdp+tp", expect=2)
    assert "4 GPUs share batches of 1" in refused.err
    assert "fix:   --gpus 2" in refused.err


@pytest.mark.parametrize("parallel", ["tp", "fsdp+tp"])
def test_layers_of_a_model_that_does_not_say_how_are_not_divided(
    parallel: str, hotloop: Command, job: Callable[..., str]
) -> None:
    done = hotloop("plan", job(), "--card", "H100", "--gpus", "4", "--set", f"parallel={parallel}", expect=2)
    assert "does not say how its layers are divided among ranks" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--card", "T4", "--set", "parallel=fsdp"), 'precision = "fp16" does not go with parallel = "fsdp"'),
        (("--card", "H100", "--set", "ranks.tensor=2"), 'ranks.tensor = 2 does not go with parallel = "auto"'),
        (("--card", "H100", "--set", "parallel=tp", "--set", "ranks.gradients=bf16"), 'ranks.gradients = "bf16"'),
    ],
)
def test_what_train_refuses_of_several_is_refused(
    words: tuple[str, ...], said: str, hotloop: Command, job: Callable[..., str]
) -> None:
    assert said in hotloop("plan", job("teams:Teams"), "--gpus", "2", *words, expect=2).err


def test_layers_that_a_team_cannot_divide_are_not_planned(hotloop: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros(9 * 17, np.uint16))
    (tmp_path / "job.toml").write_text(
        '[task]\nname = "tokens"\ncontext = 16\nvocabulary = 64\n[data]\ntrain = "tokens.npy"\nbatch_size = 2\n'
        '[model]\nname = "gpt2"\narguments = { layers = 2 }\n'
    )
    words = ("plan", "job.toml", "--card", "H100", "--set", "parallel=tp")
    assert "kv_heads = 12 cannot be divided among 8 ranks" in hotloop(*words, "--gpus", "8", expect=2).err
    found = json.loads(hotloop(*words, "--gpus", "2", "--json", expect=0).out)
    assert {one["gpus"] for one in found["ways"]} == {1, 4}, "and the 2 that are asked for"


def test_what_train_refuses_of_divided_weights_is_refused_and_left_out(
    hotloop: Command, job: Callable[..., str]
) -> None:
    words = ("--card", "H100", "--prices", "own.csv", "--set", "train.ema=0.9")
    divided = hotloop("plan", job(), *words, "--gpus", "2", "--set", "parallel=fsdp", expect=2)
    assert 'error: train.ema = 0.9 does not go with parallel = "fsdp"' in divided.err

    found = json.loads(hotloop("plan", job(), *words, "--set", "parallel=fsdp", "--json", expect=0).out)
    assert not found["ways"], "but for the one GPU that is asked for"
    assert [one["gpus"] for one in found["options"]] == [1]

    found = json.loads(hotloop("plan", job(), *words, "--json", expect=0).out)
    assert [one["gpus"] for one in found["options"]] == [1, 2], "as copies"


def test_each_of_a_team_holds_the_whole_batch_in_the_hosts_memory(hotloop: Command, job: Callable[..., str]) -> None:
    def ahead(*words: str) -> float:
        """Bytes of batches ahead."""
        prices = ("--card", "H100", "--prices", "own.csv")
        done = hotloop("plan", job("teams:Teams"), *prices, *words, "--json", expect=0)
        needs = json.loads(done.out)["needs"]
        return float(needs["host_bytes"] - needs["checkpoint_bytes"])

    alone = ahead("--gpus", "1")
    assert alone > 0
    assert ahead("--gpus", "4", "--set", "parallel=tp") == pytest.approx(4 * alone)


def test_a_checkpoint_has_what_the_model_saves(hotloop: Command, job: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "buffered.py").write_text(BUFFERED)
    averaged = ("--set", "train.ema=0.9", "--set", 'optimizer.name="sgd"', "--json")
    found = json.loads(hotloop("plan", job("buffered:Buffered"), "--prices", "own.csv", *averaged, expect=0).out)
    parts = found["memory"]["parts"]
    assert parts["weights"] == parts["averaged"] > 4_000_000 + 8_000_000
    assert 2 * 4_000_000 < found["needs"]["checkpoint_bytes"] < 2 * 4_000_000 + 100_000


def test_json_has_all_of_it(hotloop: Command, job: Callable[..., str], tmp_path: Path) -> None:
    options = ("--card", "H100", "--prices", "own.csv", "--json", "--page", "plan.html", "--fastest")
    done = hotloop("plan", *options, job(), expect=0)
    found = json.loads(done.out)
    memory, time = found["memory"], found["time"]
    assert memory["peak_bytes"] == pytest.approx(sum(memory["parts"].values()))
    assert 0 < time["low"] < time["step_seconds"] < time["high"]
    seconds = [one["seconds"] for one in found["options"]]
    assert len(seconds) == 2
    assert seconds == sorted(seconds)
    alone = ("--lifetime", "4h", "--save", "2s", "--price", "1.5", "--on-demand", "4", "--work", "1h")
    assert found["spot"].keys() == json.loads(hotloop("plan", "spot", *alone, "--json", expect=0).out).keys()
    page = (tmp_path / "plan.html").read_text()
    for words in ("us mine", "Other ways on this card", '<td class="text">ddp</td>', "the date is not known"):
        assert words in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--card", "H900"), 'unknown card "H900"'),
        (("--region", "mars"), '--region "mars" has no prices'),
        (("--provider", "nobody"), '--provider "nobody" has no prices'),
        (("--prices", "none.csv"), "none.csv cannot be read"),
        (("--gpus", "0"), "0 is not in the range"),
        (("--gpus", "9"), "9 GPUs share batches of 8"),
        (("--budget", "-1"), "'-1' is no amount of money"),
        (("--zone", "mars"), '--zone "mars" has no prices'),
        (("--fastest", "--cheapest"), "contradict each other"),
        (("--deadline", "soon"), "'soon' is no duration"),
        (("--samples", "4"), "data.batch_size = 8 is more than 4 samples"),
        (("--page", "nowhere/plan.html"), "--page nowhere/plan.html cannot be written"),
        (("--page", "/dev/full"), "--page /dev/full cannot be written"),
        (("--budget", "nan"), "'nan' is no amount of money"),
        (("--card", "V100-16GB", "--set", "precision=bf16"), 'precision = "bf16" on V100-16GB'),
        (("--provider", "aws", "--region", "us-east4"), "nothing has prices that is all of aws, us-east4"),
    ],
)
def test_bad_input_is_refused_in_three_lines(
    options: tuple[str, ...], said: str, hotloop: Command, job: Callable[..., str], tmp_path: Path
) -> None:
    before = {*tmp_path.iterdir(), tmp_path / job()}
    done = hotloop("plan", "job.toml", *options, expect=2)
    assert said in done.err
    assert not done.out
    lines = [line for line in done.err.splitlines() if not line.startswith("tracing ")]
    assert [line.partition(":")[0] for line in lines] == ["error", "cause", "fix"]
    assert {*tmp_path.iterdir()} - before <= {tmp_path / "own.csv", tmp_path / "teams.py"}


def test_what_needs_numbers_is_named_and_a_step_of_it_made(hotloop: Command, job: Callable[..., str]) -> None:
    done = hotloop("plan", job("tiny:ByNumbers"), "--json", "--prices", "own.csv", expect=0)
    text = 'return functional.mse_loss(outputs, batch["targets"]) * batch'
    lines = (Path(__file__).parents[1] / "support" / "tiny.py").read_text().splitlines()
    why = f"tiny.py, line {next(n for n, line in enumerate(lines, 1) if text in line)}: {text}"
    assert "_local_scalar_dense" in done.err
    assert why in done.err
    assert "making a step of 4 samples" in done.err
    found = json.loads(done.out)
    assert why in found["notes"][0]
    traced = json.loads(
        hotloop("plan", job(), "--json", "--prices", "own.csv", "--set", "speed.compile=false", expect=0).out
    )
    assert found["memory"]["peak_bytes"] == pytest.approx(traced["memory"]["peak_bytes"], rel=0.01)
    assert "note: all of this is of a step of few samples" in hotloop("plan", job("tiny:ByNumbers"), expect=0).out


def test_an_optimizer_that_asks_for_numbers_is_named(hotloop: Command, job: Callable[..., str]) -> None:
    done = hotloop("plan", job(), "--set", "optimizer.name=adafactor", expect=2)
    assert 'a job with the optimizer "adafactor" cannot be planned' in done.err
    assert "--set optimizer.name=adamw" in done.err


def test_what_can_neither_be_traced_nor_made_is_refused(
    hotloop: Command, job: Callable[..., str], tmp_path: Path
) -> None:
    done = hotloop("plan", job("tiny:VectorLoss"), expect=2)
    assert "can neither be traced nor made here" in done.err
    assert "Traceback" not in done.err, "torch logs one of its own where shapes are wrong"
    assert not list(tmp_path.glob("*.txt"))


def test_a_task_of_ones_own_is_imported_from_here(hotloop: Command, job: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tiny import Regression\n")
    assert "on 1 × H100" in hotloop("plan", job("mine:Regression"), "--card", "H100", expect=0).out


def test_refreshed_prices_without_processors_are_read_again(
    hotloop: Command, job: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job()
    hotloop("plan", "catalog", "--refresh", "own.csv", expect=0)
    for _ in range(2):
        assert "mine" in hotloop("plan", "catalog", "--card", "H100", expect=0).out
        hotloop("plan", "catalog", "--refresh", "own.csv", expect=0)


def test_prices_of_ones_own_may_be_given_a_provider(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "lab.csv").write_text("instance,card,gpus,on_demand\nmine,H100,1,2.5\n")
    hotloop("plan", "catalog", "--refresh", "lab.csv", "--provider", "lab", expect=0)
    offers = json.loads(hotloop("plan", "catalog", "--provider", "lab", "--json", expect=0).out)["offers"]
    assert [(one["instance"], one["date"]) for one in offers] == [("mine", None)]


def test_prices_that_name_no_date_are_of_the_one_given(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "lab.csv").write_text("instance,card,gpus,date\nmine,H100,1,\nolder,H100,1,2025-01-01\n")
    hotloop("plan", "catalog", "--refresh", "lab.csv", "--provider", "lab", "--date", "2026-01-05", expect=0)
    offers = json.loads(hotloop("plan", "catalog", "--provider", "lab", "--json", expect=0).out)["offers"]
    assert [one["date"] for one in offers] == ["2026-01-05", "2025-01-01"]


SKYPILOT = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone
big,H100,8,192,2048,98.3,34.2,us-east-1,a
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--provider", "nobody"), '--provider "nobody" has no prices'),
        (("--provider", "nobody", "--refresh", "named.csv"), '--provider "nobody" has no prices'),
        (("--provider", "us", "--refresh", "vms.csv", "--date", "9999-01-01"), "--date 9999-01-01 is in the future"),
        (("--refresh", "vms.csv"), "vms.csv does not say whose prices these are"),
        (("--refresh", "none.csv"), "none.csv has no prices"),
        (("--refresh", "none.csv", "--provider", "lab"), "none.csv has no prices"),
        (("--date", "2026-01-05"), "--date goes with --refresh"),
        (("--dry-run",), "--dry-run goes with --refresh"),
    ],
)
def test_prices_of_nobody_and_of_tomorrow_are_refused_and_not_kept(
    options: tuple[str, ...], said: str, hotloop: Command, job: Callable[..., str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job()
    (tmp_path / "vms.csv").write_text(SKYPILOT)
    (tmp_path / "none.csv").write_text("instance,card,gpus\n")
    (tmp_path / "named.csv").write_text("instance,card,gpus,provider,on_demand\nmine,H100,1,lab,2.5\n")
    refused = hotloop("plan", "catalog", *options, expect=2)
    assert said in refused.err
    assert [line.partition(":")[0] for line in refused.err.splitlines()] == ["error", "cause", "fix"]
    assert refused.out == ""
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert "; XDG_CACHE_HOME=FOLDER" in hotloop("plan", "catalog", "--refresh", "own.csv", expect=2).err
    assert "there are aws, azure" in hotloop("plan", "catalog", "--provider", "nobody", expect=2).err
