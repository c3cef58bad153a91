"""One engine serves both legs of every prompt; what it cannot run or count is named."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_two_leg_worker import EXPERTS, LAYERS, signature

from eldr.recording import Prompt, RecordError, RecordSettings
from eldr.recording.offline import offline_engine, record_offline

PROMPTS = [Prompt(str(n), "x" * n, "law") for n in range(1, 6)]
SETTINGS = RecordSettings(output_tokens=4, in_flight=2, seed=40)


class Engine:
    """Counts that follow from the prompt's length. `log` is what it was asked for, in order."""

    moe_layers = (1, 4)
    max_model_len = 12

    def __init__(self):
        self.log = []
        self.requests = {}

    def encode(self, text, last=None):
        ids = list(text)
        return ids if last is None else ids[-last:]

    def request(self, request_id, token_ids, **sampling):
        self.requests[request_id] = sampling
        return SimpleNamespace(id=request_id, tokens=len(token_ids), decode=sampling["max_tokens"] - 1)

    def run(self, requests):
        for one in reversed(list(requests)):
            self.log.append(("run", one.tokens))
            decode = signature(one.tokens, one.decode) if one.decode else None
            yield SimpleNamespace(id=one.id, prefill=signature(one.tokens, one.tokens), decode=decode)

    def gate_sums(self, ids):
        self.log.append(("gate", len(ids)))
        sums = np.full((LAYERS, EXPERTS), len(ids), np.float32)
        return sums, -sums

    def close(self):
        """Nothing to end."""


def test_rows_follow_the_prompts_whatever_order_they_end_in():
    engine, seen, kept = Engine(), [], []
    counts = record_offline(PROMPTS, engine, SETTINGS, done=seen.append, keep=kept.append)
    assert counts.ids == tuple("12345")
    assert counts.moe_layers == (1, 4)
    assert counts.prompt_len.tolist() == [1, 2, 3, 4, 5]
    assert counts.decode_tokens.tolist() == [3] * 5
    assert counts.gate_logit is None
    assert seen == [1, 2, 3, 4, 5]
    assert [row.id for row in kept] == list("54321")
    assert engine.requests["2"] == {"max_tokens": 4, "temperature": 0.8, "seed": 42, "ignore_eos": True}


def test_gate_sums_of_a_group_are_taken_alone_before_it_runs_together():
    engine = Engine()
    counts = record_offline(PROMPTS, engine, SETTINGS, gate=True)
    assert engine.log == [
        *[("gate", 1), ("gate", 2), ("run", 2), ("run", 1)],
        *[("gate", 3), ("gate", 4), ("run", 4), ("run", 3)],
        *[("gate", 5), ("run", 5)],
    ]
    assert counts.gate_probability[:, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert counts.gate_logit[:, 0, 0].tolist() == [-1, -2, -3, -4, -5]


def test_finished_prompts_are_not_run_again_and_seeds_stay_with_the_position():
    kept = []
    record_offline(PROMPTS, Engine(), SETTINGS, keep=kept.append)
    engine = Engine()
    finished = {row.id: row for row in kept if row.id != "3"}
    counts = record_offline(PROMPTS, engine, SETTINGS, finished=finished)
    assert engine.log == [("run", 3)]
    assert engine.requests["2"]["seed"] == 42
    assert counts.prompt_len.tolist() == [1, 2, 3, 4, 5]


def test_one_output_token_decodes_nothing():
    """Case 1.14."""
    counts = record_offline(PROMPTS, Engine(), RecordSettings(output_tokens=1))
    assert counts.decode_tokens.tolist() == [0] * 5
    assert counts.prompt_len.tolist() == [1, 2, 3, 4, 5]


def test_a_prompt_that_does_not_fit_is_named_before_anything_runs():
    engine = Engine()
    with pytest.raises(RecordError, match="prompt 'long' has 9 tokens, the model takes 1 to 8 beside 4"):
        record_offline([*PROMPTS, Prompt("long", "x" * 9)], engine, SETTINGS)
    assert engine.log == []
    cut = RecordSettings(output_tokens=4, prompt_tokens=8)
    assert record_offline([Prompt("long", "x" * 9)], engine, cut).prompt_len.tolist() == [8]


def test_what_the_engine_could_not_count_ends_the_run():
    class Broken(Engine):
        def gate_sums(self, ids):
            raise RuntimeError("MoE layer number 1 saw 2 tokens of a prompt of 3")

    with pytest.raises(RecordError, match="MoE layer number 1 saw 2 tokens of a prompt of 3"):
        record_offline(PROMPTS, Broken(), SETTINGS, gate=True)


def test_without_vllm_the_engine_says_what_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "eldr.engine.offline", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        RecordError, match="'vllm' is missing: run eldr with the Python that serves your models"
    ):
        offline_engine("m", in_flight=1, gate=False, arguments={})
