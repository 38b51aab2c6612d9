"""Where ranks that torchrun has started find each other, also those that it starts again."""

import hashlib
import os
import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_HELLO, _WORD, _HEARD, _GO = "hotloop/hello-{}", "hotloop/word-{}", "hotloop/heard-{}", "hotloop/go-{}"
_LOOK_SECONDS, _AT_ONCE = 0.05, 64
"""Of more ranks each looks less often: one process answers all of them."""


def agents_store(timeout: timedelta) -> Store | None:
    """A part of the store of torchrun's agent that is these ranks' own; None where it has none for them.

    The agent keeps one store for all its starts: ranks that are started again would find the addresses of those before
    them in it, and wait for these. https://github.com/pytorch/pytorch/issues/135712

    Raises:
        DistError, RuntimeError: it cannot be reached, or others have not come in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port, size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(host, port, size, is_master=False, timeout=timeout)
    return PrefixStore(f"hotloop/{agreed(store, int(os.environ['RANK']), size, timeout)}", store)


def agreed(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A word that these ranks have agreed on, whatever others have left there before.

    Each says who it is. The first one makes a word of all that, anew whenever it changes, and tells it to each, until
    all have heard the same one.

    Raises:
        DistStoreError: not all have come in time.
    """
    own = uuid.uuid4().hex
    store.set(_HELLO.format(rank), own)
    until = time.monotonic() + timeout.total_seconds()
    word = ""
    while time.monotonic() < until:
        if rank == 0:
            word = _told(store, size, word)
            heard = [_HEARD.format(each) for each in range(1, size)]
            if word and store.check(heard) and all(one.decode() == word for one in store.multi_get(heard)):
                store.set(_GO.format(word), "")
                return word
        elif store.check([_WORD.format(own)]):
            word = store.get(_WORD.format(own)).decode()
            store.set(_HEARD.format(rank), word)
            if store.check([_GO.format(word)]):
                return word
        time.sleep(_LOOK_SECONDS * max(1.0, size / _AT_ONCE))
    raise DistStoreError(f"{size} ranks have not met within {timeout.total_seconds():.0f} s")


def _told(store: Store, size: int, before: str) -> str:
    """The word of those who have said hello, told to each; empty until all have."""
    keys = [_HELLO.format(rank) for rank in range(size)]
    if not store.check(keys):
        return ""
    names = [name.decode() for name in store.multi_get(keys)]
    word = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
    for name in names if word != before else ():
        store.set(_WORD.format(name), word)
    return word
