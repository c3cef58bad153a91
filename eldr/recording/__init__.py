"""Drives live workers with a prompts file and keeps the expert counts that the engines report."""

from eldr.recording.prompts_file import Prompt, PromptsError, read_prompts
from eldr.recording.recorder import RecordError, RecordSettings, Targets, record

__all__ = [
    "Prompt",
    "PromptsError",
    "RecordError",
    "RecordSettings",
    "Targets",
    "read_prompts",
    "record",
]
