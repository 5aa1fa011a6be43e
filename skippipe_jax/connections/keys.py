"""By what a host knows the hosts of its run: the keys that follow from the secret of the run.

All of them derive the same key and the same certificate from it, which both ends of a connection
show and demand, by TLS 1.3. Hosts without a secret stay on their machine, unless they are told that
the network is theirs alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Iterator
from datetime import datetime

from skippipe_sched.errors import InputError

from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.secret import Secret, read_secret

MAKE_ONE = "make a secret by skippipe keys FILE, and give all hosts of the run that file"

_PURPOSE = b"skippipe-jax: the Ed25519 key of a run"
# Clocks differ, and that of a machine without a battery begins here.
_FROM, _UNTIL = datetime(1970, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
# Both sides compute it quickly, whereas a stranger might choose one that takes long.
_CURVE = "prime256v1"


class Keys:
    """By what a host knows the others: a secret, that they are on its machine, or nothing.

    Attributes:
        has_secret: whether connections are made by TLS.
        listening: how to take in those that others open; None if they are in clear.
        calling: how to open one to another host; None if it is in clear.
    """

    def __init__(self, secret: Secret | None = None, *, insecure: bool = False):
        """Have a secret or none; without one, other machines are believed if `insecure`.

        Raises:
            InputError: if the package is missing that makes keys of a secret.
        """
        self.has_secret = secret is not None
        # The field and the value of messages.
        self._shown = ("cluster.secret", None) if secret is None else (secret.field, secret.shown)
        self._insecure, self._has_warned = insecure, False
        self.listening = self.calling = None
        if secret is not None:
            key, certificate = derived(secret)
            self.listening = _context(ssl.PROTOCOL_TLS_SERVER, key, certificate)
            self.listening.num_tickets = 0  # Nobody comes again by an old handshake.
            self.calling = _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate)

    @classmethod
    def of(cls, config: ClusterConfig) -> Keys:
        """Those that the environment or the configuration gives this host.

        Raises:
            InputError: if what they name is no secret.
        """
        return cls(read_secret(config.secret), insecure=config.insecure)

    def require_allowed(self, address: str) -> None:
        """Refuse an IP address of other machines, where nothing would tell hosts from strangers.

        Raises:
            InputError: if that is so.
        """
        if not (self.has_secret or self._insecure or _is_loopback(address)):
            raise InputError(
                "cluster.secret",
                None,
                f"{address} is no loopback address, and without a secret whoever can reach a host "
                "is taken for one of the run",
                f"{MAKE_ONE[:1].upper()}{MAKE_ONE[1:]}; or write cluster.insecure: true, if nobody "
                "else is in this network",
            )

    def warning(self, address: str) -> str | None:
        """What to say, once, where an address of other machines is used without a secret."""
        if self.has_secret or self._has_warned or _is_loopback(address):
            return None
        self._has_warned = True
        return (
            f"warning: cluster.insecure: whoever reaches {address} can read along, end this run or "
            f"be a host of it. If others are in this network, {MAKE_ONE}"
        )

    def differs(self, address: tuple[str, int]) -> InputError:
        """What a host is told where it has called one that has another secret."""
        problem = f"what listens at {join_address(*address)} does not have this secret"
        return InputError(*self._shown, problem, "Give all hosts of the run the same secret")

    def is_one_sided(self, address: tuple[str, int]) -> InputError:
        """What a host is told where only one has a secret, itself or who listens there."""
        where = f"what listens at {join_address(*address)}"
        if not self.has_secret:
            remedy = "Give this host the file with the secret that the others of its run have"
            return InputError(*self._shown, f"{where} has a secret, and this host none", remedy)
        remedy = (
            "Give all hosts of the run the same secret, or none of them; or it is another program "
            "that uses this port"
        )
        return InputError(*self._shown, f"{where} answers in clear, so it has none", remedy)


def _context(side: int, key: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # Hosts have the same certificate, wherever they are.
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_ecdh_curve(_CURVE)
    context.load_verify_locations(cadata=certificate.decode())
    with _readable(certificate) as its_path, _readable(key) as path:
        context.load_cert_chain(its_path, path)
    return context


LOOPBACK_ONLY = Keys()
"""Those of a host that has been told nothing."""


def derived(secret: Secret) -> tuple[bytes, bytes]:
    """The key of a run and the certificate that it has signed of itself, both as PEM.

    The same secret gives the same bytes everywhere.

    Raises:
        InputError: if the package is missing that makes them.
    """
    try:  # Only a run with a secret needs it, and it takes a while.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        problem = "needs the package cryptography, which is not installed here"
        remedy = "Install it: pip install cryptography"
        raise InputError(secret.field, secret.shown, problem, remedy) from error

    seed = HKDF(hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret.text.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a run of skippipe-jax")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[str]:
    """A path at which little can be read, once: a pipe, since a file would stay on the disk."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(content)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
