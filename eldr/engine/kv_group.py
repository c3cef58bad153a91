"""Which KV-cache group the signature follows: the full-attention group, by kind and not by index (case 1.3)."""

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, UniformTypeKVCacheSpecs

from eldr.engine.capture import CaptureError


@dataclass(frozen=True, slots=True)
class SignatureGroup:
    """Index of the group among the model's KV-cache groups, one of its layers, and its block size in tokens."""

    index: int
    layer_name: str
    block_size: int


def signature_group(kv_cache_config: KVCacheConfig) -> SignatureGroup:
    """The full-attention group, whose blocks hold every token of a request.

    Both the side that writes rows and the side that reads them call this. Raises CaptureError where no group
    keeps one slot for every token, and where tokens of the prefix cache are run again.
    """
    groups = kv_cache_config.kv_cache_groups
    if any(group.kv_cache_spec.prefix_replay_tokens for group in groups):
        raise CaptureError(
            "eldr does not follow models that run the last tokens of a cached prefix again (bounded replay)"
        )
    for index, group in enumerate(groups):
        spec = group.kv_cache_spec
        kinds = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
        if all(isinstance(kind, FullAttentionSpec) and kind.tokens_per_state == 1 for kind in kinds):
            return SignatureGroup(index, group.layer_names[0], spec.block_size)
    kinds_found = [type(group.kv_cache_spec).__name__ for group in groups]
    raise CaptureError(
        f"eldr needs a full-attention KV-cache group with a slot per token; this model has only {kinds_found}"
    )
