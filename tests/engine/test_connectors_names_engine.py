"""Which connector a name means, and what is refused at start."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from eldr.engine import connector
from eldr.engine.config import EngineConfigError
from eldr.engine.multi import check_name, check_place
from eldr.engine.nixl import expire_lease, nixl_schedulers, spare_cores
from eldr.engine.signature_handoff import SignatureHandoff

pytestmark = pytest.mark.engine

MODULE = "eldr.engine.connector"
RUNNABLE = [
    "NixlPullConnector",
    "NixlPushConnector",
    "ExampleConnector",
    "OffloadingConnector",
    "MultiConnector",
]


@pytest.mark.parametrize("inner", RUNNABLE)
def test_a_connectors_plain_and_prefixed_name_mean_the_same_class_around_it(inner: str) -> None:
    plain, prefixed = getattr(connector, inner), getattr(connector, "Eldr" + inner)
    assert plain is prefixed
    assert issubclass(plain, (KVConnectorFactory.get_connector_class_by_name(inner)))
    assert plain.__mro__[1] is SignatureHandoff


def test_eldr_connector_is_the_nixl_pull_connector() -> None:
    assert connector.EldrConnector is connector.NixlPullConnector is connector.EldrNixlConnector


def test_the_class_is_registered_under_its_own_name_for_statistics_inside_multi_connector() -> None:
    name = connector.EldrConnector.__name__
    assert KVConnectorFactory.get_connector_class_by_name(name) is connector.EldrConnector


@pytest.mark.parametrize(
    "name", ["EldrNoConnector", "Nixl", "EldrEldrConnector", "EldrEldrNixlPullConnector"]
)
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        AttributeError, match=f"no connector '{name}'; known: EldrConnector, .*OffloadingConnector"
    ):
        getattr(connector, name)


def test_a_connector_that_vllm_finds_by_its_literal_name_only_keeps_that_name() -> None:
    with pytest.raises(AttributeError, match='write "kv_connector": "HiSparseConnector"'):
        connector.EldrHiSparseConnector  # noqa: B018


def multi_config(name: str, *children: str, hybrid: bool = True) -> Any:
    connectors = [{"kv_connector": child, "kv_role": "kv_producer"} for child in children]
    transfer = KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=MODULE,
        kv_role="kv_producer",
        kv_connector_extra_config={"connectors": connectors},
    )
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    return SimpleNamespace(kv_transfer_config=transfer, scheduler_config=scheduler)


def test_a_prefixed_multi_connector_is_refused_where_vllm_would_overlook_a_childs_needs() -> None:
    """The hybrid KV-cache manager is turned off by itself only under the plain name."""
    wrapped = connector.EldrMultiConnector
    with pytest.raises(
        EngineConfigError, match=r'ExampleConnector .* write "kv_connector": "MultiConnector"'
    ):
        check_name(wrapped, multi_config("EldrMultiConnector", "NixlConnector", "ExampleConnector"))
    with pytest.raises(EngineConfigError, match="does not find HiSparseConnector in EldrMultiConnector"):
        check_name(wrapped, multi_config("EldrMultiConnector", "NixlConnector", "HiSparseConnector"))
    check_name(wrapped, multi_config("EldrMultiConnector", "NixlConnector", "ExampleConnector", hybrid=False))
    check_name(wrapped, multi_config("EldrMultiConnector", "NixlConnector", "OffloadingConnector"))
    check_name(wrapped, multi_config("MultiConnector", "NixlConnector", "ExampleConnector"))


def test_the_plain_name_keeps_vllms_own_answer_about_the_hybrid_manager() -> None:
    supports = KVConnectorFactory.supports_hma_config
    config = multi_config("MultiConnector", "NixlConnector", "ExampleConnector")
    assert not supports(config.kv_transfer_config)
    assert supports(multi_config("MultiConnector", "NixlConnector", "OffloadingConnector").kv_transfer_config)


def bare(name: str) -> Any:
    """An instance without its __init__, which needs an engine."""
    cls = getattr(connector, name) if name.startswith("Eldr") else KVConnectorFactory._registry[name]()
    return object.__new__(cls)


def around(*children: Any) -> Any:
    return SimpleNamespace(sub_connectors=children)


def test_among_multi_connectors_children_eldr_stands_first_and_once() -> None:
    eldr, offloading = bare("EldrConnector"), bare("OffloadingConnector")
    check_place(eldr, eldr)
    check_place(eldr, around(eldr, offloading))
    with pytest.raises(EngineConfigError, match="EldrNixlPullConnector must be the first"):
        check_place(eldr, around(offloading, eldr))
    with pytest.raises(EngineConfigError, match="must be the first"):
        check_place(eldr, around(around(eldr, offloading)))
    with pytest.raises(EngineConfigError, match="must be the first, and the only one"):
        check_place(bare("EldrConnector"), around(eldr, offloading))
    with pytest.raises(EngineConfigError, match="eldr stands twice"):
        check_place(eldr, bare("EldrMultiConnector"))


def test_a_second_connector_with_a_handshake_is_refused_by_name() -> None:
    eldr, nixl = bare("EldrOffloadingConnector"), bare("NixlPullConnector")
    with pytest.raises(EngineConfigError, match="NixlPullConnector beside EldrOffloadingConnector"):
        check_place(eldr, around(eldr, nixl))


def test_a_release_expires_the_lease_at_every_nixl_connector_and_nowhere_else() -> None:
    pull, push = bare("EldrConnector"), bare("NixlPushConnector")
    for one in (pull, push):
        one.connector_scheduler = SimpleNamespace(_reqs_need_send={})
    both = around(pull, around(bare("OffloadingConnector"), push))
    expire_lease(both, "a")
    assert (
        pull.connector_scheduler._reqs_need_send
        == push.connector_scheduler._reqs_need_send
        == {"a": float("-inf")}
    )
    assert nixl_schedulers(bare("OffloadingConnector")) == []
    expire_lease(bare("ExampleConnector"), "a")


def test_only_nixls_configurations_are_told_to_spare_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[int] = []
    monkeypatch.setattr("eldr.engine.nixl.set_progress_delay", delays.append)
    single = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer")
    spare_cores(connector.EldrConnector, single, 7)
    assert single.kv_connector_extra_config == {"num_threads": 0}
    many = multi_config("MultiConnector", "NixlPushConnector", "OffloadingConnector").kv_transfer_config
    spare_cores(connector.MultiConnector, many, 8)
    nixl, offloading = many.kv_connector_extra_config["connectors"]
    assert nixl["kv_connector_extra_config"] == {"num_threads": 0}
    assert "kv_connector_extra_config" not in offloading
    spare_cores(connector.OffloadingConnector, KVTransferConfig(), 9)
    assert delays == [7, 8]
