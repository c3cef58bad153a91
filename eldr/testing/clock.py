"""A clock that moves only when told."""


class FakeClock:
    """Stands in for `time.monotonic`: call it for the time, `advance` to move it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        self.now_s += seconds
