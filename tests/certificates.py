"""Certificate authorities and certificates for tests, made on the spot."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from relay_service.core.security import Security

DAY = dt.timedelta(days=1)
ALL_SCOPES = "generate,control,relay"
TOKEN = "correct-horse-battery-staple"  # noqa: S105


class Authority:
    """Signs certificates and writes them into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._write(folder / f"{name}.pem", _pem(self._sign(self._name, self._key, [], ca=True)))
        self.path = folder / f"{name}.pem"

    def issue(self, name: str, *, expired: bool = False, host: str = "127.0.0.1") -> Security:
        """Writes `NAME.pem` and `NAME.key` for a host; returns them with this CA."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")]
        certificate = self._sign(_name(name), key, names, expired=expired)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        self._write(self.folder / f"{name}.key", private)
        self._write(self.folder / f"{name}.pem", _pem(certificate))
        return Security(
            tls_cert=str(self.folder / f"{name}.pem"),
            tls_key=str(self.folder / f"{name}.key"),
            tls_ca=str(self.path),
        )

    def _sign(self, subject, key, names, *, ca=False, expired=False) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now - DAY if expired else now + DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        """Puts a whole new file in the place of the old one, as whoever rotates one should."""
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(data)
        fresh.replace(path)


@dataclass
class Tokens:
    """A token file that a test changes."""

    path: Path

    def write(self, *lines: str, mode: int = 0o600) -> str:
        """Replaces the content; returns the path."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.chmod(mode)
        fresh.replace(self.path)
        return str(self.path)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
