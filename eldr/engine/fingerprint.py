"""Identity of a model: what two workers must share before their expert counts may be compared."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 1 << 16
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def model_fingerprint(config: Mapping[str, Any], weights: str | Path, revision: str | None = None) -> str:
    """Hash over the model's configuration and the identity of its weights, 16 hex digits.

    `weights` is the model's folder or its name on a hub. In a folder every safetensors or bin file adds its
    name, its size and three samples of `SAMPLE_BYTES` (start, middle, end), so that a fine-tuned copy of the
    same shape differs; a name adds itself and its revision. Fields of the configuration that say nothing about
    routing (path, version of the tool, dtype served) do not count.
    """
    digest = hashlib.sha256()
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    folder = Path(weights)
    if folder.is_dir():
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                for start in (0, max(0, size // 2 - SAMPLE_BYTES // 2), max(0, size - SAMPLE_BYTES)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE_BYTES))
    else:
        digest.update(f"{weights}@{revision or ''}".encode())
    return digest.hexdigest()[:16]
