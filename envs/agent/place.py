"""Where the endpoint of agents listens, and the address that agents get. Other hosts reach it only with TLS."""

import socket
from pathlib import Path
from typing import NamedTuple

from envs.errors import EnvError
from protocol.errors import AddressRefused, KeysUnusable
from protocol.security.addresses import is_loopback, is_wildcard, split_address
from protocol.security.http import SERVER_NAME, scheme, server_context

LISTEN = "127.0.0.1:0"


class EndpointPlace(NamedTuple):
    """Where an endpoint listens."""

    host: str
    port: int
    keys: Path | None = None
    """Keys folder with the certificate; None: no TLS."""
    advertised_host: str = ""
    """Host in the address that agents get; "": that at which it listens, or this machine's name."""

    def url(self, port: int) -> str:
        """Return the address that agents get.

        Example:
            >>> EndpointPlace("::1", 0).url(5761), EndpointPlace("0.0.0.0", 0, Path("keys"), "offbeat").url(5761)
            ('http://[::1]:5761', 'https://offbeat:5761')
        """
        host = self.advertised_host or (socket.gethostname() if is_wildcard(self.host) else self.host)
        return f"{scheme(self.keys)}://{f'[{host}]' if ':' in host else host}:{port}"


def place_of(listen: str, keys: str, advertised_host: str) -> EndpointPlace:
    """Return the place that the parameters name.

    Raises:
        EnvError: other hosts can reach it and there is no TLS, or the keys folder cannot be used.

    Example:
        >>> place_of("0.0.0.0:0", "", "")
        Traceback (most recent call last):
        envs.errors.EnvError: params.listen = '0.0.0.0:0': other hosts can reach it, and nothing is encrypted; make \
keys with `offbeat keys make FOLDER`, and name the folder in params.keys
    """
    folder = Path(keys) if keys else None
    if folder is None and not is_loopback(str(listen).rpartition(":")[0]):
        raise EnvError(
            f"params.listen = {listen!r}: other hosts can reach it, and nothing is encrypted; make keys with `offbeat "
            "keys make FOLDER`, and name the folder in params.keys"
        )
    try:
        host, port = split_address("params.listen", str(listen), folder)
        if folder is not None:
            server_context(folder)
    except (AddressRefused, KeysUnusable) as error:
        raise EnvError(str(error)) from None
    if folder is not None and not advertised_host and not is_loopback(str(listen).rpartition(":")[0]):
        raise EnvError(
            f"params.listen = {listen!r}: the certificate of {keys} is not for this host's name or address, so no "
            f'agent could check it; set params.advertised_host = "{SERVER_NAME}", and let that name lead to this host '
            "where agents run"
        )
    return EndpointPlace(host, port, folder, advertised_host)
