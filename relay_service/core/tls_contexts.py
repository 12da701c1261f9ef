"""Makes contexts of Python's `ssl` out of the files that name certificate, key and CA.

For sockets that gRPC does not open: both sides show a certificate of the fleet's CA, and a
new one is taken up at the next handshake.
"""

from __future__ import annotations

import contextlib
import ssl

from relay_service.core.security import Security
from relay_service.core.tls_files import TlsFiles


class TlsContexts:
    """The context of one side, as its files are at the moment. From any thread."""

    def __init__(self, security: Security, purpose: ssl.Purpose) -> None:
        """Reads the files. Raises `ConfigError` for some that cannot be used.

        `CLIENT_AUTH` is the purpose of a server, `SERVER_AUTH` that of a client.
        """
        self._security = security
        self._purpose = purpose
        self._files = TlsFiles(security)
        self._now = (self._files.material, self._make())

    def fresh(self) -> ssl.SSLContext:
        """Returns the context of what the files say now, or said when they last made sense."""
        material = self._files.fresh()
        if material is not self._now[0]:
            with contextlib.suppress(OSError):  # changed once more meanwhile: the next one sees it
                self._now = (material, self._make())
        return self._now[1]

    def _make(self) -> ssl.SSLContext:
        security = self._security
        context = ssl.create_default_context(self._purpose, cafile=security.tls_ca)
        if security.tls_cert:
            context.load_cert_chain(security.tls_cert, security.tls_key, password="")
        context.verify_mode = ssl.CERT_REQUIRED
        return context
