"""TLS and tokens of a worker, from its configuration to a served port."""

from pathlib import Path

import pytest

from eldr.engine.config import EngineConfig, EngineConfigError
from eldr.rpc.tokens import Role
from eldr.testing.certificates import authority

PLAIN = {"worker_id": "d0", "grpc_listen": "127.0.0.1:1", "http_url": "http://127.0.0.1:2"}
SECRET = "worker-secret-0123456789abcdef"


def config(**changes: object) -> EngineConfig:
    return EngineConfig.from_extra_config({"eldr": PLAIN | changes})


def test_without_settings_a_worker_speaks_plaintext_and_lets_everybody_in() -> None:
    assert config().gate().tls is None
    assert config().gate().tokens is None
    assert config().caller().metadata() == ()


def test_a_worker_serves_and_calls_with_its_files(tmp_path: Path) -> None:
    ca = authority(tmp_path, "fleet")
    cert, key = ca.sign("d0")
    token = tmp_path / "token"
    token.write_text(SECRET)
    made = config(
        tls={"cert": str(cert), "key": str(key), "ca": str(ca.pem), "require_client_cert": True},
        token_file=str(token),
        accept_tokens={"worker": str(token)},
    )
    gate = made.gate()
    assert gate.tls is not None
    assert gate.tls.files.require_client_cert
    assert gate.tokens is not None
    assert gate.tokens.role_of(f"Bearer {SECRET}") is Role.WORKER
    assert made.caller().metadata() == (("authorization", f"Bearer {SECRET}"),)
    assert SECRET not in repr(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tls": "a.pem"}, "eldr.tls: tls must be a mapping"),
        ({"tls": {"cart": "a"}}, "keys of cert, key, ca, require_client_cert"),
        ({"tls": {"cert": "none.pem", "key": "none.key"}}, r"eldr.tls: tls cert none\.pem: No such file"),
        ({"token_file": 3}, "eldr.token_file must be a path"),
        ({"token_file": "none"}, "eldr.token_file: token file none: No such file"),
        ({"accept_tokens": {"boss": "x"}}, "eldr.accept_tokens must be a mapping of worker, client, admin"),
        ({"accept_tokens": {"admin": ""}}, r"eldr.accept_tokens\.admin must be a path"),
        ({"accept_tokens": {"admin": "none"}}, "eldr.accept_tokens: token file none: No such file"),
    ],
)
def test_what_is_wrong_stops_the_engine_by_name(changes: dict, message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        _ = (made := config(**changes)).caller(), made.gate()


def test_a_worker_cannot_serve_with_a_ca_alone(tmp_path: Path) -> None:
    ca = authority(tmp_path, "fleet")
    with pytest.raises(EngineConfigError, match=r"eldr\.tls needs cert and key"):
        config(tls={"ca": str(ca.pem)}).gate()
