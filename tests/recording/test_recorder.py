"""Counts of both legs are recorded as the workers report them, or the run fails and says why."""

import asyncio

import numpy as np
import pytest
from fake_two_leg_worker import LAYERS, counts_of

from eldr.recording import Prompt, RecordError, RecordSettings, Targets, record

PROMPTS = [Prompt(str(n), "x" * n, f"d{n % 2}") for n in range(1, 8)]
SETTINGS = RecordSettings(output_tokens=5, in_flight=3, seed=40)


def targets(worker, **changes):
    return Targets(**({"prefill": (worker.url,), "decode": (worker.url,), "model": "m"} | changes))


async def test_rows_follow_the_prompts_whatever_order_they_finish_in(worker):
    counts = await record(PROMPTS, targets(worker), SETTINGS)
    assert counts.ids == tuple("1234567")
    assert counts.domains == ("d1", "d0") * 3 + ("d1",)
    assert counts.fingerprint == "f"
    assert counts.moe_layers == tuple(range(LAYERS))
    np.testing.assert_array_equal(counts.prompt_len, range(1, 8))
    np.testing.assert_array_equal(counts.decode_tokens, [4] * 7)
    for row, prompt in enumerate(PROMPTS):
        length = len(prompt.text)
        np.testing.assert_array_equal(counts.prefill_counts[row], counts_of(length, length))
        np.testing.assert_array_equal(counts.decode_counts[row], counts_of(length, 4))


async def test_the_two_legs_carry_the_handoff_and_ask_for_counts(worker):
    await record(PROMPTS[:1], targets(worker), SETTINGS)
    prefill, decode = worker.bodies
    assert prefill["max_tokens"] == 1
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert decode["max_tokens"] == 5
    assert decode["kv_transfer_params"] == {
        "remote_request_id": "x",
        "do_remote_prefill": True,
        "eldr_decode_counts": True,
    }
    assert decode["seed"] == 40
    assert "seed" not in prefill


async def test_prompts_are_cut_where_a_length_is_set(worker):
    await record(PROMPTS[:1], targets(worker), RecordSettings(output_tokens=2, prompt_tokens=9))
    assert [body["truncate_prompt_tokens"] for body in worker.bodies] == [9, 9]


async def test_known_layer_indices_are_kept(worker):
    counts = await record(PROMPTS, targets(worker, moe_layers=(1, 3)), SETTINGS)
    assert counts.moe_layers == (1, 3)


async def test_a_signature_of_another_number_of_layers_than_the_workers_say_ends_the_run(worker):
    with pytest.raises(RecordError, match="prompt '1': the signature has 2 layers, the workers say 3"):
        await record(PROMPTS[:1], targets(worker, moe_layers=(1, 3, 5)), SETTINGS)


async def test_progress_counts_finished_prompts(worker):
    seen: list[int] = []
    await record(PROMPTS, targets(worker), SETTINGS, seen.append)
    assert seen == list(range(1, 8))


async def test_as_many_requests_are_in_flight_as_set_and_no_more(worker):
    worker.barrier = asyncio.Barrier(3)
    await record(PROMPTS[:6], targets(worker), SETTINGS)
    assert worker.most_busy == SETTINGS.in_flight == 3


def cut_prompt(body, reply):
    if body["kv_transfer_params"].get("do_remote_decode"):
        reply["choices"][0]["prompt_token_ids"].append(1)
    return reply


def lose_decode_token(body, reply):
    if not body["kv_transfer_params"].get("do_remote_decode"):
        reply["usage"]["completion_tokens"] += 1
    return reply


def no_params(_body, reply):
    return {**reply, "kv_transfer_params": None}


