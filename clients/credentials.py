"""Makes gRPC credentials, of clients and of servers, out of the files that name them."""

from __future__ import annotations

import grpc

from relay_service.core.security import Security
from relay_service.core.tls_files import TlsFiles, TlsMaterial
from relay_service.core.tokens import TokenFile


class Credentials:
    """Certificate, key, CA and tokens of one process, as their files are at the moment."""

    def __init__(self, security: Security, scope: str = "") -> None:
        """Reads the files. Raises `ConfigError` for some that cannot be used.

        `scope` chooses which token of the file goes along with own calls: the first
        one that has it, or the very first.
        """
        self.tls = TlsFiles(security) if security.tls else None
        self.tokens = TokenFile(security.token_file) if security.token_file else None
        self._scope = scope

    def token(self) -> str:
        """Returns the token for own calls; empty for none."""
        return self.tokens.own(self._scope) if self.tokens else ""

    def material(self) -> TlsMaterial | None:
        """Returns certificate, key and CA as they are now; the same object until they change."""
        return self.tls.fresh() if self.tls else None


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Returns what a client connects with."""
    return grpc.ssl_channel_credentials(material.ca, material.key or None, material.cert or None)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Returns what a server listens with; clients must have a certificate too.

    gRPC asks at every handshake, so a new certificate needs no restart.
    """
    in_use = tls.material

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal in_use
        now = tls.fresh()
        if now is in_use:
            return None
        in_use = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(in_use), fetch, require_client_authentication=True
    )


def _configuration(now: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)


NOTHING = Credentials(Security())
"""No TLS and no token."""
