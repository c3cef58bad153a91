"""The prompts file of a calibration or a workload."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class PromptsError(ValueError):
    """A prompts file that cannot be used; the message names the line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `domain` is "" where the file gives none; `numbered` where the id is only its line's number."""

    id: str
    text: str
    domain: str = ""
    numbered: bool = field(default=False, compare=False)


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts in the order of the file.

    A name that ends in `.jsonl` says one JSON object a line, `{"text", "id"?, "domain"?}`; anything else is
    one prompt a line. Prompts without an id get the number of their line. Empty lines are skipped.

    Raises PromptsError for lines that are not such prompts, for ids and texts that appear twice (a prompt that
    counts twice would bend the fit), and for a file without prompts.
    """
    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    prompts: list[Prompt] = []
    id_lines: dict[str, int] = {}
    text_lines: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path.name}: not UTF-8 at byte {error.start}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        prompt = parse(line, number, where)
        if prompt.id in id_lines:
            raise PromptsError(f"{where}: id {prompt.id!r} is already that of line {id_lines[prompt.id]}")
        if prompt.text in text_lines:
            raise PromptsError(f"{where}: the same text as line {text_lines[prompt.text]}")
        id_lines[prompt.id] = text_lines[prompt.text] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptsError(f"{path.name} holds no prompts")
    return prompts


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Hash of ids, texts and domains in their order, in hex."""
    rows = [[prompt.id, prompt.text, prompt.domain] for prompt in prompts]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def refuse_overlap(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    """Raises PromptsError, with the number and the first of them, for prompts that are held out.

    The same prompt has the same text, or the same id where both files give ids.
    """
    texts = {prompt.text: prompt.id for prompt in held_out}
    ids = {prompt.id for prompt in held_out if not prompt.numbered}
    shared = [
        (prompt.id, texts.get(prompt.text))
        for prompt in prompts
        if prompt.text in texts or (not prompt.numbered and prompt.id in ids)
    ]
    if shared:
        mine, theirs = shared[0]
        why = f"has the id {mine!r} of a held-out one" if theirs is None else f"is the held-out {theirs!r}"
        raise PromptsError(
            f"{len(shared)} of {len(prompts)} prompts are held out too, so they would judge themselves: "
            f"prompt {mine!r} {why}"
        )


def _parse_text(line: str, number: int, _where: str) -> Prompt:
    return Prompt(str(number), line.rstrip("\r"), numbered=True)


def _parse_json(line: str, number: int, where: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise PromptsError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise PromptsError(f"{where}: must be a JSON object, got {type(record).__name__}")
    text = record.get("text")
    if not isinstance(text, str) or not text:
        raise PromptsError(f"{where}: text must be a text that is not empty")
    domain = record.get("domain") or ""
    if not isinstance(domain, str):
        raise PromptsError(f"{where}: domain must be a text, got {type(domain).__name__}")
    given = record.get("id", number)
    if not isinstance(given, (str, int)) or given == "":
        raise PromptsError(f"{where}: id must be a text or a number, got {given!r}")
    return Prompt(str(given), text, domain, numbered="id" not in record)
