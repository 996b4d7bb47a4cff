"""What a device can do at best: one plain copy of as many bytes, timed in the run that compares itself with it."""

from __future__ import annotations

import time

import torch


class DeviceFloor:
    """Two buffers and a copy between them. On a CPU it is torch's copy on one thread or more."""

    def __init__(self, device: str, size_bytes: int) -> None:
        """Allocate and warm up."""
        self._cuda = device != "cpu"
        self._source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        self._target = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self.copy_s()

    def copy_s(self) -> float:
        """Return how long one copy takes, between two events on the device."""
        if not self._cuda:
            started_s = time.perf_counter()
            self._target.copy_(self._source)
            return time.perf_counter() - started_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._source.device)
        start.record()
        self._target.copy_(self._source)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def wait_for_device(device: str) -> None:
    """Wait until everything queued on a device is over."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def device_name(device: str) -> str:
    """Return what the device calls itself."""
    return device if device == "cpu" else torch.cuda.get_device_name(device)
