"""The KV connectors that vLLM loads: the user's own connector with expert signatures around it.

`"kv_connector": "EldrConnector", "kv_connector_module_path": "eldr.engine.connector"` is the NIXL pull connector;
`Eldr` before the name of any connector of vLLM (`EldrNixlPushConnector`, `EldrOffloadingConnector`, ...) is that
one. Each *is* a subclass of the connector that it wraps, so every seam that asks for the class keeps working.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from eldr.engine.signature_handoff import SignatureHandoff

PREFIX = "Eldr"


def with_signatures(inner: type) -> type[SignatureHandoff]:
    """The connector class `inner` with eldr's part around it."""
    return type(
        PREFIX + inner.__name__, (SignatureHandoff, inner), {"__doc__": f"{inner.__name__} with signatures."}
    )


EldrConnector = with_signatures(NixlPullConnector)


def __getattr__(name: str) -> Any:
    """Makes `EldrX` for each connector `X` that vLLM has registered."""
    inner = name.removeprefix(PREFIX)
    if inner == name or inner not in KVConnectorFactory._registry:
        known = ", ".join(sorted(PREFIX + registered for registered in KVConnectorFactory._registry))
        raise AttributeError(f"no connector {name!r}; known: EldrConnector, {known}")
    return with_signatures(KVConnectorFactory.get_connector_class_by_name(inner))
