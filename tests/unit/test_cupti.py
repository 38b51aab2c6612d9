"""Whether the profiler's hold on a GPU ends with its trace."""

from types import SimpleNamespace

import pytest

from hotloop.profile.cupti import detach_after_tracing


@pytest.mark.parametrize(
    ("cuda", "before", "after"),
    [
        ("13.0", {}, {"TEARDOWN_CUPTI": "1"}),
        ("12.6", {}, {"TEARDOWN_CUPTI": "1"}),
        ("12.4", {}, {}),
        ("11.8", {}, {}),
        (None, {}, {}),
        ("13.0", {"TEARDOWN_CUPTI": "0"}, {"TEARDOWN_CUPTI": "0"}),
    ],
)
def test_cupti_leaves_where_that_is_safe_and_not_refused(
    cuda: str | None, before: dict[str, str], after: dict[str, str]
) -> None:
    torch, environment = SimpleNamespace(version=SimpleNamespace(cuda=cuda)), dict(before)
    detach_after_tracing(torch, environment)
    assert environment == after
