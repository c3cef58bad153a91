"""The KV connectors that vLLM loads: the user's own connector with expert signatures around it.

`"kv_connector_module_path": "eldr.engine.connector"` beside the user's `"kv_connector": "X"` is that connector with
signatures, for every X that vLLM registers; `EldrX` names the same class, and `EldrConnector` the NIXL pull
connector's. Each *is* a subclass of the connector that it wraps, so every seam that asks for the class keeps
working; the plain name also keeps what vLLM decides by a connector's literal name (docs/connectors.md).
"""

from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from eldr.engine.signature_handoff import SignatureHandoff

PREFIX = "Eldr"

NEEDS_PLAIN_NAME = ("HiSparseConnector",)
"""Connectors whose configuration vLLM finds by their literal name only."""


@cache
def with_signatures(inner: type) -> type[SignatureHandoff]:
    """The connector class `inner` with eldr's part around it, one and the same for every call.

    It is registered under its own name, because MultiConnector finds the statistics of its children by that.
    """
    name = PREFIX + inner.__name__
    outer = type(name, (SignatureHandoff, inner), {"__doc__": f"{inner.__name__} with signatures."})
    KVConnectorFactory.register_connector(name, __name__, name)
    return outer


def __getattr__(name: str) -> Any:
    """Makes `X` and `EldrX` for each connector `X` that vLLM has registered."""
    inner = name.removeprefix(PREFIX)
    vllm_names = sorted(known for known in KVConnectorFactory._registry if not known.startswith(PREFIX))
    if inner not in vllm_names:
        raise AttributeError(f"no connector {name!r}; known: EldrConnector, {', '.join(vllm_names)}")
    if inner != name and inner in NEEDS_PLAIN_NAME:
        raise AttributeError(f'vLLM knows {inner} by that name only: write "kv_connector": "{inner}"')
    return with_signatures(KVConnectorFactory.get_connector_class_by_name(inner))


EldrConnector = __getattr__("NixlPullConnector")
