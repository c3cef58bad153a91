"""Gate sums stand around vLLM's routers, and are refused where they would not be what they say."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from eldr.engine.gate_capture import GateCapture, GateError

pytestmark = pytest.mark.engine

EXPERTS, TOP_K = 8, 2


def runner(monolithic: bool = False, **router: Any) -> Any:
    """As much of a MoERunner as the capture looks at, with a router of vLLM."""
    quant_method = SimpleNamespace(is_monolithic=monolithic)
    return SimpleNamespace(
        router=CPURouter(TOP_K, EXPERTS, **router), routed_experts=SimpleNamespace(quant_method=quant_method)
    )


def select(one: Any, logits: torch.Tensor) -> Any:
    return one.router.select_experts(hidden_states=torch.zeros(len(logits), 4), router_logits=logits)


@pytest.mark.parametrize(
    ("settings", "score"),
    [
        ({}, lambda logits: np.exp(logits) / np.exp(logits).sum(1, keepdims=True)),
        (
            {"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
            lambda logits: 1 / (1 + np.exp(-logits)),
        ),
    ],
)
def test_sums_are_those_of_the_models_own_score_and_of_its_logits(settings: Any, score: Any) -> None:
    layers = {1: runner(**settings), 3: runner(**settings)}
    capture = GateCapture(layers, EXPERTS)
    capture.begin()
    chunks = {layer: [torch.randn(5, EXPERTS), torch.randn(2, EXPERTS)] for layer in layers}
    for step in range(2):
        for layer, one in layers.items():
            select(one, chunks[layer][step])
    probability, logit = capture.sums(7)
    for row, layer in enumerate(layers):
        logits = torch.cat(chunks[layer]).double().numpy()
        np.testing.assert_allclose(probability[row], score(logits).sum(0), rtol=1e-6)
        np.testing.assert_allclose(logit[row], logits.sum(0), rtol=1e-5, atol=1e-5)


def test_routing_is_the_same_with_and_without_the_capture() -> None:
    one, logits = runner(), torch.randn(6, EXPERTS)
    before = select(one, logits)
    capture = GateCapture({0: one}, EXPERTS)
    within = select(one, logits)
    capture.close()
    after = select(one, logits)
    for weights, ids in (within, after):
        assert torch.equal(weights, before[0])
        assert torch.equal(ids, before[1])
    assert "select_experts" not in vars(one.router)


def test_logits_that_are_a_view_with_padded_rows_are_read_right() -> None:
    """Case 1.22."""
    one, padded = runner(), torch.randn(4, EXPERTS + 3)
    capture = GateCapture({0: one}, EXPERTS)
    capture.begin()
    select(one, padded[:, :EXPERTS])
    np.testing.assert_allclose(capture.sums(4)[1][0], padded[:, :EXPERTS].sum(0), rtol=1e-5)


def test_every_prompt_begins_at_zero() -> None:
    one = runner()
    capture = GateCapture({0: one}, EXPERTS)
    for tokens in (3, 4):
        capture.begin()
        select(one, torch.ones(tokens, EXPERTS))
        assert capture.sums(tokens)[1].tolist() == [[tokens] * EXPERTS]


def test_logits_of_another_width_end_the_prompt_and_not_the_engine() -> None:
    """Zero experts: the gate knows more than the model's experts."""
    one = runner()
    capture = GateCapture({0: one}, EXPERTS - 1)
    capture.begin()
    select(one, torch.ones(3, EXPERTS))
    with pytest.raises(GateError, match=r"logits are \(3, 8\), expected \[tokens, 7\]"):
        capture.sums(3)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (lambda: runner(monolithic=True), "layer 4: its kernel routes by itself"),
        (lambda: runner(scoring_func="tanh"), "layer 4: CPURouter has the scoring function tanh"),
        (
            lambda: runner(custom_routing_function=lambda **_: None),
            "layer 4: CPURouter has the scoring function softmax or one of its own",
        ),
    ],
)
def test_a_layer_whose_gate_is_not_seen_or_not_known_is_refused_by_name(one: Any, message: str) -> None:
    with pytest.raises(GateError, match=message):
        GateCapture({4: one()}, EXPERTS)


def test_a_process_without_moe_layers_is_refused() -> None:
    with pytest.raises(GateError, match="runs no MoE layer"):
        GateCapture({}, EXPERTS)
