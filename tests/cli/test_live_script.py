"""What a script under `hotloop run` and `profile` lets others see of it."""

import json
import sys
from pathlib import Path

import pytest
from command import Command

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from hotloop.core.live import read_live
from dataclasses import asdict

def main():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 64)), batch_size=4)
    scaler = torch.amp.GradScaler("cpu", enabled=sys.argv[2] == "scaled")
    best, losses = None, []
    for step, (batch,) in enumerate(data):
        loss = model(batch).square().mean()
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        time.sleep(0.003)  # of a step as long as others are
        if step % 50 == 0:
            torch.save(model.state_dict(), "model.pt")
            torch.save(optimizer.state_dict(), "optimizer.pt")
            found = read_live(Path(sys.argv[1])).processes
            best = asdict(found[0]) if found else best
    print(json.dumps({**best, "losses": [min(losses), max(losses)]}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "scaled"), [("run", "scaled"), ("run", "plain"), ("profile", "plain")])
def test_a_script_is_published(
    verb: str, scaled: str, hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLOOP_LIVE", str(tmp_path / "live"))
    (tmp_path / "learn.py").write_text(SCRIPT)
    options = ["--only", "zero_grad"] if verb == "run" else ["--steps", "1000", "--out", "out"]
    script = [sys.executable, "learn.py", str(tmp_path / "live"), scaled]
    code = 0 if verb == "run" else 1  # it ends before so many steps are measured
    done = hotloop(verb, *options, "--", *script, expect=code, timeout=200)
    found = json.loads(next(line for line in (done.out + done.err).splitlines() if line.startswith('{"pid')))
    assert (found["way"], found["job"], found["rank"], found["ranks"], found["gpu"]) == (verb, "learn", 0, 1, "")
    assert found["phase"] in ("step", "saving")
    assert found["heartbeat"] >= found["begun"] > 0
    least, most = found["losses"]
    assert least <= found["loss"] <= most, "as the script computed it, whatever it was scaled by"
    assert found["learning_rate"] == 0.01
    assert found["memory_bytes"] > 100e6
    assert 0 < found["saves"] <= 1 + found["steps"] // 50, "two files in one step are one checkpoint"
    assert found["samples"] == (4 * found["steps"] if verb == "run" else 0)
    assert found["saved"] >= found["begun"]
    assert 0 < found["save_seconds"] <= found["stalled_seconds"] < found["step_seconds"]
    assert list((tmp_path / "live").iterdir()) == [], "who has ended is gone"
