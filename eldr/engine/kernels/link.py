"""How small vectors travel between host and device without anyone waiting for them."""

from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the device's order of work."""

    def set(self) -> None:
        """Moves the mark behind everything that was started so far."""
        ...

    def reached(self) -> bool:
        """Whether the device is past the mark. Never waits."""
        ...

    def wait(self) -> None:
        """Waits until the device is past the mark. Any thread."""
        ...


class Link(Protocol):
    """One device and its current order of work. Every copy is ordered with the kernels around it."""

    device: torch.device

    def host_buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to by itself."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy; host memory must stay untouched until a mark behind it is reached."""
        ...

    def new_mark(self) -> Mark:
        """A mark that was not set yet counts as reached."""
        ...


class _EventMark:
    def __init__(self, device_type: str) -> None:
        # A blocking event sleeps where a plain one spins on the driver's lock.
        self._event = (
            torch.cuda.Event(blocking=True)
            if device_type == "cuda"
            else torch.Event(torch.device(device_type))
        )

    def set(self) -> None:
        self._event.record()

    def reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class StreamLink:
    """The device's current stream: pinned host memory, non-blocking copies, events."""

    def __init__(self, device_type: str) -> None:
        self.device = torch.device(device_type)

    def host_buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(length, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A non-blocking copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def new_mark(self) -> Mark:
        """An event of the device."""
        return _EventMark(self.device.type)
