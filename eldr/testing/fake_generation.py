"""What a fake engine makes of one request: its prompt as text, its tokens, its counts."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eldr.testing.faults import Fault


@dataclass(slots=True)
class Generation:
    """One request in the making. `history` are output tokens that its prompt holds already."""

    path: str
    body: Mapping[str, Any]
    rendered: str
    request_id: str
    fault: Fault | None
    history: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    finish: str = "length"

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def copies(self) -> int:
        """Choices of the answer: `n` for each prompt, all alike."""
        prompt = self.body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return prompts * (self.body.get("n") or 1)

    @property
    def prompt_tokens(self) -> int:
        return max(1, len(self.rendered.split())) + len(self.history)

    def token(self, index: int) -> str:
        """The output token at a position, counted from the end of the text's own prompt."""
        seed = self.body.get("seed", 0) if self.body.get("temperature") != 0 else 0
        return hashlib.sha256(f"{self.rendered}|{seed}|{index}".encode()).hexdigest()[:4] + " "

    def usage(self, tokens: int) -> dict[str, int]:
        """The usage object after so many output tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }


def token_id(token: str) -> int:
    """The id that stands for a word of a prompt or a token."""
    return int(hashlib.sha256(token.encode()).hexdigest()[:4], 16)


def render(path: str, body: Mapping[str, Any]) -> str:
    """The prompt as text: token ids as numbers, a chat with its tools in front."""
    if path.endswith("/chat/completions"):
        tools = json.dumps(body["tools"], sort_keys=True) if body.get("tools") else ""
        return tools + " ".join(f"<{m['role']}> {m.get('content') or ''}" for m in body["messages"])
    prompt = body["prompt"]
    return prompt if isinstance(prompt, str) else " ".join(str(part) for part in prompt)
