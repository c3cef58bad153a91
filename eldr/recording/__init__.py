"""Expert counts that engines report: of a prompts file run through them, or of live traffic."""

from eldr.recording.prompts_file import Prompt, PromptsError, prompts_sha256, read_prompts, refuse_overlap
from eldr.recording.recorder import RecordError, RecordSettings, Targets, record

__all__ = [
    "Prompt",
    "PromptsError",
    "RecordError",
    "RecordSettings",
    "Targets",
    "prompts_sha256",
    "read_prompts",
    "record",
    "refuse_overlap",
]
