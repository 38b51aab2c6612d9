"""A gate that loaders' threads pass, and that is closed while nobody else may draw random numbers or use the card."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Open as a rule: passing it takes 3 us."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = 0

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Go through, once it is open; whoever closes it waits until this ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self, patience: float) -> Iterator[None]:
        """Close it, and wait so many seconds at most until nobody is inside."""
        with self._changed:
            self._closed += 1
            self._changed.wait_for(lambda: not self._inside, patience)
        try:
            yield
        finally:
            with self._changed:
                self._closed -= 1
                self._changed.notify_all()


LOADING = Gate()
"""What is inside asks a loader of somebody else's for its next batch, or has a decoder at work."""
PATIENCE_SECONDS = 10.0
"""For what is inside."""
