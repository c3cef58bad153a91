"""Settings of a demo run."""

from dataclasses import dataclass

from eldr.routing.registry import POLICIES

DEFAULT_POLICIES = ("round-robin", "jsq", "locality-band", "union-cost")
FEWEST_CALIBRATION_PROMPTS = 20
"""A fit chooses its transform from no fewer."""
IN_FLIGHT_PER_DECODER = 24
"""Below about 16 a batch, requests hardly share experts and no routing can gain anything."""


class SettingsError(ValueError):
    """A setting out of range; the message names field, value and range."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """How large the fleet and the workload are.

    `requests` are sent per policy and round, `in_flight` of them at the same time (0: 24 per decoder). No
    further round of all policies begins that would end later than `rounds_limit_s` seconds after the first
    began, by the mean of those before. `width` is the experts' width of the served model, 0 for the model as
    it was trained. Prompts are cut to their last `prompt_tokens` tokens: by default one more than whole KV
    blocks, so that a repeated prompt leaves one token to compute and prefill does not hold up what is
    compared. Raises SettingsError.
    """

    prefill: int = 1
    decode: int = 4
    rounds: int = 3
    rounds_limit_s: int = 540
    requests: int = 234
    in_flight: int = 0
    output_tokens: int = 64
    prompt_tokens: int = 97
    calibration: int = 208
    width: int = 1024
    policies: tuple[str, ...] = DEFAULT_POLICIES
    seed: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("prefill", 1, 64),
            ("decode", 1, 64),
            ("rounds", 1, 100),
            ("rounds_limit_s", 1, 86_400),
            ("requests", 1, 100_000),
            ("in_flight", 0, 4096),
            ("output_tokens", 2, 512),
            ("prompt_tokens", 1, 448),
            ("calibration", max(FEWEST_CALIBRATION_PROMPTS, self.decode), 100_000),
            ("width", 0, 65_536),
            ("seed", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{name} must be {low} to {high}, got {value}")
        if not self.policies:
            raise SettingsError("policies must name at least one policy")
        for policy in self.policies:
            if policy not in POLICIES:
                raise SettingsError(
                    f"policies: unknown policy {policy!r}; known: {', '.join(sorted(POLICIES))}"
                )
        if len(set(self.policies)) < len(self.policies):
            raise SettingsError(f"policies must be different, got {', '.join(self.policies)}")

    @property
    def concurrency(self) -> int:
        """Requests in flight."""
        return self.in_flight or IN_FLIGHT_PER_DECODER * self.decode
