"""Names and passwords of those who may read, by bcrypt's hashes."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from threading import BoundedSemaphore, Lock

_WAITING = 4
_DELAY_SECONDS = 1.0


class Busy(Exception):
    """So many passwords are being tried that this one is not."""


class Passwords:
    """Says whether a password is right. For any thread.

    bcrypt is made to be slow. So one is computed at a time, few may wait, who was wrong waits longer, and what was
    right is remembered as a hash whose key never leaves this process.

    Args:
        hashes: bcrypt's, by name.
        check: says whether a password belongs to a hash: `bcrypt.checkpw`.
    """

    def __init__(
        self, hashes: Mapping[str, str], check: Callable[[bytes, bytes], bool],
        wait: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._hashes, self._check, self._wait = dict(hashes), check, wait
        self._key = secrets.token_bytes(32)
        self._right: dict[str, bytes] = {}
        self._slots, self._lock = BoundedSemaphore(_WAITING), Lock()

    def are_right(self, name: str, password: str) -> bool:
        """Whether they belong together; takes a second more if not.

        Raises:
            Busy: too many others are being tried.
        """
        digest = hmac.digest(self._key, f"{name}\0{password}".encode(), hashlib.sha256)
        if hmac.compare_digest(self._right.get(name, b""), digest):
            return True
        if not self._slots.acquire(blocking=False):
            raise Busy
        try:
            if self._belongs(name, password):
                self._right[name] = digest
                return True
            self._wait(_DELAY_SECONDS)
            return False
        finally:
            self._slots.release()

    def _belongs(self, name: str, password: str) -> bool:
        # A name that is not there costs as much time as one that is.
        known = self._hashes.get(name, next(iter(self._hashes.values())))
        try:
            with self._lock:
                return self._check(password.encode(), known.encode()) and name in self._hashes
        except ValueError:  # longer than bcrypt takes
            return False
