"""`hotloop profile` and `hotloop run` on scripts that train on a GPU."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import Command

from hotloop.core.profile import KINDS

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def main(steps):
    torch.manual_seed(0)
    device = torch.device("cuda")
    images, labels = torch.randn(1024, 3, 64, 64), torch.randint(0, 10, (1024,))
    loader = DataLoader(TensorDataset(images, labels), 64, shuffle=True, num_workers=2, pin_memory={pinned})
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range({depth}):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    model = {wrap}(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done, seen = 0, torch.zeros((), device=device)
    while done < steps:
        for images, labels in loader:
            seen += images.to(device, non_blocking=True).double().sum()
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            {extra}
            done += 1
    print(json.dumps(dict(steps=done, seen=seen.item(), loss=loss.item(), random=torch.rand(1).item())))

if __name__ == "__main__":
    import json
    main({steps})
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def write(
    script: Path, steps: int, depth: int = 4, extra: str = "pass", wrap: str = "", *, pinned: bool = True
) -> None:
    script.write_text(SCRIPT.format(steps=steps, depth=depth, extra=extra, wrap=wrap, pinned=pinned))


def plain(script: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, script.name], capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.alone
def test_waiting_for_the_gpu_is_found_with_its_line(script: Path, hotloop: Command) -> None:
    reads = "brightness = [pixel.item() for pixel in images[0].flatten()[:1000]]"
    write(script, 100_000, depth=1, extra=reads)
    done = hotloop("profile", "--json", "--out", "out", "--", sys.executable, "train.py", expect=0, timeout=300)
    found = json.loads(done.out)
    told = (found["shares"], found["step_seconds"], found["ablations"])
    assert (found["device"], found["verdict"]) == ("cuda", "sync"), told
    assert set(found["shares"]) == set(KINDS)
    assert sum(found["shares"].values()) == pytest.approx(1)
    first = found["findings"][0]
    assert first["id"] == "sync"
    line = script.read_text().splitlines().index(f"            {reads}") + 1
    assert f"train.py:{line}" in first["location"]
    assert {"cached_batch", "batch_on_device", "no_sync"} <= {one["name"] for one in found["ablations"]}
    assert (script.parent / "out/report.html").stat().st_size > 10_000


@pytest.mark.alone
def test_work_of_the_gpu_is_compute(script: Path, hotloop: Command) -> None:
    write(script, 100_000, depth=40)
    done = hotloop("profile", "--json", "--out", "out", "--", sys.executable, "train.py", expect=0, timeout=300)
    found = json.loads(done.out)
    assert found["verdict"] == "compute", (found["shares"], found["ablations"])
    assert found["shares"]["compute"] > 0.7
    first = found["findings"][0]
    assert (first["id"], first["outside"]) == ("compute.float32", "bf16")
    assert 0.1 < first["gain_at_most"] < 0.9


OWN = """
import sys
import torch

kind = sys.argv[1]
device, number = "cuda:0", torch.cuda.device_count()
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))

    def forward(self, x):
        x = self.layers(x)
        return dict(out=x, rows=x.reshape(-1, 64), mean=x.mean())

