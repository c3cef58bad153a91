"""What a demo run found, as the JSON that others read and the table that people read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from eldr.demo.compare import OutputCheck, SignatureCheck
from eldr.demo.measure import PolicyFigures
from eldr.demo.settings import DemoSettings
from eldr.demo.step_log import StepSample


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a run found."""

    vllm_version: str
    policies: Mapping[str, PolicyFigures]
    outputs: OutputCheck
    signatures: SignatureCheck
    prefix_hit_share: float
    settings: DemoSettings = field(default_factory=DemoSettings)
    steps: Mapping[str, tuple[StepSample, ...]] = field(default_factory=dict)
    """By policy."""

    @property
    def passed(self) -> bool:
        """No request failed, outputs are those of an ordinary server, signatures those of the reference."""
        errors = sum(figures.errors for figures in self.policies.values())
        return errors == 0 and self.outputs.identical and self.signatures.exact

    def as_json(self) -> dict[str, Any]:
        """The content of `--json FILE`. What was not measured is null."""
        return {
            "vllm_version": self.vllm_version,
            "policies": {
                name: {
                    "tpot_ms": {
                        "p50": _number(figures.tpot_p50_ms),
                        "p95": _number(figures.tpot_p95_ms),
                        "p99": _number(figures.tpot_p99_ms),
                    },
                    "ttft_ms": {"p50": _number(figures.ttft_p50_ms)},
                    "union_mean": _number(figures.union_mean),
                    "cpu_ms_per_token": _number(figures.cpu_ms_per_token),
                    "requests": figures.requests,
                    "errors": figures.errors,
                }
                for name, figures in self.policies.items()
            },
            "outputs_identical": self.outputs.identical,
            "signatures_exact": self.signatures.exact,
            "checked": {"outputs": self.outputs.checked, "signatures": self.signatures.checked},
            "workload": {
                "prefill": self.settings.prefill,
                "decode": self.settings.decode,
                "requests": self.settings.requests,
                "in_flight": self.settings.concurrency,
                "output_tokens": self.settings.output_tokens,
                "prompt_tokens": self.settings.prompt_tokens,
            },
            "step_samples": {
                policy: [
                    {
                        "decoder": step.worker_id,
                        "steps": step.steps,
                        "batch": round(step.batch, 3),
                        "union": round(step.union, 3),
                        "step_ms": round(step.step_ms, 4),
                    }
                    for step in steps
                ]
                for policy, steps in self.steps.items()
            },
        }

    def as_table(self) -> Table:
        """One row a policy. Percentages are the change against the first policy."""
        table = Table(title=f"policies on vLLM {self.vllm_version}", caption=self._caption(), show_lines=True)
        table.add_column("policy", no_wrap=True)
        for heading in (
            "TPOT P50\nms",
            "TPOT P95\nms",
            "TPOT P99\nms",
            "TTFT P50\nms",
            "experts\nper step",
            "CPU ms\nper token",
            "requests",
            "errors",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        base = next(iter(self.policies.values()), None)
        for name, figures in self.policies.items():
            table.add_row(
                name,
                _cell(figures, base, "tpot_p50_ms", 1),
                _cell(figures, base, "tpot_p95_ms", 1),
                _cell(figures, base, "tpot_p99_ms", 1),
                _cell(figures, base, "ttft_p50_ms", 0),
                _cell(figures, base, "union_mean", 1),
                _cell(figures, base, "cpu_ms_per_token", 2),
                str(figures.requests),
                str(figures.errors),
            )
        return table

    def _caption(self) -> str:
        outputs, signatures = self.outputs, self.signatures
        return (
            f"outputs equal those of one ordinary vLLM server: {_verdict(outputs.identical)} "
            f"({outputs.checked} checked, {outputs.ties} ties, {len(outputs.different)} different)\n"
            f"signatures equal the reference's: {_verdict(signatures.exact)} "
            f"({signatures.checked} checked, {signatures.wrong} wrong, "
            f"{self.prefix_hit_share:.0%} of prompt tokens from the prefix cache)"
        )


def _cell(figures: PolicyFigures, base: PolicyFigures | None, name: str, digits: int) -> str:
    value = getattr(figures, name)
    text = f"{value:.{digits}f}"
    if base is None or base is figures or not getattr(base, name) > 0:
        return text
    return f"{text}\n{value / getattr(base, name) - 1:+.1%}"


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _verdict(good: bool) -> str:
    return "yes" if good else "NO"
