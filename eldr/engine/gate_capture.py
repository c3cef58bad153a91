"""Sums of what the gate gave each expert over a prompt, for transforms of probabilities and logits.

vLLM's capture callback shows the selected ids only. Every layer's router is asked through `select_experts` with the
gate's logits, so this stands around that method of the instance: a seam, and nothing of vLLM is changed. It is for an
eager engine in this process that runs one prompt at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

GateArray = npt.NDArray[np.float32]

Score = Callable[[torch.Tensor], torch.Tensor]

SCORES: Mapping[str, Score] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}
"""The scoring functions of vLLM's routers, over all experts of a token [tokens, experts].

They are what the model makes of its logits before a correction bias, groups, top-k, renormalisation and scaling.
Softmax sums to 1 for each token, so in every layer the sums over a prompt add up to its tokens; the others do not.
"""


class GateError(RuntimeError):
    """Gate sums cannot be had here; the message names the layer and why."""


class GateCapture:
    """Stands around the routers of `runners` (MoE layer index to vLLM's MoERunner) until `close`.

    Sums are kept in float64 on the router's device. Raises GateError for a layer whose routing never passes through
    `select_experts`, and for one whose scoring function is not known.
    """

    def __init__(self, runners: Mapping[int, Any], experts: int) -> None:
        if not runners:
            raise GateError("this process runs no MoE layer: gate sums need tensor parallel size 1")
        self._experts = experts
        self._routers: list[Any] = []
        self._scores: list[str] = []
        self._sums: list[torch.Tensor | None] = [None] * len(runners)
        self._tokens = [0] * len(runners)
        self._problem = ""
        for layer, runner in runners.items():
            router = runner.router
            if runner.routed_experts.quant_method.is_monolithic:
                raise GateError(
                    f"layer {layer}: its kernel routes by itself, so the gate's logits are not seen"
                )
            scoring = str(getattr(router, "scoring_func", None))
            if scoring not in SCORES or getattr(router, "custom_routing_function", None) is not None:
                raise GateError(
                    f"layer {layer}: {type(router).__name__} has the scoring function {scoring} or one of its own; "
                    f"gate sums are defined for {', '.join(SCORES)}"
                )
            self._routers.append(router)
            self._scores.append(scoring)
        for row, router in enumerate(self._routers):
            router.select_experts = self._around(row, router.select_experts)

    @property
    def scoring(self) -> str:
        """Names of the layers' scoring functions."""
        return ", ".join(sorted(set(self._scores)))

    def begin(self) -> None:
        """Forgets everything; the next prompt follows."""
        self._sums = [None] * len(self._routers)
        self._tokens = [0] * len(self._routers)
        self._problem = ""

    def sums(self, tokens: int) -> tuple[GateArray, GateArray]:
        """Sums of scores and of logits since `begin`, float32 [layers, experts].

        Raises GateError where a layer did not see exactly `tokens` tokens.
        """
        if self._problem:
            raise GateError(self._problem)
        for row, seen in enumerate(self._tokens):
            if seen != tokens:
                raise GateError(f"MoE layer number {row} saw {seen} tokens of a prompt of {tokens}")
        whole = torch.stack([part for part in self._sums if part is not None], dim=1).float().cpu().numpy()
        return whole[0], whole[1]

    def close(self) -> None:
        """Takes the routers' own methods back."""
        while self._routers:
            del self._routers.pop().select_experts

    def _around(self, row: int, select: Callable[..., Any]) -> Callable[..., Any]:
        def select_experts(
            hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            self._add(row, router_logits)
            return select(hidden_states, router_logits, *args, **kwargs)

        return select_experts

    def _add(self, row: int, router_logits: torch.Tensor) -> None:
        if router_logits.ndim != 2 or router_logits.shape[1] != self._experts:
            # Never an exception inside the model's forward pass.
            found = tuple(router_logits.shape)
            self._problem = f"MoE layer number {row}: logits are {found}, expected [tokens, {self._experts}]"
            return
        with torch.no_grad():
            logits = router_logits.double()
            part = torch.stack([SCORES[self._scores[row]](logits).sum(0), logits.sum(0)])
            known = self._sums[row]
            self._sums[row] = part if known is None else known + part
        self._tokens[row] += len(logits)
