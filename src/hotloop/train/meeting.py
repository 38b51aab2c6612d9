"""Where ranks that torchrun has started find each other, also those that it starts again."""

import hashlib
import json
import os
import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_HELLO, _HEARD, _LIST, _GO = "hotloop/hello-{}", "hotloop/heard-{}", "hotloop/list", "hotloop/go"
_LOOK_SECONDS = 0.05


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

    Each says who it is. The first one makes a list of that, anew whenever it changes, until all have found themselves
    in the same one.

    Raises:
        DistStoreError: not all have come in time.
    """
    own = uuid.uuid4().hex
    store.set(_HELLO.format(rank), own)
    until = time.monotonic() + timeout.total_seconds()
    word = ""
    while time.monotonic() < until:
        if rank == 0:
            word = _listed(store, size, word)
            heard = [_HEARD.format(each) for each in range(size)]
            if word and store.check(heard[1:]) and all(one.decode() == word for one in store.multi_get(heard[1:])):
                store.set(_GO, word)
                return word
        elif store.check([_LIST]):
            text = store.get(_LIST).decode()
            names = json.loads(text)
            if len(names) == size and names[rank] == own:
                word = _word(text)
                store.set(_HEARD.format(rank), word)
                if store.check([_GO]) and store.get(_GO).decode() == word:
                    return word
        time.sleep(_LOOK_SECONDS)
    raise DistStoreError(f"{size} ranks have not met within {timeout.total_seconds():.0f} s")


def _listed(store: Store, size: int, before: str) -> str:
    """The word for who has said hello; empty until all have."""
    keys = [_HELLO.format(rank) for rank in range(size)]
    if not store.check(keys):
        return ""
    text = json.dumps([name.decode() for name in store.multi_get(keys)])
    word = _word(text)
    if word != before:
        store.set(_LIST, text)
    return word


def _word(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
