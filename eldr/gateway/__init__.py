"""The OpenAI-compatible front of a prefill/decode fleet. One request is told in `coordinator.py`."""
