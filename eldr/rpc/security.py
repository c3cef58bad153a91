"""TLS of every connection: the files of one side, checked at the edge and read again when they change.

    tls = Tls(TlsFiles(cert=Path("router.pem"), key=Path("router.key"), ca=Path("fleet-ca.pem")))
    server.add_secure_port(listen, tls.server_credentials())
    web.TCPSite(runner, host, port, ssl_context=tls.server_context())
    session.post(url, ssl=tls.client_context())

Nothing has to be told that the files have changed: servers look at each handshake, clients at each new connection.
"""

import os
import ssl
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import grpc
import structlog

log = structlog.get_logger()

NOT_YET_VALID, EXPIRED = 9, 10
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""


class TlsError(ValueError):
    """A file that TLS cannot use, or a set of files that makes no sense; the message names it."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side.

    cert: certificate chain of this side, its own first.
    key: private key of `cert`, not encrypted.
    ca: authorities that sign the other side's certificates; the system's where it is None.
    require_client_cert: whether a server refuses clients without a certificate of `ca`.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    require_client_cert: bool = False

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, lacking = ("cert", "key") if self.cert else ("key", "cert")
            raise TlsError(f"tls {given} needs tls {lacking}: they come as a pair")
        if self.require_client_cert and (self.ca is None or self.cert is None):
            raise TlsError(
                "tls require_client_cert needs tls cert, key and ca: who signs the clients' certificates"
            )
        if self.cert is None and self.ca is None:
            raise TlsError("tls needs cert and key (to serve), ca (to check the other side), or all three")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the files held at one time. Two handshakes with the same object had the same files."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    server: ssl.SSLContext | None
    client: ssl.SSLContext


class Tls:
    """The files of one side, and what is made of them. Any thread.

    Raises TlsError where the files cannot be used. Files that cannot be used later are not taken: what was loaded
    last goes on, and a warning says so.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._loaded = _load(files)
        self._front: ssl.SSLContext | None = None

    def current(self) -> Loaded:
        """The contents of the files as they are now, or as they last were good."""
        with self._lock:
            stamp = _stamp(self.files)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._loaded = _load(self.files)
                except TlsError as error:
                    log.warning("tls_files_not_reloaded", why=str(error))
                else:
                    log.info("tls_files_reloaded", files=[str(path) for path, *_ in stamp])
            return self._loaded

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server. Raises TlsError without cert and key."""
        return grpc.dynamic_ssl_server_credentials(
            self._certificates(), self._certificates, self.files.require_client_cert
        )

    def _certificates(self) -> grpc.ServerCertificateConfiguration:
        now = self.current()
        if now.cert is None or now.key is None:
            raise TlsError("a server needs tls cert and key")
        return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one gRPC channel, from the files as they are now. Without cert and key it shows no certificate."""
        now = self.current()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)

    def server_context(self) -> ssl.SSLContext:
        """For an HTTP server: a context that gives each handshake the newest one. Raises TlsError as above."""
        if self._front is None:
            front = _server_context(self.files)
            front.sni_callback = self._newest
            self._front = front
        return self._front

    def _newest(self, connection: ssl.SSLObject, _name: str | None, _front: ssl.SSLContext) -> None:
        newest = self.current().server
        assert newest is not None
        connection.context = newest

    def client_context(self) -> ssl.SSLContext:
        """For HTTP requests: the same object until the files change, so that connections are reused."""
        return self.current().client


