"""The house: imports go down only, torch stays where it belongs, the public names are what they are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hotloop

SOURCE = Path(hotloop.__file__).parent
LAYERS = [
    "core", "versions", "doctor", "image", "explain", "attach", "data", "storage", "pages", "kernels", "tasks", "train",
    "profile", "accelerate", "tune", "launch", "monitor", "plan", "export", "cli",
]  # fmt: skip
"""From the ground up: a package imports those before it, and itself."""
WITH_TORCH = {"kernels", "tasks", "train", "accelerate", "plan", "export"}
OWN_PROCESSES = ("doctor/readers/torch.py", "doctor/probing/", "tune/trial.py")
"""Which no other module of their package imports."""


def imports(tree: ast.Module) -> set[str]:
    """Modules that a tree imports, `if TYPE_CHECKING:` included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
    return found


def faults(files: dict[str, str]) -> list[str]:
    """What is wrong with the imports of files, given as path from the package's root -> text."""
    wrong = []
    for path, text in files.items():
        package = path.split("/")[0]
        if package.endswith(".py"):
            continue  # __init__ and __main__ name the public objects and the command
        for module in imports(ast.parse(text)):
            if module.split(".")[0] == "torch" and package not in WITH_TORCH and not path.startswith(OWN_PROCESSES):
                wrong.append(f"{path} imports torch")
            if module.startswith("hotloop."):
                other = module.split(".")[1]
                if package not in LAYERS or other not in LAYERS:
                    wrong.append(f"{path}: {package} or {other} has no place among the layers")
                elif LAYERS.index(other) > LAYERS.index(package):
                    wrong.append(f"{path} imports {module}, which is above it")
    return wrong


def test_imports_go_down_only_and_torch_stays_where_it_belongs() -> None:
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert len(files) > 30
    assert faults(files) == []


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("core/a.py", "from hotloop.train.loop import Loop", "above it"),
        ("data/a.py", "def f():\n    import torch.nn", "imports torch"),
        (
            "core/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hotloop.cli.main import cli",
            "above it",
        ),
        ("utils/a.py", "import hotloop.core.job", "no place"),
    ],
)
def test_the_arrows_can_fail(path: str, text: str, fault: str) -> None:
    assert len(faults({path: text})) == 1
    assert fault in faults({path: text})[0]


def modules_after(code: str) -> set[str]:
    child = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {name.split(".")[0] for name in child.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import hotloop",
        "import hotloop; hotloop.Job; hotloop.Dataset; hotloop.Loaders",
        "import hotloop.cli.main, hotloop.cli.job, hotloop.cli.train, hotloop.cli.runs",
        "import hotloop.cli.run, hotloop.accelerate.script, hotloop.accelerate.settings, hotloop.tune.search",
        "import hotloop.data.worker, hotloop.data.images, hotloop.pages.run",
        "import hotloop.cli.export, hotloop.cli.predict, hotloop.export.predict, hotloop.export.keys",
    ],
)
def test_what_needs_no_torch_imports_none(code: str) -> None:
    assert "torch" not in modules_after(code)


@pytest.mark.slow
def test_that_test_can_fail() -> None:
    assert "torch" in modules_after("import hotloop; hotloop.Step")


def test_help_imports_next_to_nothing() -> None:
    heavy = {"torch", "numpy", "pydantic", "rich", "jinja2", "matplotlib", "pynvml", "PIL"}
    assert not heavy & modules_after("from hotloop.cli.main import cli\ncli.main(['--help'], standalone_mode=False)")


def test_the_public_names() -> None:
    assert hotloop.__all__ == [
        "ArrayDataset",
        "Batch",
        "Checkpointer",
        "DamagedSample",
        "Dataset",
        "Example",
        "HotloopError",
        "InputError",
        "Job",
        "LeakDetector",
        "LoaderSettings",
        "Loaders",
        "MemoryMarks",
        "MemoryReport",
        "Preemption",
        "Result",
        "Run",
        "Step",
        "StepSettings",
        "Task",
        "load_job",
        "memory_report",
        "prefetch",
        "publish",
        "read_machine",
        "train_job",
    ]
    for name in hotloop.__all__:
        assert getattr(hotloop, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = hotloop.Trainer


def test_no_file_is_two_things() -> None:
    long = {path.name: n for path in SOURCE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 500}
    assert long == {}
