"""What several benchmarks serve and send: the inflated testbed model and prompts of its evaluation texts."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TESTBED = Path(__file__).resolve().parents[1] / "testbed"
WIDTH = 2048


def inflated_testbed(folder: Path) -> Path:
    """The testbed model with experts of width WIDTH in `folder`; kept where it is complete."""
    command = [
        *(sys.executable, str(TESTBED / "inflate.py"), str(TESTBED / "model"), str(folder)),
        *("--width", str(WIDTH), "--dtype", "bfloat16"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"no inflated model: {done.stderr.strip()}")
    return folder


def prompts_of_length(model: Path, tokens: int, seed: int) -> Iterator[list[int]]:
    """Prompts of this many tokens that share no block: evaluation texts one after the other, shuffled."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    lines = (TESTBED / "prompts/evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    random.Random(seed).shuffle(lines)
    ids: list[int] = []
    for line in lines:
        ids += tokenizer.encode(json.loads(line)["text"])
        while len(ids) >= tokens:
            yield ids[:tokens]
            ids = ids[tokens:]
    raise RuntimeError("the evaluation prompts are used up; ask for fewer pairs or rounds")
