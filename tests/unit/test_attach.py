"""hotloop starts inside other processes, and these stay what they are."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hotloop.attach.command import run_attached
from hotloop.attach.imports import when_imported
from hotloop.attach.inside import Attachment
from hotloop.attach.patches import Patches
from hotloop.core.errors import InputError

BASE_PYTHON = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a module `torch` that is none, and an entry that leaves a file where it was called."""
    (tmp_path / "torch.py").write_text("value = 1\n")
    (tmp_path / "entry.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def begin(torch, attachment):\n"
        "    text = f'{torch.value} {attachment.settings}'\n"
        "    Path(attachment.folder, f'begun-{os.getpid()}').write_text(text)\n"
        "def fail(torch, attachment):\n    raise ValueError('broken')\n"
    )
    (tmp_path / "found").mkdir()
    return tmp_path


def attached(home: Path, *command: str, entry: str = "entry:begin") -> int:
    environment = {**os.environ, "PYTHONPATH": str(home)}
    attachment = Attachment({"torch": entry}, str(home / "found"), {"steps": 3})
    return run_attached(command, attachment, environment).code


def test_it_begins_when_torch_is_imported_in_children_too(home: Path) -> None:
    code = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    assert attached(home, sys.executable, "-c", code) == 0
    assert [file.read_text() for file in (home / "found").glob("begun-*")] == ["1 {'steps': 3}"] * 2


def test_without_torch_it_only_leaves_a_trace(home: Path) -> None:
    assert attached(home, sys.executable, "-c", "pass") == 0
    assert [file.name.split("-")[0] for file in (home / "found").iterdir()] == ["attached"]


def test_an_environment_without_hotloop_will_do(home: Path) -> None:
    assert attached(home, BASE_PYTHON, "-c", "import torch") == 0
    assert len(list((home / "found").glob("begun-*"))) == 1


def test_what_fails_inside_is_told_and_the_script_goes_on(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert attached(home, sys.executable, "-c", "import torch; print('trained')", entry="entry:fail") == 0
    out, err = capfd.readouterr()
    assert out == "trained\n"
    assert err == "hotloop could not start in this process: ValueError: broken\n"


def test_a_sitecustomize_of_the_users_own_is_run(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "sitecustomize.py").write_text("import builtins\nbuiltins.own = __file__\n")
    code = "import sys, sitecustomize as s; print(own == s.__file__, any('bootstrap' in p for p in sys.path))"
    assert attached(home, sys.executable, "-c", code) == 0
    assert capfd.readouterr().out == "True False\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("import os; os._exit(4)", 4)],
)
def test_exit_codes_are_the_scripts(home: Path, code: str, expected: int) -> None:
    assert attached(home, sys.executable, "-c", code) == expected


def test_a_crash_shows_the_scripts_own_traceback_alone(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert attached(home, sys.executable, "-c", "import torch\n1 / 0") == 1
    assert capfd.readouterr().err.splitlines() == [
        "Traceback (most recent call last):", '  File "<string>", line 2, in <module>',
        *(["    1 / 0", "    ~~^~~"] if sys.version_info >= (3, 13) else []), "ZeroDivisionError: division by zero",
    ]  # fmt: skip


def started(home: Path, code: str) -> "subprocess.Popen[str]":
    """A process of its own group that runs some Python as a command; once that has said that it is ready."""
    ours = (
        "import os, sys\n"
        "from hotloop.attach.command import run_attached\n"
        "from hotloop.attach.inside import Attachment\n"
        f"attachment = Attachment({{}}, {str(home)!r}, {{}})\n"
        f"sys.exit(run_attached([sys.executable, '-c', {code!r}], attachment, os.environ).code)"
    )
    process = subprocess.Popen([sys.executable, "-c", ours], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_script(home: Path, number: signal.Signals) -> None:
    code = (
        "import os, signal\n"
        f"signal.signal({int(number)}, lambda *_: os._exit(5))\n"
        "print('ready', flush=True)\nsignal.pause()\n"
    )
    with started(home, code) as process:
        process.send_signal(number)
        assert process.wait(20) == 5


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_an_interrupt_comes_to_the_script_once_whomever_it_was_sent_to(
    home: Path, send: Callable[[int, int], None]
) -> None:
    code = """
import signal
try:
    print("ready", flush=True)
    signal.pause()
except KeyboardInterrupt:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    again = signal.sigtimedwait([signal.SIGINT], 2.5)
raise SystemExit(6 if again else 5)
"""
    with started(home, code) as process:
        send(process.pid, signal.SIGINT)
        assert process.wait(20) == 5


def test_ctrl_c_is_not_taken_from_the_script(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT))"
    assert attached(home, sys.executable, "-c", code) == 0
    ours = signal.getsignal(signal.SIGINT)  # ignored where the tests themselves were started in the background
    assert capfd.readouterr().out == (f"{ours}\n" if ours is signal.SIG_IGN else f"{signal.default_int_handler}\n")


def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match="no such program"):
        run_attached(["no-such-program"], Attachment({}, "/", {}), os.environ)


def test_a_module_is_followed_once_and_keeps_its_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "followed.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, seen = list(sys.meta_path), list[ModuleType]()
    when_imported("followed", seen.append)
    assert importlib.util.find_spec("followed")  # looked up, not imported
    assert seen == []
    import followed  # type: ignore[import-not-found]

    assert seen == [followed]
    assert sys.meta_path == before
    assert type(followed.__loader__) is type(followed.__spec__.loader)
    assert followed.__loader__.get_source("followed") == "value = 2\n"
    when_imported("followed", seen.append)
    assert seen == [followed, followed]


class Base:
    def method(self) -> str:
        return "base"


class Derived(Base):
    def own(self) -> str:
        return "own"


def test_what_is_replaced_is_put_back() -> None:
    patches = Patches()
    own, method = vars(Derived)["own"], Base.method
    patches.replace(Derived, "own", lambda original: lambda self: original(self) + "!")
    patches.replace(Derived, "method", lambda original: lambda self: original(self) + "!")
    assert (Derived().own(), Derived().method()) == ("own!", "base!")
    patches.undo()
    assert vars(Derived)["own"] is own
    assert "method" not in vars(Derived)
    assert Derived.method is method


def test_what_somebody_else_has_replaced_since_stays() -> None:
    patches = Patches()
    patches.replace(Derived, "own", lambda original: lambda self: "ours")
    theirs = Patches()
    theirs.replace(Derived, "own", lambda original: lambda self: "theirs")
    patches.undo()
    assert Derived().own() == "theirs"
    theirs.undo()
    patches.undo()
    Derived.own = lambda self: "own"  # type: ignore[method-assign]