class Strict(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient

model = Net().to(device)
if kind == "objects":
    inner = model.layers.forward
    model.layers.forward = lambda x: Strict.apply(inner(x))
if kind == "parallel":
    model = torch.nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    x = torch.randn(1024 * number + 1, 4096, device=device)
    with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
        found = model(x)
    assert found["out"].shape == x.shape
    assert len(found["rows"]) == 64 * len(x)
    assert len(found["mean"].view(-1)) == (number if kind == "parallel" else 1)
    (found["out"].float().square().mean() + found["mean"].mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert "forward" not in vars(model)  # it could not be saved
"""


@pytest.mark.parametrize("kind", ["plain", "autocast", "objects"])
def test_a_model_under_autocast_is_timed_where_it_takes_it(script: Path, hotloop: Command, kind: str) -> None:
    script.write_text(OWN)
    done = hotloop("profile", "--json", "--out", "out", "--", sys.executable, "train.py", kind, expect=0, timeout=300)
    found = json.loads(done.out)
    timed = [one["gain"] for one in found["ablations"] if one["name"] == "bfloat16"]
    assert len(timed) == (kind == "plain")
    assert ("compute.float32" in {one["id"] for one in found["findings"]}) == (kind == "plain")
    assert all(gain > 0.3 for gain in timed)
    why = {"plain": "", "autocast": "the script has an autocast of its own", "objects": "TypeError: float32 only"}[kind]
    assert not why or f"bfloat16 was not timed: {why}" in found["notes"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_data_parallel_costs_is_timed(script: Path, hotloop: Command) -> None:
    script.write_text(OWN)
    done = hotloop("profile", "--json", "--out", "out", "--", sys.executable, "train.py", "parallel", expect=0,
                   timeout=300)  # fmt: skip
    found = {one["id"]: one for one in json.loads(done.out)["findings"]}
    assert 0.1 < found["data_parallel"]["gain_at_most"] < 1
    assert "DistributedDataParallel" in found["data_parallel"]["fix"]


def test_what_is_computed_exactly_is_the_scripts(script: Path, hotloop: Command) -> None:
    """Batches are there before they are asked for, each once, and are what the script would have copied."""
    write(script, 960)
    options = ["--json-summary", "summary.json", "--steps", "40", "--only", "prefetch"]
    done = hotloop("run", *options, "--", sys.executable, "train.py", expect=0, timeout=300)
    found, expected = json.loads(done.out), plain(script)
    assert found["seen"] == expected["seen"]
    assert found["random"] == expected["random"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.05)  # cuDNN's sums have no fixed order
    told = {one["name"]: one for one in json.loads((script.parent / "summary.json").read_text())["accelerations"]}
    assert told["prefetch"]["state"] in ("on", "undone")
    assert told["prefetch"]["count"] > 20


@pytest.mark.parametrize("wrap", ["", "nn.DataParallel"])
def test_the_fast_level_trains_alike(script: Path, hotloop: Command, wrap: str) -> None:
    write(script, 1600, wrap=wrap)
    names = ["tf32", "channels_last", "bf16", "compile", "fused_optimizer", "cudnn_autotune"]
    only = [word for name in names for word in ("--only", name)]
    options = ["--level", "fast", "--json-summary", "summary.json", "--steps", "40", *only]
    done = hotloop("run", *options, "--", sys.executable, "train.py", expect=0, timeout=300)
    summary = json.loads((script.parent / "summary.json").read_text())
    told = {one["name"]: one for one in summary["accelerations"]}
    states = {name: told[name]["state"] for name in names}
    assert set(states.values()) <= {"on", "undone"}, summary
    assert all(told[name]["count"] for name in names), "each was at work, whether it helped or not"
    assert json.loads(done.out)["loss"] == pytest.approx(plain(script)["loss"], abs=0.3)
    assert summary["memory"]["device_peak"] > 1_000_000
    assert any("losses were compared" in note for note in summary["notes"])


FOLDER = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms as T

def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    crop = T.RandomResizedCrop(32, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    images = datasets.ImageFolder("images", T.Compose([crop, T.ToTensor(), T.Normalize((0.5,) * 3, (0.2,) * 3)]))
    loader = DataLoader(images, 8, shuffle=True, num_workers=1, pin_memory=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done, seen, kinds = 0, [], set()
    while done < 1200:
        for images, labels in loader:
            kinds.add(type(images).__name__)
            moved, classes = images.to(device, non_blocking=True), labels.to(device)
            loss = nn.functional.cross_entropy(model(moved), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((labels.tolist(), moved.mean(dim=(1, 2, 3)).tolist()))
            done += 1
    print(json.dumps(dict(seen=seen, kinds=sorted(kinds))))

if __name__ == "__main__":
    import json
    main()
"""


def test_images_are_cut_on_the_gpu_in_the_scripts_order(
    script: Path, hotloop: Command, make_images: Callable[..., Path]
) -> None:
    """Nothing is left to chance but the order: so each batch is known by its images' means."""
    make_images(classes=2, each=64, size=48)
    script.write_text(FOLDER)
    options = ["--steps", "40", "--only", "image_folder", "--json-summary", "summary.json"]
    done = hotloop("run", *options, "--", sys.executable, "train.py", expect=0, timeout=300)
    found = json.loads(done.out)
    expected = json.loads(
        subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True, timeout=300).stdout
    )
    assert [labels for labels, _ in found["seen"]] == [labels for labels, _ in expected["seen"]]
    means = [[mean for _, each in one["seen"] for mean in each] for one in (found, expected)]
    assert means[0] == pytest.approx(means[1], abs=0.05)
    assert found["kinds"] == ["HostTensor", "Tensor"], "the GPU cut them"


def test_sigterm_ends_workers_with_page_locked_batches_quietly(script: Path) -> None:
    """Torch waits five seconds for each worker then, and its thread complains of batches that are gone."""
    write(script, 100_000, depth=1, extra="print(done, flush=True)")
    options = ["--steps", "5", "--only", "loader", "--json-summary", "summary.json"]
    command = [sys.executable, "-m", "hotloop", "run", *options, "--", sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout
        for line in child.stdout:
            if line == "400\n":
                child.send_signal(signal.SIGTERM)
                break
        _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM, err
    assert json.loads(Path("summary.json").read_text())["accelerations"][0]["name"] == "loader"
    assert "Exception in thread" not in err
