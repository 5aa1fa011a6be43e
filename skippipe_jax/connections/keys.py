"""Mutual authentication of the hosts of a run, by keys derived from the run's secret.

All hosts derive the same key and certificate from the secret. Both ends of a connection present
and require the certificate, over TLS 1.3. While a secret is being replaced, hosts accept the
certificates of both. Hosts without a secret use loopback addresses only, unless they are
configured to trust the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import os
import secrets
import shlex
import ssl
import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import InputError, error_class

from skippipe_jax import log
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.addresses import join_address

SECRET_VARIABLE = "SKIPPIPE_SECRET"
"""Environment variable that holds the secret itself. It takes precedence over all else."""

FILE_VARIABLE = "SKIPPIPE_SECRET_FILE"
"""Environment variable with the path of the secret file. It overrides `cluster.secret`."""

FEWEST_CHARACTERS = 32
"""Minimum length of a secret: anyone who can reach a host's port can guess secrets offline, and
shorter ones may have been chosen by a person."""

MOST_SECRETS = 2
"""Maximum number of secrets in a file. The first is presented to others; all are accepted."""

_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Secret:
    """Secret that the hosts of a run share.

    Attributes:
        field: configuration key or environment variable that it comes from.
        shown: value to print in messages, which is never the secret.
        text: the secret.
        other: second secret that is accepted, while one replaces the other.
    """

    field: str
    shown: str
    text: str = dataclasses.field(repr=False)
    other: str | None = dataclasses.field(default=None, repr=False)


def make_secret(path: Path) -> None:
    """Write a new secret to a new file that only this user may read.

    Raises:
        InputError: if the file exists already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        problem = "already exists, and may be the secret of a run"
        raise InputError("FILE", str(path), problem, "Choose another name") from error
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise error_class(error)(
            "FILE", str(path), problem, "Use a path that you can write"
        ) from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{secrets.token_urlsafe(_BYTES)}\n")


def read_secret(configured: str | None) -> Secret | None:
    """Read this host's secret, if the environment or the configuration names one.

    Raises:
        InputError: if it is not a valid secret, there are more than `MOST_SECRETS`, or the file
            cannot be read.
    """
    if (text := os.environ.get(SECRET_VARIABLE)) is not None:
        return _checked(SECRET_VARIABLE, "(not shown)", text)
    named = os.environ.get(FILE_VARIABLE)
    path, where = (named, FILE_VARIABLE) if named else (configured, "cluster.secret")
    if path is None:
        return None
    file = Path(path).expanduser()
    secret = _checked(where, path, fields.read_text(file, where))
    _warn_of_readers(where, str(file))
    return secret


