"""The pages of `hotloop serve` in a real browser: by keyboard, on a phone, light and dark, refreshed meanwhile."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from browser import Page, missing, page
from pretended import pretend

from hotloop.core.live import Live, Seen
from hotloop.monitor.web.server import Server
from hotloop.monitor.web.site import Site

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PAGES = ("/", "/runs/first-1", "/compare?run=first-1&run=second-2", "/nothing")


class Trainings:
    """What trains, as a test says."""

    def __init__(self) -> None:
        self.now: tuple[Live, ...] = ()
        self.broken = False

    def __call__(self) -> Seen:
        if self.broken:
            raise OSError(5, "Input/output error", "the folder")
        return Seen(self.now, {})


@pytest.fixture
def trainings() -> Trainings:
    return Trainings()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pretend(tmp_path, "first-1", rate=0.01)
    pretend(tmp_path, "second-2", rate=0.02, samples_per_second=99.0)
    return tmp_path


@pytest.fixture
def address(root: Path, trainings: Trainings) -> Iterator[str]:
    with Server(("127.0.0.1", 0), Site(root, trainings, now=lambda: 1000.0)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with page() as opened:
        yield opened


@pytest.fixture
def shown(browser: Page) -> Page:
    browser.look(1280)
    browser.complaints.clear()
    return browser


ONE = Live(1, 1, 1, way="train", job="first-1", phase="step", step=5, heartbeat=1000.0)


def test_live_trainings_are_refreshed_in_place(shown: Page, address: str, root: Path, trainings: Trainings) -> None:
    shown.open(address)
    assert "Nothing trains on this machine" in shown.value("document.body.innerText")
    trainings.now = (replace(ONE, run=str(root / "first-1")),)
    shown.until("document.querySelector('#live a')?.getAttribute('href') === '/runs/first-1'")
    shown.until("document.getElementById('live-status').innerText === '1 process trains'")
    assert "Nothing trains" not in shown.value("document.body.innerText")
    shown.value("document.querySelector('#live a').focus()")
    trainings.now = (replace(trainings.now[0], step=12345),)
    shown.until("document.getElementById('live').innerText.includes('12,345')")
    assert shown.value("document.activeElement.innerText") == "first-1", "the keyboard's focus stays"
    assert shown.value("document.getElementById('live-status').innerText") == "1 process trains", "not read out again"
    trainings.now = ()
    shown.until("!document.getElementById('live-none').hidden")
    assert shown.complaints == []


def test_what_a_training_calls_itself_stays_text(shown: Page, address: str, trainings: Trainings) -> None:
    shown.open(address)
    trainings.now = (replace(ONE, job="<img src=x onerror='document.title=1'>"),)
    shown.until("document.getElementById('live').innerText.includes('<img src=x')")
    assert shown.value("document.images.length") == 0
    assert shown.value("document.title") == "Runs · hotloop"


def test_a_page_says_when_what_it_shows_may_be_old(shown: Page, address: str, trainings: Trainings) -> None:
    trainings.now = (ONE,)
    shown.open(address)
    trainings.broken = True
    shown.until("document.getElementById('live-status').innerText.includes('may be old')")
    assert "first-1" in shown.value("document.getElementById('live').innerText"), "it stays there"
    trainings.broken = False
    shown.until("document.getElementById('live-status').innerText === ''")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("target", PAGES)
def test_a_page_fits_and_loads_all_of_itself(target: str, width: int, dark: bool, shown: Page, address: str) -> None:
    shown.look(width, dark=dark)
    shown.open(address + target)
    assert shown.value("document.documentElement.scrollWidth <= window.innerWidth"), "it is wider than the screen"
    back = shown.value("getComputedStyle(document.body).backgroundColor")
    assert (max(int(part) for part in back[4:-1].split(",")) < 100) == dark
    assert [text for text in shown.complaints if "404" not in text or target != "/nothing"] == []


@pytest.mark.parametrize("target", PAGES)
def test_a_page_can_be_read_out(target: str, shown: Page, address: str) -> None:
    shown.open(address + target)
    assert shown.value("document.documentElement.lang") == "en"
    assert shown.value("document.querySelectorAll('h1').length") == 1
    levels = shown.value("[...document.querySelectorAll('h1,h2,h3')].map((one) => Number(one.tagName[1]))")
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert shown.value("[...document.querySelectorAll('th')].every((head) => head.scope)")
    named = "(one) => one.labels?.length || one.getAttribute('aria-label') || one.type === 'hidden'"
    assert shown.value(f"[...document.querySelectorAll('input,select')].every({named})")
    pictures = (
        "[...document.querySelectorAll('svg')].every((one) => one.closest('[aria-hidden=true]') || one.ariaLabel)"
    )
    assert shown.value(pictures)


def test_the_keyboard_reaches_all_of_it(shown: Page, address: str) -> None:
    shown.open(address)
    seen = []
    while (at := shown.value("document.activeElement.innerText || document.activeElement.ariaLabel || ''")) not in seen[
        1:
    ]:
        seen.append(at)
        shown.press("Tab")
    for name in ("To the content", "run", "samples/s", "first-1", "compare first-1", "Compare those chosen"):
        assert name in seen


def test_a_column_is_sorted_and_runs_are_compared_by_keyboard(shown: Page, address: str) -> None:
    shown.open(address)
    shown.value("[...document.querySelectorAll('thead a')].find((one) => one.innerText === 'samples/s').focus()")
    shown.press_and_load("Enter", "\r")
    assert shown.value("document.querySelector('[aria-sort=ascending]').innerText").startswith("samples/s")
    assert shown.value("document.querySelectorAll('tbody a')[0].innerText") == "second-2"
    for name in ("first-1", "second-2"):
        shown.value(f"document.querySelector('[aria-label=\"compare {name}\"]').focus()")
        shown.press(" ", " ")
    shown.value("[...document.querySelectorAll('button')].at(-1).focus()")
    shown.press_and_load("Enter", "\r")
    assert shown.value("document.querySelector('h1').innerText") == "Comparison of 2 runs"
