"""Help pages and errors, pinned: `pytest tests/cli --update-pages` rewrites them after a wanted change."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from command import Command

from hotloop.cli import main

PAGES = Path(__file__).parent / "pages"

CALLS = {
    "hotloop": [],
    "hotloop-help": ["--help"],
    "train-help": ["train", "--help"],
    "profile-help": ["profile", "--help"],
    "profile-compare-help": ["profile", "compare", "--help"],
    "run-help": ["run", "--help"],
    "tune-help": ["tune", "--help"],
    "error-profile": ["profile", "--", "no-such-program"],
    "resolve-help": ["resolve", "--help"],
    "error-resolve": ["resolve", "--gpu", "RTX 4091"],
    "plan-help": ["plan", "--help"],
    "plan-job-help": ["plan", "job", "--help"],
    "plan-spot-help": ["plan", "spot", "--help"],
    "plan-catalog-help": ["plan", "catalog", "--help"],
    "export-help": ["export", "--help"],
    "export-verify-help": ["export", "verify", "--help"],
    "export-key-help": ["export", "key", "--help"],
    "predict-help": ["predict", "--help"],
    "storage-help": ["storage", "--help"],
    "storage-policy-help": ["storage", "policy", "--help"],
    "storage-check-help": ["storage", "check", "--help"],
    "storage-key-help": ["storage", "key", "--help"],
    "watch-help": ["watch", "--help"],
    "exporter-help": ["exporter", "--help"],
    "error-exporter": ["exporter", "--listen", "9400"],
    "launch-help": ["launch", "--help"],
    "launch-status-help": ["launch", "status", "--help"],
    "launch-logs-help": ["launch", "logs", "--help"],
    "launch-cancel-help": ["launch", "cancel", "--help"],
    "error-launch": ["launch", "logs", "nothing"],
    "image-help": ["image", "--help"],
    "image-render-help": ["image", "render", "--help"],
    "image-build-help": ["image", "build", "--help"],
    "image-run-help": ["image", "run", "--help"],
    "image-check-help": ["image", "check", "--help"],
    "image-sbom-help": ["image", "sbom", "--help"],
    "image-verify-help": ["image", "verify", "--help"],
    "image-outdated-help": ["image", "outdated", "--help"],
    "image-advisories-help": ["image", "advisories", "--help"],
    "error-image": ["image", "render", "--driver", "580", "--base", "arch"],
    "job-help": ["job", "--help"],
    "job-init": ["job", "init"],
    "job-check-help": ["job", "check", "--help"],
    "data-help": ["data", "--help"],
    "data-check-help": ["data", "check", "--help"],
    "data-pack-help": ["data", "pack", "--help"],
    "runs-help": ["runs", "--help"],
    "runs-compare-help": ["runs", "compare", "--help"],
    "runs-none": ["runs"],
    "serve-help": ["serve", "--help"],
    "monitor-help": ["monitor", "--help"],
    "monitor-rules-help": ["monitor", "rules", "--help"],
    "monitor-dashboards-help": ["monitor", "dashboards", "--help"],
    "checkpoint-help": ["checkpoint", "--help"],
    "checkpoint-list-help": ["checkpoint", "list", "--help"],
    "checkpoint-verify-help": ["checkpoint", "verify", "--help"],
    "checkpoint-convert-help": ["checkpoint", "convert", "--help"],
    "error-checkpoint": ["checkpoint", "list", "nowhere"],
    "error-command": ["trian"],
    "error-option": ["train", "job.toml", "--resum", "auto"],
    "error-value": ["train", "job.toml", "--resume"],
    "error-argument": ["train"],
    "error-absent": ["train", "job.toml"],
    "error-data": ["data", "check"],
    "error-run": ["runs", "compare", "a", "b"],
}


@pytest.mark.parametrize("name", CALLS)
def test_pages(name: str, hotloop: Command, request: pytest.FixtureRequest) -> None:
    finished = hotloop(*CALLS[name])
    text = f"$ hotloop {' '.join(CALLS[name])}\n{finished.out}{finished.err}exit code {finished.code}\n"
    page = PAGES / f"{name}.txt"
    if request.config.getoption("--update-pages"):
        page.write_text(text)
    assert text == page.read_text()


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("error-")])
def test_an_error_is_three_lines_and_the_exit_code_two(name: str) -> None:
    lines = (PAGES / f"{name}.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in lines[1:4]] == ["error", "cause", "fix"]
    assert lines[4] == "exit code 2"


def test_every_page_is_tested() -> None:
    assert {path.stem for path in PAGES.glob("*.txt")} == set(CALLS)


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    context = click.Context(main.cli)
    for name, (_, line) in main._COMMANDS.items():
        command = main.cli.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(limit=200) == line


def test_completion_works(hotloop: Command) -> None:
    os.environ["_HOTLOOP_COMPLETE"] = "bash_source"
    try:
        finished = hotloop()
    finally:
        del os.environ["_HOTLOOP_COMPLETE"]
    assert "_hotloop_completion" in finished.out


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [(["job", "init"], 1, 0), (["job", "nothing"], 2, 2), (["watch"], 0, 2), (["--version"], 1, 0)],
)
def test_what_the_caller_has_closed_is_no_error(arguments: list[str], closed: int, code: int) -> None:
    command = [sys.executable, "-W", "error", "-m", "hotloop", *arguments]
    shell = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Error" not in done.stderr
    assert "Warning" not in done.stderr


def test_a_terminal_can_be_measured_where_python_does_not_buffer() -> None:
    """As in many containers: `hotloop watch` would take any terminal for one of 80x24."""
    code = (
        "import atexit, sys; from hotloop.cli.main import main\n"
        "atexit.register(lambda: print(sys.__stdout__.fileno())); main(['--version'])"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines()[1:] == ["1"], done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["job", "init"], ["runs", "--help"]])
def test_a_full_disk_below_standard_output_is_said(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hotloop", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: cannot write standard output\ncause: No space left on device\nfix:   free some"
    )
    assert len(done.stderr.splitlines()) == 3, "Python adds nothing at its end"
