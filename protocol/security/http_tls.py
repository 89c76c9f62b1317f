"""TLS of a run's HTTP servers: one self-signed certificate per keys folder, the only one that clients trust.

No authority and no host name stand behind it: a client that has ``http.crt`` recognises the run on any host.
Therefore the certificate does not expire; it is replaced like keys are (`offbeat keys rotate FOLDER tls`).
"""

import datetime
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import KeysUnusable
from protocol.security.http_token import authorization_header
from protocol.security.key_checks import refuse_changeable, refuse_open_secret, unreadable

CERTIFICATE_FILE = "http.crt"
PRIVATE_FILE = "http.key"
SERVER_NAME = "offbeat"
"""Name in the certificate, for clients that need one.

Prometheus takes it as ``server_name``, curl by ``--connect-to``.
"""
LOCAL_NAMES = ("127.0.0.1", "::1")
# So early that the certificate is valid on hosts whose clocks are behind, too.
FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
# The value that RFC 5280, 4.1.2.5, reserves for a certificate without an end.
UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def new_private_key() -> bytes:
    """Make a private key (ECDSA, P-256), as PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_of(private: bytes) -> bytes:
    """Make a self-signed certificate of a private key, both as PEM.

    Raises:
        KeysUnusable: the bytes are not an unencrypted private key of an elliptic curve.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(private, None)
    except (ValueError, TypeError) as error:
        # An encrypted key raises TypeError.
        raise KeysUnusable(
            f"{PRIVATE_FILE}: {error}; make it anew with `offbeat keys rotate FOLDER tls`"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeysUnusable(
            f"{PRIVATE_FILE}: not a key of an elliptic curve; make it anew with `offbeat keys rotate FOLDER tls`"
        )
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SERVER_NAME)])
    names = [x509.DNSName(SERVER_NAME), x509.DNSName("localhost")]
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in LOCAL_NAMES]
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), FROM, UNTIL
    ).add_extension(x509.SubjectAlternativeName([*names, *addresses]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def server_context(keys: Path) -> ssl.SSLContext:
    """Return the TLS 1.3 context of a server of the run that this keys folder belongs to.

    Raises:
        KeysUnusable: there is no certificate, or others can read its private key, or the two do not match.
    """
    certificate, private = keys / CERTIFICATE_FILE, keys / PRIVATE_FILE
    try:
        refuse_open_secret(private, private.stat().st_mode)
    except OSError as error:
        raise unreadable(private, error) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, private)
    except ssl.SSLError as error:
        raise KeysUnusable(
            f"{certificate} and {private.name} are not of one pair ({error.reason}); make both anew with "
            f"`offbeat keys rotate {keys} tls`"
        ) from None
    except OSError as error:
        raise unreadable(certificate, error) from None
    return context


CertificateStamp = tuple[tuple[int, int], ...]


def certificate_stamp(keys: Path) -> CertificateStamp:
    """Return a value that changes whenever the certificate or its private key changes."""
    found = []
    for path in (keys / CERTIFICATE_FILE, keys / PRIVATE_FILE):
        try:
            seen = path.stat()
            found.append((seen.st_mtime_ns, seen.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def client_context(keys: Path) -> ssl.SSLContext:
    """Return the TLS context of a client, which accepts the certificate of this run and no other.

    Raises:
        KeysUnusable: there is no certificate, or others can change it.
    """
    certificate = keys / CERTIFICATE_FILE
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Only this very certificate is trusted, so the host name proves nothing more.
    context.check_hostname = False
    try:
        refuse_changeable(certificate, certificate.stat().st_mode)
        context.load_verify_locations(certificate)
    except ssl.SSLError as error:
        raise KeysUnusable(
            f"{certificate}: is no certificate ({error.reason}); copy that of the run"
        ) from None
    except OSError as error:
        raise unreadable(certificate, error) from None
    return context


@dataclass(frozen=True)
class Access:
    """Headers and TLS context with which a client asks the servers of a run."""

    headers: Mapping[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    """TLS context; None: not encrypted, and then there is no token either."""


def access(keys: Path | None) -> Access:
    """Read the access of a keys folder; None: a run that encrypts nothing.

    Raises:
        KeysUnusable: the folder lacks the token or the certificate.

    Example:
        >>> access(None)
        Access(headers={}, context=None)
    """
    return Access() if keys is None else Access(authorization_header(keys), client_context(keys))


def scheme(keys: Path | None) -> str:
    """Return the URL scheme of servers that have these keys.

    Example:
        >>> scheme(None), scheme(Path("keys"))
        ('http', 'https')
    """
    return "http" if keys is None else "https"
