"""Runs prompts on a prefill and then on a decode engine in this process and prints what eldr gave, as JSON.

    python stock_engine.py < {"model", "prompts", "ports": [2 ports]}

For a vLLM without eldr's patches, which only a process of its own can import.
"""

import json
import sys
from typing import Any


def transfer_config(role: str, port: int) -> dict[str, Any]:
    eldr = {"worker_id": role, "grpc_listen": f"127.0.0.1:{port}", "http_url": "http://127.0.0.1:1"}
    return {
        "kv_connector": "EldrConnector",
        "kv_connector_module_path": "eldr.engine.connector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"eldr": eldr},
    }


def served_state(port: int) -> dict[str, Any]:
    """The decoder's state as a router reads it."""
    import grpc

    from eldr.rpc.codec import decode_state
    from eldr.v1 import decode_pb2, decode_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = decode_pb2_grpc.DecodeServiceStub(channel).GetState(decode_pb2.GetStateRequest())
        info = (
            decode_pb2_grpc.DecodeServiceStub(channel).GetInfo(decode_pb2.DecodeServiceGetInfoRequest()).info
        )
    state = decode_state(answer.state)
    assert state.hit_frequency is not None
    return {
        "engine_version": info.engine_version,
        "running": state.running,
        "waiting": state.waiting,
        "kv_usage": state.kv_usage,
        "step_time_ewma_s": state.step_time_ewma_s,
        "batch_last": state.batch_last,
        "union_last": state.union_last,
        "hit_frequency": state.hit_frequency.tolist(),
        "decode_steps": state.totals.decode_steps,
        "decode_tokens": state.totals.decode_tokens,
    }


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    work = json.load(sys.stdin)
    requests = [{"prompt_token_ids": ids} for ids in work["prompts"]]

    def generate(engine: Any, tokens: int, params: dict[str, Any]) -> list[Any]:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        return list(engine.generate(requests, sampling, use_tqdm=False))

    result: dict[str, Any] = {"patched": hasattr(Scheduler, "_ignore_late_kv_xfer_notice")}
    for role, port in zip(("kv_producer", "kv_consumer"), work["ports"], strict=True):
        engine = LLM(
            model=work["model"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            block_size=32,
            kv_cache_memory_bytes=1 << 24,
            kv_transfer_config=transfer_config(role, port),
        )
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        result["patched"] |= hasattr(scheduler, "scheduler_tap")
        if role == "kv_producer":
            answers = generate(engine, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            result["signatures"] = [answer.kv_transfer_params["eldr_signature"] for answer in answers]
        else:
            answers = generate(engine, work["tokens"], {"eldr_decode_counts": True})
            result["outputs"] = [list(answer.outputs[0].token_ids) for answer in answers]
            result["decode_signatures"] = [
                answer.kv_transfer_params["eldr_decode_signature"] for answer in answers
            ]
            result["state"] = served_state(port)
        engine.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
