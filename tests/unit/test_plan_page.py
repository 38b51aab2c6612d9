"""The page of a plan: what is joined by a line, and what is named."""

import re
from collections.abc import Sequence

from hotloop.pages.plan import render_plan

PARTS = {"weights": 3e9, "activations": 5e9, "averaged": 0.0}
ROW = ("aws big", "us-east-1", "8 × H100", "ddp", "7.0 GiB", "1 h 00 min", "98.00", "34.00")
WAY = ("2", "fsdp", "bf16", "blocks", "16", "3.5 GiB", "yes", "120 ms")
LINES = ["gpt2: 3 weights", "  memory   7 GiB"]
OLD = ["note: 3 prices are older than 90 days"]


def page(costs: list[tuple[float, float, str]], ways: Sequence[Sequence[str]] = (WAY,)) -> str:
    curve = [(60.0, 0.9), (600.0, 0.95)]
    return render_plan("gpt2 <b>", LINES, PARTS, ways, [ROW], costs, ["spot pays"], curve, OLD)


def test_the_page_shows_memory_prices_and_the_table_and_escapes_names() -> None:
    text = page([(1.0, 98.0, "aws big"), (3.0, 40.0, "aws small"), (3.0, 90.0, "aws dear")])
    assert "gpt2 &lt;b&gt;" in text
    assert "<b>" not in text
    assert "averaged" not in text, "parts of nothing are not named"
    for words in ("weights 2.8 GiB", "98.00", "spot pays"):
        assert words in text
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?https?:""", text), "nothing is loaded from elsewhere"


def test_other_ways_and_old_prices_are_told_as_in_the_text() -> None:
    text = page([])
    for words in (*WAY, *OLD):
        assert words in text
    assert "Other ways" not in page([], ways=())


def test_only_instances_that_none_outdoes_are_joined() -> None:
    text = page([(3.0, 40.0, "small"), (1.0, 98.0, "big"), (3.0, 90.0, "dear"), (2.0, 99.0, "worst")])
    chart = text[text.index("price of the whole training") : text.index("Price of the whole training")]
    drawn = list(re.findall(r'<path d="([^"]*)" clip-path[^>]*stroke: #(?:2563eb|ea580c)', chart))
    assert [path.count("L") for path in drawn] == [1], "one line, from the fastest to the cheapest"


def test_without_prices_there_is_no_chart_of_them() -> None:
    assert "Price and time" not in page([])
