"""The number of the step, on the device: captured steps look up and write down by it."""

import torch


class Counter:
    """Counts steps on the device and on the host alike, from 0 to `CAPACITY` - 1 and again.

    Attributes:
        position: where the device stands, int64 (1,).
        on_host: where the host stands, which queues work ahead of the device.
    """

    CAPACITY = 4096

    def __init__(self, device: torch.device) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.on_host = 0

    def advance(self) -> None:
        """Count a step on the device; a part of the step."""
        self.position.add_(1)

    def back(self) -> None:
        """Put the device where the host stands, after a step that broke off."""
        self.position.fill_(self.on_host)

    def advanced(self) -> None:
        """Count it on the host, which has queued it."""
        self.on_host += 1
        if self.on_host == self.CAPACITY:
            self.position.zero_()
            self.on_host = 0