def _stamp(files: TlsFiles) -> tuple[tuple[str, int, int, int], ...]:
    """Changes whenever a file is replaced or written."""
    stamps = []
    for path in (files.cert, files.key, files.ca):
        if path is None:
            continue
        try:
            found = os.stat(path)
            stamps.append((str(path), found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append((str(path), 0, 0, 0))
    return tuple(stamps)


def _load(files: TlsFiles) -> Loaded:
    cert = _read("cert", files.cert, b"-----BEGIN CERTIFICATE-----", "no PEM certificate")
    key = _read("key", files.key, b"PRIVATE KEY-----", "no PEM private key")
    ca = _read("ca", files.ca, b"-----BEGIN CERTIFICATE-----", "no PEM certificate")
    if key is not None and b"ENCRYPTED" in key:
        raise TlsError(
            f"tls key {files.key}: an encrypted key is not supported, since nobody is there to unlock it"
        )
    client = _client_context(files)
    if files.cert is None:
        return Loaded(cert, key, ca, None, client)
    server = _server_context(files)
    _check_dates(files)
    return Loaded(cert, key, ca, server, client)


def _read(name: str, path: Path | None, mark: bytes, problem: str) -> bytes | None:
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TlsError(f"tls {name} {path}: {error.strerror or error}") from error
    if mark not in data:
        raise TlsError(f"tls {name} {path}: {problem}")
    return data


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    if files.cert is None:
        raise TlsError("a server needs tls cert and key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A resumed session would skip the check of the client's certificate against a newer ca.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    _load_own(context, files)
    if files.require_client_cert:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_ca(context, files)
    return context


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.ca is None:
        context.load_default_certs()
    else:
        _load_ca(context, files)
    if files.cert is not None:
        _load_own(context, files)
    return context


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.cert is not None
    try:
        context.load_cert_chain(files.cert, files.key)
    except ssl.SSLError as error:
        reason = "the key is not the certificate's" if "MISMATCH" in (error.reason or "") else str(error)
        raise TlsError(f"tls cert {files.cert} with key {files.key}: {reason}") from error
    except OSError as error:
        raise TlsError(f"tls cert {files.cert} with key {files.key}: {error.strerror or error}") from error


def _load_ca(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.ca is not None
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise TlsError(f"tls ca {files.ca}: {error}") from error
    except OSError as error:
        raise TlsError(f"tls ca {files.ca}: {error.strerror or error}") from error
    ends = [str(found["notAfter"]) for found in context.get_ca_certs()]
    if not ends:
        raise TlsError(f"tls ca {files.ca}: no certificate of an authority in it")
    if all(ssl.cert_time_to_seconds(end) < time.time() for end in ends):
        raise TlsError(f"tls ca {files.ca}: expired, valid until {max(ends, key=ssl.cert_time_to_seconds)}")


def _check_dates(files: TlsFiles) -> None:
    """Refuses a certificate out of its time, by a handshake of the files with themselves in memory.

    The standard library has no other public way to see the dates of a certificate that is no authority's.
    """
    for as_client in (False, True):
        problem = _rehearsal(files, as_client)
        if problem == EXPIRED:
            raise TlsError(f"tls cert {files.cert}: expired")
        if problem == NOT_YET_VALID:
            raise TlsError(f"tls cert {files.cert}: not valid yet; is the clock of this machine right?")


def _rehearsal(files: TlsFiles, as_client: bool) -> int:
    """OpenSSL's verdict on the certificate with itself as authority, 0 where it is good.

    A certificate that is for servers alone fails as a client's for another reason than its dates, and the reverse.
    """
    checking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if as_client else ssl.PROTOCOL_TLS_CLIENT)
    checking.check_hostname = False
    checking.verify_mode = ssl.CERT_REQUIRED
    checking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    checking.load_verify_locations(files.cert)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if as_client else ssl.PROTOCOL_TLS_SERVER)
    if as_client:
        shown.check_hostname = False
        shown.verify_mode = ssl.CERT_NONE
        _load_own(checking, files)
    _load_own(shown, files)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        checking.wrap_bio(there, back, server_side=as_client),
        shown.wrap_bio(back, there, server_side=not as_client),
    ]
    for _round in range(10):
        waiting = 0
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
            except ssl.SSLCertVerificationError as error:
                return int(error.verify_code)
            except ssl.SSLError:
                return 0
        if not waiting:
            return 0
    return 0


def is_loopback(listen: str) -> bool:
    """Whether only this machine reaches a listener at host:port."""
    host = listen.rpartition(":")[0].strip("[]")
    return host == "localhost" or host.startswith("127.") or host == "::1"


def warn_where_open(listen: str, tls: Tls | None, checks_callers: bool) -> None:
    """One warning for a listener that others reach and that lacks TLS or a check of its callers."""
    lacking = [name for name, there in (("TLS", tls is not None), ("tokens", checks_callers)) if not there]
    if lacking and not is_loopback(listen):
        log.warning("listener_open_to_the_network", listen=listen, without=lacking, docs="docs/security.md")


def tls_from(settings: object) -> TlsFiles:
    """TlsFiles from a mapping, such as `"tls": {"cert": ..., "key": ..., "ca": ...}` in an engine's configuration.

    Raises TlsError on unknown keys and wrong types.
    """
    names = [field.name for field in fields(TlsFiles)]
    if not isinstance(settings, dict) or not set(settings) <= set(names):
        raise TlsError(f"tls must be a mapping with keys of {', '.join(names)}, got {settings!r}")
    require = settings.get("require_client_cert", False)
    if not isinstance(require, bool):
        raise TlsError(f"tls require_client_cert must be true or false, got {require!r}")
    paths: dict[str, Path | None] = {}
    for name in names[:3]:
        value = settings.get(name)
        if value is not None and not (isinstance(value, str) and value):
            raise TlsError(f"tls {name} must be a path, got {value!r}")
        paths[name] = Path(value) if value else None
    return TlsFiles(**paths, require_client_cert=require)