@functools.cache  # Warn once.
def _warn_of_readers(where: str, path: str) -> None:
    """Warn if every user of this machine can read or change the secret file."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        named = f"{where} = {path!r}"
        problem = f"every user of this machine can use this secret (mode {mode:o})"
        log.warning(f"{named}: {problem}. Run chmod 600 {shlex.quote(path)}")


def _checked(where: str, shown: str, text: str) -> Secret:
    lines = [line.strip() for line in text.strip().split("\n")]
    for line in lines:
        if len(line) < FEWEST_CHARACTERS or not line.isprintable() or " " in line:
            problem = f"each line must be one word of {FEWEST_CHARACTERS} characters or more"
            raise InputError(where, shown, problem, "Run skippipe keygen FILE to create a secret")
    if len(lines) > MOST_SECRETS:
        problem = f"has {len(lines)} secrets, more than {MOST_SECRETS}"
        remedy = "Keep the one to present, and below it one to accept"
        raise InputError(where, shown, problem, remedy)
    return Secret(where, shown, *lines)


CREATE_SECRET = "run skippipe keygen FILE and copy the file to all hosts of the run"

PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        (
            *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # RFC 1918
            *("127.0.0.0/8", "::1/128"),  # loopback
            *("169.254.0.0/16", "fe80::/10"),  # link-local
            *("100.64.0.0/10", "fc00::/7"),  # carrier NAT, WireGuard networks
        ),
    )
)
"""Networks whose addresses the internet does not route."""

_PURPOSE = b"skippipe-jax: the Ed25519 key of a run"
# Always valid: clocks differ, and a machine without a battery starts at 1970.
_FROM, _UNTIL = datetime(1970, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
# A fast curve. If any were allowed, a stranger could choose a slow one.
_CURVE = "prime256v1"


class Keys:
    """TLS contexts of a host, and the addresses that it may use with or without a secret.

    Attributes:
        has_secret: True if connections use TLS.
        listening: TLS context of accepted connections; None if they are in clear.
        calling: TLS context of opened connections; None if they are in clear.
    """

    def __init__(
        self,
        secret: Secret | None = None,
        *,
        insecure: bool = False,
        insecure_transfers: bool = False,
    ):
        """Derive the keys from a secret, if there is one.

        Without a secret, other machines are trusted if `insecure`. With one, public addresses
        are allowed if `insecure_transfers`.
        """
        self.has_secret = secret is not None
        # Field and value of error messages.
        self._shown = ("cluster.secret", None) if secret is None else (secret.field, secret.shown)
        self._insecure, self._has_warned = insecure, False
        self._insecure_transfers = insecure_transfers
        self.listening = self.calling = None
        if secret is not None:
            key, own = derived(secret.text)
            accepted = own if secret.other is None else own + derived(secret.other)[1]
            self.listening = _context(ssl.PROTOCOL_TLS_SERVER, key, own, accepted)
            self.listening.num_tickets = 0  # Sessions are never resumed.
            self.calling = _context(ssl.PROTOCOL_TLS_CLIENT, key, own, accepted)

    @classmethod
    def of(cls, config: ClusterConfig) -> Keys:
        """Return the keys of this host from the environment or the configuration.

        Raises:
            InputError: if the secret is not valid.
        """
        return cls(
            read_secret(config.secret),
            insecure=config.insecure,
            insecure_transfers=config.insecure_transfers,
        )

    def require_allowed(self, address: str) -> None:
        """Refuse an IP address to listen on or call, if strangers could act as hosts there.

        Without a secret, only loopback addresses are allowed. With one, only private addresses
        are: the secret does not protect transfers. `insecure` and `insecure_transfers` lift this.

        Raises:
            InputError: if the address is not allowed.
        """
        if self.has_secret and not (self._insecure_transfers or _is_private(address)):
            raise InputError(
                "cluster.insecure_transfers",
                False,
                f"{address} is not a private address, and transfers between hosts are not "
                "encrypted, even with a secret",
                "Connect the hosts by WireGuard and use their addresses in it "
                "(experiments/launch/wireguard.sh, docs/cluster.md), or set "
                "cluster.insecure_transfers: true if a tunnel or a firewall protects this address",
            )
        if not (self.has_secret or self._insecure or _is_loopback(address)):
            raise InputError(
                "cluster.secret",
                None,
                f"required for non-loopback address {address}, as anyone who reaches it could join "
                "the run",
                f"{CREATE_SECRET[:1].upper()}{CREATE_SECRET[1:]}, or set cluster.insecure: true on "
                "a trusted network",
            )

    def warning(self, address: str) -> str | None:
        """Return a warning, once, if a non-loopback address is used without a secret."""
        if self.has_secret or self._has_warned or _is_loopback(address):
            return None
        self._has_warned = True
        return (
            f"cluster.insecure: anyone who reaches {address} can read the messages of this run, "
            f"stop it or join it. If the network is not trusted, {CREATE_SECRET}"
        )

    def differs(self, address: tuple[str, int]) -> InputError:
        """Return the error for a peer that has another secret."""
        problem = f"TLS handshake with {join_address(*address)} failed: different secret"
        return InputError(*self._shown, problem, "Give all hosts of the run the same secret")

    def is_one_sided(self, address: tuple[str, int]) -> InputError:
        """Return the error for a connection of which only one end has a secret."""
        peer = join_address(*address)
        if not self.has_secret:
            problem = f"{peer} requires a secret, and this host has none"
            return InputError(*self._shown, problem, "Give this host the secret file of its run")
        problem = f"{peer} does not use TLS: it has no secret, or is another program"
        remedy = "Give all hosts of the run the same secret, or none, and check the port"
        return InputError(*self._shown, problem, remedy)


def _context(side: int, key: bytes, certificate: bytes, accepted: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # All hosts have the same certificate.
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_ecdh_curve(_CURVE)
    context.load_verify_locations(cadata=accepted.decode())
    with _readable(certificate) as its_path, _readable(key) as path:
        context.load_cert_chain(its_path, path)
    return context


LOOPBACK_ONLY = Keys()
"""Keys of a host without a secret: only loopback addresses are allowed."""


def derived(secret: str) -> tuple[bytes, bytes]:
    """Derive the key of a run and its self-signed certificate, both as PEM.

    The same secret gives the same bytes everywhere.
    """
    # Only a run with a secret needs these imports, and they are slow.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.x509.oid import NameOID

    seed = HKDF(hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    # OpenSSL looks certificates up by name, so those of two secrets need different names.
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
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[str]:
    """Yield a path from which `content`, which has to be short, can be read once.

    It is a pipe: a file could stay on disk.
    """
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
    parsed = _unmapped(address)
    return any(parsed in network for network in PRIVATE if network.version == parsed.version)


def _unmapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
