"""TLS at one end of a connection, from bytes to bytes. Nothing here waits or sends."""

from __future__ import annotations

import ssl
from contextlib import suppress

HANDSHAKE = b"\x16"
"""How each end of a connection by TLS begins; no message of ours in clear does."""

ALERT = b"\x15\x03\x03\x00\x02\x02\x74"
"""What TLS says to who does not show a certificate: the answer to who speaks in clear."""

IN_CLEAR = b"\n"
"""The answer to who begins by TLS where hosts speak in clear."""

_MOST_AT_ONCE = 1 << 16


class Seal:
    """One end of a connection."""

    def __init__(self, context: ssl.SSLContext):
        """Begin as the side that the context is for."""
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._came, self._goes, server_side=is_server)

    def shake(self, came: bytes) -> bool:
        """Go on with the handshake by what has come from the other end; whether it is through.

        What it has to be sent is `waiting`, whatever becomes of it here.

        Raises:
            ssl.SSLError: if the other end is none to talk to.
        """
        self._came.write(came)
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            return True
        return False

    def waiting(self) -> bytes:
        """Return what is to be sent now."""
        return self._goes.read()

    def opened(self, came: bytes) -> bytes:
        """Decrypt what has come from the other end; nothing as long as a part is missing.

        Raises:
            ssl.SSLError: if it has not come from there as it is.
        """
        self._came.write(came)
        said = bytearray()
        with suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_MOST_AT_ONCE):
                said += part
        return bytes(said)

    def sealed(self, said: bytes) -> bytes:
        """Encrypt what the other end is to get."""
        rest = memoryview(said)
        while rest:
            rest = rest[self._tls.write(rest) :]
        return self.waiting()
