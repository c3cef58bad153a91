"""Reads the token ids out of a completion's event stream. Pure."""

import json
from dataclasses import dataclass, field


class StreamError(Exception):
    """The stream reported an error or ended in a way that no completion does."""


@dataclass(slots=True)
class TokenStream:
    """Collects one completion from the lines of its stream; times are the caller's clock in seconds."""

    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    ended: bool = False

    def feed(self, line: bytes, now_s: float) -> None:
        """Takes one line. Raises StreamError where it reports an error or is no event."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise StreamError(f"not JSON: {data[:200]!r}") from error
        if "error" in event:
            raise StreamError(f"error in the stream: {event['error']}")
        for choice in event.get("choices", ()):
            if choice.get("prompt_token_ids"):
                self.prompt_token_ids = tuple(choice["prompt_token_ids"])
            tokens = choice.get("token_ids") or ()
            if tokens:
                self.last_s = now_s
                if not self.token_ids:
                    self.first_s = now_s
                self.token_ids += tokens
