"""What runs inside vLLM: capture, signature cache, hand-off, decoder state and the worker's gRPC services.

The only folder that imports vllm or torch. vLLM loads `eldr.engine.connector`; nothing else is public.
"""
