"""What is wrong with TLS files is said at start, by file; what becomes wrong later is not taken."""

import dataclasses
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from eldr.rpc.security import Tls, TlsError, TlsFiles, is_loopback, tls_from, warn_where_open
from eldr.testing.certificates import authority, write


def test_files_that_fit_are_loaded(tmp_path: Path) -> None:
    ca = authority(tmp_path, "fleet")
    for uses in (("server",), ("client",), ("server", "client")):
        loaded = Tls(ca.files("a", require_client_cert=True, uses=uses)).current()
        assert loaded.cert == (tmp_path / "a.pem").read_bytes()
        assert loaded.ca == ca.pem.read_bytes()


@pytest.mark.parametrize("uses", [("server",), ("client",), ("server", "client")])
def test_an_expired_certificate_is_refused_by_file_whatever_it_is_for(
    tmp_path: Path, uses: tuple[str, ...]
) -> None:
    files = authority(tmp_path, "fleet").files("old", days=-1, uses=uses)
    with pytest.raises(TlsError, match=r"tls cert .*old\.pem: expired"):
        Tls(files)


def test_a_certificate_of_the_future_is_refused_by_file(tmp_path: Path) -> None:
    files = authority(tmp_path, "fleet").files("new", days=100)
    with pytest.raises(TlsError, match=r"tls cert .*new\.pem: not valid yet"):
        Tls(files)


def test_an_expired_authority_is_refused_by_file(tmp_path: Path) -> None:
    ca = authority(tmp_path, "fleet", days=-1)
    with pytest.raises(TlsError, match=r"tls ca .*fleet-ca\.pem: expired, valid until"):
        Tls(TlsFiles(ca=ca.pem))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """Case 4.11: unreadable key, wrong file, key of another certificate."""
    ca = authority(tmp_path, "fleet")
    good = ca.files("a")
    other = ca.files("b")
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    locked = tmp_path / "locked.key"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    for change, message in (
        ({"cert": tmp_path / "none.pem"}, r"tls cert .*none\.pem: No such file"),
        ({"key": tmp_path}, "tls key .*: Is a directory"),
        ({"cert": good.key}, r"tls cert .*a\.key: no PEM certificate"),
        ({"key": good.cert}, r"tls key .*a\.pem: no PEM private key"),
        ({"key": other.key}, "the key is not the certificate's"),
        ({"key": locked}, r"tls key .*locked\.key: an encrypted key"),
        ({"cert": junk}, r"tls cert .*junk\.pem"),
        ({"ca": junk}, r"tls ca .*junk\.pem"),
        ({"ca": good.cert}, r"tls ca .*a\.pem: no certificate of an authority"),
    ):
        with pytest.raises(TlsError, match=message):
            Tls(dataclasses.replace(good, **change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs cert and key"),
        ({"cert": Path("a")}, "tls cert needs tls key"),
        ({"key": Path("a")}, "tls key needs tls cert"),
        ({"cert": Path("a"), "key": Path("b"), "require_client_cert": True}, "require_client_cert needs"),
        ({"ca": Path("a"), "require_client_cert": True}, "require_client_cert needs"),
    ],
)
def test_a_set_of_files_that_makes_no_sense_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(TlsError, match=message):
        TlsFiles(**fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("a.pem", "must be a mapping"),
        ({"certificate": "a"}, "keys of cert, key, ca, require_client_cert"),
        ({"ca": 3}, "tls ca must be a path"),
        ({"ca": "x", "require_client_cert": "no"}, "must be true or false"),
    ],
)
def test_a_mapping_that_is_no_tls_setting_is_refused(settings: object, message: str) -> None:
    with pytest.raises(TlsError, match=message):
        tls_from(settings)


def test_a_mapping_gives_the_files() -> None:
    assert tls_from({"cert": "a", "key": "b", "ca": "c", "require_client_cert": True}) == TlsFiles(
        Path("a"), Path("b"), Path("c"), True
    )


def test_changed_files_are_taken_once_they_fit_and_the_last_good_ones_till_then(tmp_path: Path) -> None:
    """A certificate manager replaces certificate and key one after the other."""
    ca = authority(tmp_path, "fleet")
    files = ca.files("a")
    tls = Tls(files)
    first = tls.current()
    ca.sign("b")
    with capture_logs() as logs:
        (tmp_path / "b.pem").replace(files.cert)
        assert tls.current() is first
        assert tls.current() is first
        (tmp_path / "b.key").replace(files.key)
        second = tls.current()
    assert second is not first
    assert tls.current() is second
    assert [entry["event"] for entry in logs] == ["tls_files_not_reloaded", "tls_files_reloaded"]
    assert str(files.cert) in logs[0]["why"]
    files.key.unlink()
    assert tls.current() is second


def test_logs_and_errors_hold_no_part_of_a_key(tmp_path: Path) -> None:
    ca = authority(tmp_path, "fleet")
    files = ca.files("a")
    tls = Tls(files)
    key = files.key.read_text().splitlines()[1]
    with capture_logs() as logs:
        write(tmp_path, "a", ca.certificate, ca.key)
        tls.current()
        files.key.write_text(files.key.read_text().replace("PRIVATE", "PUBLIC"))
        tls.current()
    assert len(logs) == 2
    assert key not in repr(logs)
    assert key not in repr(files)


@pytest.mark.parametrize(
    ("listen", "local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
    ],
)
def test_a_listener_open_to_the_network_without_tls_or_tokens_is_said_once(listen: str, local: bool) -> None:
    assert is_loopback(listen) is local
    with capture_logs() as logs:
        warn_where_open(listen, None, checks_callers=False)
    assert [entry.get("without") for entry in logs] == ([] if local else [["TLS", "tokens"]])
