"""Ranks that are started again meet each other, and nobody who was there before."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, Store

from hotloop.train.meeting import agreed
from hotloop.train.world import _connect_when_needed

SOON = timedelta(seconds=60)


def meet(store: Store, size: int) -> str:
    with ThreadPoolExecutor(size) as pool:
        [word] = set(pool.map(lambda rank: agreed(store, rank, size, SOON), range(size)))
    return word


@pytest.mark.parametrize("sizes", [[2, 2, 2], [4, 3, 3], [1, 3, 1]])
def test_each_start_has_a_word_of_its_own(sizes: list[int]) -> None:
    store = HashStore()
    assert len({meet(store, size) for size in sizes}) == len(sizes)


def test_a_rank_that_comes_late_is_not_taken_for_the_one_before() -> None:
    """The first rank finds what an earlier second one has said, and begins with it."""
    store = HashStore()
    meet(store, 2)
    told = f"hotloop/word-{store.get('hotloop/hello-1').decode()}"
    before = store.get(told)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agreed, store, 0, 2, SOON)
        while store.get(told) == before:
            pass  # until it has told the old one
        second = pool.submit(agreed, store, 1, 2, SOON)
        assert first.result() == second.result()


def test_who_waits_alone_gives_up() -> None:
    with pytest.raises(DistStoreError, match="2 ranks have not met within 0 s"):
        agreed(HashStore(), 0, 2, timedelta(seconds=0.2))


@pytest.mark.parametrize(("ranks", "asked", "lazily"), [(64, None, None), (65, None, "1"), (65, "0", "0")])
def test_many_ranks_are_not_connected_all_with_all(
    monkeypatch: pytest.MonkeyPatch, ranks: int, asked: str | None, lazily: str | None
) -> None:
    variable = "TORCH_GLOO_LAZY_INIT"
    monkeypatch.setenv(variable, asked or "")  # restored at the end, whatever sets it meanwhile
    if asked is None:
        monkeypatch.delenv(variable)
    _connect_when_needed(ranks)
    assert os.environ.get(variable) == lazily
