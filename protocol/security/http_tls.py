"""TLS of a run's HTTP servers: one self-signed certificate a keys folder, and clients that trust that one alone.

No authority and no host name stand behind it: who has ``http.crt`` knows the run, wherever it runs. Therefore it does
not end, either; it is replaced, as keys are (`offbeat keys rotate FOLDER tls`).
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
"""Name in the certificate, for clients that insist on one: Prometheus' ``server_name``, curl's ``--connect-to``."""
LOCAL_NAMES = ("127.0.0.1", "::1")
FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)  # hosts whose clocks are behind have it valid, too
# RFC 5280, 4.1.2.5: no end is stated.
UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def new_private_key() -> bytes:
    """A private key (ECDSA, P-256) as PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_of(private: bytes) -> bytes:
    """A self-signed certificate of a private key, both PEM.

    Raises:
        KeysUnusable: it is no such key.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(private, None)
    except (ValueError, TypeError) as error:  # the second: it is encrypted
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
    """For a server of the run that this keys folder belongs to: TLS 1.3.

    Raises:
        KeysUnusable: there is no certificate, or others can read its private key.
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
    """Changes whenever the certificate or its private key does."""
    found = []
    for path in (keys / CERTIFICATE_FILE, keys / PRIVATE_FILE):
        try:
            seen = path.stat()
            found.append((seen.st_mtime_ns, seen.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def client_context(keys: Path) -> ssl.SSLContext:
    """For a client of this run's servers: nobody else's certificate will do, whatever its name.

    Raises:
        KeysUnusable: there is no certificate, or others can change it.
    """
    certificate = keys / CERTIFICATE_FILE
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # it is this very certificate, or none
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
    """What a client needs to ask servers of a run: nothing, or a token and whom to send it to."""

    headers: Mapping[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    """None: not encrypted; then there is no token either."""


def access(keys: Path | None) -> Access:
    """That of a keys folder; None: of a run that encrypts nothing.

    Raises:
        KeysUnusable: it lacks the token or the certificate.

    Example:
        >>> access(None)
        Access(headers={}, context=None)
    """
    return Access() if keys is None else Access(authorization_header(keys), client_context(keys))


def scheme(keys: Path | None) -> str:
    """Of URLs of servers that have these keys.

    Example:
        >>> scheme(None), scheme(Path("keys"))
        ('http', 'https')
    """
    return "http" if keys is None else "https"
