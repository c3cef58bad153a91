"""Where eldr may stand when the user runs several KV connectors: around MultiConnector, or as its first child."""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from eldr.engine.config import EngineConfigError


def check_name(connector_class: type, vllm_config: VllmConfig) -> None:
    """Refuses a wrapped MultiConnector under a name by which vLLM would overlook what its children need.

    Raises EngineConfigError that names the child and the remedy.
    """
    transfer = vllm_config.kv_transfer_config
    if not issubclass(connector_class, MultiConnector) or transfer.kv_connector == "MultiConnector":
        return
    children = transfer.kv_connector_extra_config.get("connectors", ())
    names = ", ".join(str(child.get("kv_connector")) for child in children)
    remedy = 'write "kv_connector": "MultiConnector" and keep kv_connector_module_path'
    if any(child.get("kv_connector") == "HiSparseConnector" for child in children):
        raise EngineConfigError(f"vLLM does not find HiSparseConnector in {transfer.kv_connector}: {remedy}")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    if not MultiConnector.all_children_support_hma(transfer):
        raise EngineConfigError(
            f"one of {names} does not support the hybrid KV-cache manager, which vLLM turns off by itself only "
            f"under the plain name: {remedy}"
        )


def check_place(connector: KVConnectorBase_V1, outermost: Any) -> None:
    """Refuses a place in MultiConnector at which a signature or a handshake would be lost.

    MultiConnector copies the answer's parameters of every child but the first before the signature is in them,
    and passes on the handshake of one child only. `outermost` is the connector that vLLM itself calls.
    Raises EngineConfigError that names the connector and the remedy.
    """
    if outermost is connector:
        return
    name = type(connector).__name__
    if hasattr(outermost, "create_scheduler_tap"):
        raise EngineConfigError(
            f"{name} inside {type(outermost).__name__}: eldr stands twice; leave kv_connector_module_path out of "
            "one of them"
        )
    siblings = list(getattr(outermost, "sub_connectors", ()))
    if not siblings or siblings[0] is not connector:
        raise EngineConfigError(
            f"{name} must be the first, and the only one of eldr's, among MultiConnector's connectors; or give "
            "MultiConnector itself eldr's kv_connector_module_path"
        )
    for sibling in siblings[1:]:
        if type(sibling).get_handshake_metadata is not KVConnectorBase_V1.get_handshake_metadata:
            raise EngineConfigError(
                f"{type(sibling).__name__} beside {name}: MultiConnector passes on one handshake; give "
                f"kv_connector_module_path to {type(sibling).__name__} alone, or to MultiConnector itself"
            )
