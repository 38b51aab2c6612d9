"""What a script under `hotloop run` and `profile` lets others see of it."""

import json
import sys
from pathlib import Path

import pytest
from command import Command

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from hotloop.core.live import read_live
from dataclasses import asdict

def main():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 64)), batch_size=4)
    best = None
    for step, (batch,) in enumerate(data):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            found = read_live(Path(sys.argv[1])).processes
            best = asdict(found[0]) if found else best
    print(json.dumps(best))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("verb", ["run", "profile"])
def test_a_script_is_published(verb: str, hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLOOP_LIVE", str(tmp_path / "live"))
    (tmp_path / "learn.py").write_text(SCRIPT)
    options = ["--only", "zero_grad"] if verb == "run" else ["--steps", "1000", "--out", "out"]
    done = hotloop(verb, *options, "--", sys.executable, "learn.py", str(tmp_path / "live"), expect=0, timeout=200)
    found = json.loads(next(line for line in (done.out + done.err).splitlines() if line.startswith('{"pid')))
    assert (found["way"], found["job"], found["rank"], found["ranks"], found["gpu"]) == (verb, "learn", 0, 1, "")
    assert found["phase"] == "step"
    assert found["heartbeat"] >= found["begun"] > 0
    assert list((tmp_path / "live").iterdir()) == [], "who has ended is gone"
