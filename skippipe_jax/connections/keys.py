"""By what a host knows the hosts of its run: the keys that follow from the secret of the run.

All of them derive the same key and the same certificate from it, which both ends of a connection
show and demand, by TLS 1.3; while one secret takes the place of another, they take the certificates
of both. Hosts without a secret stay on their machine, unless they are told that the network is
theirs alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from skippipe_sched.errors import InputError

from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.secret import Secret, read_secret

MAKE_ONE = "make a secret by skippipe keygen FILE, and give all hosts of the run that file"

PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        (
            *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # RFC 1918
            *("127.0.0.0/8", "::1/128"),  # loopback
            *("169.254.0.0/16", "fe80::/10"),  # of a link
            *("100.64.0.0/10", "fc00::/7"),  # shared by carriers, and by networks over WireGuard
        ),
    )
)
"""Addresses that the internet does not route."""

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

    def __init__(
        self,
        secret: Secret | None = None,
        *,
        insecure: bool = False,
        insecure_transfers: bool = False,
    ):
        """Have a secret or none; without one, other machines are believed if `insecure`.

        With one, hosts use public addresses too if `insecure_transfers`.

        Raises:
            InputError: if the package is missing that makes keys of a secret.
        """
        self.has_secret = secret is not None
        # The field and the value of messages.
        self._shown = ("cluster.secret", None) if secret is None else (secret.field, secret.shown)
        self._insecure, self._has_warned = insecure, False
        self._insecure_transfers = insecure_transfers
        self.listening = self.calling = None
        if secret is not None:
            texts = [text for text in (secret.text, secret.other) if text is not None]
            (key, own), *rest = [derived(replace(secret, text=text)) for text in texts]
            others = [certificate for _, certificate in rest]
            self.listening = _context(ssl.PROTOCOL_TLS_SERVER, key, own, others)
            self.listening.num_tickets = 0  # Nobody comes again by an old handshake.
            self.calling = _context(ssl.PROTOCOL_TLS_CLIENT, key, own, others)

    @classmethod
    def of(cls, config: ClusterConfig) -> Keys:
        """Return the keys that the environment or the configuration gives this host.

        Raises:
            InputError: if what they name is no secret.
        """
        return cls(
            read_secret(config.secret),
            insecure=config.insecure,
            insecure_transfers=config.insecure_transfers,
        )

    def require_allowed(self, address: str) -> None:
        """Refuse an IP address to listen on, where strangers could do what only hosts should.

        That is any of other machines without a secret. With one it is any public address: it does
        not protect what hosts transfer.

        Raises:
            InputError: if that is so.
        """
        if self.has_secret and not (self._insecure_transfers or _is_private(address)):
            raise InputError(
                "cluster.insecure_transfers",
                False,
                f"{address} is no private address, and what hosts transfer goes in clear, with a "
                "secret or without",
                "Make a private network by WireGuard and give hosts their addresses in it, as "
                "experiments/launch/wireguard.sh and docs/cluster.md have it; or write "
                "cluster.insecure_transfers: true, if a tunnel or a firewall keeps others from "
                "this address",
            )
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
        """Return a warning where an address of other machines is used without a secret."""
        if self.has_secret or self._has_warned or _is_loopback(address):
            return None
        self._has_warned = True
        return (
            f"cluster.insecure: whoever reaches {address} can read along, end this run or "
            f"be a host of it. If others are in this network, {MAKE_ONE}"
        )

    def differs(self, address: tuple[str, int]) -> InputError:
        """Make the error for calling a host that has another secret."""
        problem = f"what listens at {join_address(*address)} does not have this secret"
        return InputError(*self._shown, problem, "Give all hosts of the run the same secret")

    def is_one_sided(self, address: tuple[str, int]) -> InputError:
        """Make the error where only one end has a secret."""
        where = f"what listens at {join_address(*address)}"
        if not self.has_secret:
            remedy = "Give this host the file with the secret that the others of its run have"
            return InputError(*self._shown, f"{where} has a secret, and this host none", remedy)
        remedy = (
            "Give all hosts of the run the same secret, or none of them; or it is another program "
            "that uses this port"
        )
        return InputError(*self._shown, f"{where} answers in clear, so it has none", remedy)


def _context(
    side: int, key: bytes, certificate: bytes, others: Sequence[bytes] = ()
) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # Hosts have the same certificate, wherever they are.
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_ecdh_curve(_CURVE)
    context.load_verify_locations(cadata=b"".join([certificate, *others]).decode())
    with _readable(certificate) as its_path, _readable(key) as path:
        context.load_cert_chain(its_path, path)
    return context


LOOPBACK_ONLY = Keys()
"""Those of a host that has been told nothing."""


def derived(secret: Secret) -> tuple[bytes, bytes]:
    """Derive the key of a run and its self-signed certificate, both as PEM.

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
    # OpenSSL finds a certificate by its name: those of two secrets may not have the same.
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    whose = f"a run of skippipe-jax, {raw.hex()[:32]}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, whose)])
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
    """Make a path at which little can be read, once: a pipe, since a file would stay on disk."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(content)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


def _is_loopback(address: str) -> bool:
    return _unmapped(address).is_loopback


def _is_private(address: str) -> bool:
    found = _unmapped(address)
    return any(found in network for network in PRIVATE if network.version == found.version)


def _unmapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
