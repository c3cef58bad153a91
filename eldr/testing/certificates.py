"""Certificates for tests (needs the package cryptography): an authority, and what it signs, as PEM files."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from eldr.rpc.security import TlsFiles

LOCAL = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates and writes them into a folder."""

    folder: Path
    name: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> Path:
        """The authority's own certificate."""
        return self.folder / f"{self.name}-ca.pem"

    def sign(
        self, name: str, days: float = 1, uses: tuple[str, ...] = ("server", "client")
    ) -> tuple[Path, Path]:
        """Certificate and key for 127.0.0.1 and localhost; `days` below 0 are expired, from 100 on not yet valid."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        start = now + datetime.timedelta(days=1) if days >= 100 else now - datetime.timedelta(days=2)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(LOCAL), critical=False)
            .add_extension(x509.ExtendedKeyUsage([USES[use] for use in uses]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return write(self.folder, name, certificate, key)

    def files(
        self,
        name: str,
        require_client_cert: bool = False,
        days: float = 1,
        uses: tuple[str, ...] = ("server", "client"),
    ) -> TlsFiles:
        """A side whose own certificate and whose checks are of this authority."""
        cert, key = self.sign(name, days, uses)
        return TlsFiles(cert, key, self.pem, require_client_cert)


def authority(folder: Path, name: str, days: float = 10) -> Authority:
    """A new authority; its certificate lies in `pem`."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=20))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(True, None), critical=True)
        .sign(key, hashes.SHA256())
    )
    made = Authority(folder, name, certificate, key)
    write(folder, f"{name}-ca", certificate, key)
    return made


def write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    """Paths of name.pem and name.key, replaced as a certificate manager would."""
    pem, private = folder / f"{name}.pem", folder / f"{name}.key"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return pem, private


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