def bad_text(_body, reply):
    return {**reply, "kv_transfer_params": {"eldr_signature": "!"}}


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (cut_prompt, r"prompt '1': prefill worker .* the prompt has 2 tokens, the signature says 1"),
        (
            lose_decode_token,
            r"prompt '1': decode worker .* 6 tokens were generated, the counts say 4 .* expected 5",
        ),
        (no_params, r"has no eldr_signature; does it run the eldr connector\?"),
        (bad_text, r"eldr_signature: signature: not base64"),
        (lambda _body, _reply: {"error": "full"}, "the reply holds no choices"),
    ],
)
async def test_counts_that_do_not_add_up_end_the_run_by_name(worker, tamper, message):
    worker.tamper = tamper
    with pytest.raises(RecordError, match=message):
        await record(PROMPTS[:1], targets(worker), SETTINGS)


async def test_one_output_token_needs_no_decode_leg_and_holds_no_kv(worker):
    """Case 1.14: the prompt's counts are those of the prefill leg; of decode nothing is known."""
    counts = await record(PROMPTS, targets(worker), RecordSettings(output_tokens=1))
    assert len(worker.bodies) == len(PROMPTS)
    assert all("do_remote_decode" not in body["kv_transfer_params"] for body in worker.bodies)
    assert counts.decode_tokens.tolist() == [0] * len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        length = len(prompt.text)
        np.testing.assert_array_equal(counts.prefill_counts[row], counts_of(length, length))


def end_at_once(body, reply):
    if not body["kv_transfer_params"].get("do_remote_decode"):
        reply["usage"]["completion_tokens"] = 1
        reply["kv_transfer_params"] = {"eldr_decode_signature": None}
    return reply


async def test_a_request_that_ends_with_its_first_token_decoded_nothing(worker):
    """Case 1.14."""
    worker.tamper = end_at_once
    counts = await record(PROMPTS, targets(worker), SETTINGS)
    assert counts.decode_tokens.tolist() == [0] * len(PROMPTS)


async def test_finished_prompts_are_not_run_again_and_keep_their_place(worker):
    kept = []
    whole = await record(PROMPTS, targets(worker), SETTINGS, keep=kept.append)
    assert sorted(row.id for row in kept) == list(whole.ids)
    worker.bodies.clear()
    seen, more = [], []
    finished = {row.id: row for row in kept if row.id not in "25"}
    again = await record(PROMPTS, targets(worker), SETTINGS, seen.append, finished, more.append)
    assert sorted(body["prompt"] for body in worker.bodies) == sorted(["xx"] * 2 + ["xxxxx"] * 2)
    assert {body["seed"] for body in worker.bodies if "seed" in body} == {41, 44}
    assert seen == [5, 6, 7]
    assert sorted(row.id for row in more) == ["2", "5"]
    for name in ("ids", "domains"):
        assert getattr(again, name) == getattr(whole, name)
    for name in ("prompt_len", "prefill_counts", "decode_counts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))


async def test_a_finished_run_asks_no_worker(worker):
    kept = []
    await record(PROMPTS, targets(worker), SETTINGS, keep=kept.append)
    worker.bodies.clear()
    await record(PROMPTS, targets(worker), SETTINGS, finished={row.id: row for row in kept})
    assert worker.bodies == []


async def test_workers_of_different_models_are_refused(worker):
    def other(body, reply):
        worker.fingerprint = "g"
        return reply

    worker.tamper = other
    with pytest.raises(RecordError, match="prompt '1': decode counts of '1': fingerprint is g, expected f"):
        await record(PROMPTS[:2], targets(worker), RecordSettings(output_tokens=2, in_flight=1))


async def test_an_unreachable_worker_is_named(worker):
    gone = targets(worker, prefill=("http://127.0.0.1:1",))
    with pytest.raises(RecordError, match=r"prompt '1': worker http://127\.0\.0\.1:1"):
        await record(PROMPTS[:1], gone, SETTINGS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", 0),
        ("output_tokens", 0),
        ("temperature", -0.1),
        ("seed", -1),
        ("in_flight", 0),
        ("timeout_s", 0.0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        RecordSettings(**{field: value})


def test_targets_need_workers_of_both_legs():
    with pytest.raises(ValueError, match="decode must name"):
        Targets(("http://a",), (), "m")
