"""The proxy that the environment puts between this machine and a server; there is none to this machine itself.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` are read as curl reads them. Libraries exempt the name
`localhost` at most: a server at `0.0.0.0`, at this machine's own name or at one of its addresses is then asked for at
the proxy, which cannot reach it.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_HOSTS_FILE = Path("/etc/hosts")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and the variable that names it.

    Args:
        url: with the user and password, if it has any.
        source: the variable, or `the system's settings`.
        host: the server that is asked through it.
    """

    url: str = field(repr=False)
    source: str
    host: str

    def __str__(self) -> str:
        """`proxy `http://cache:3128` (HTTP_PROXY)`, without user and password."""
        scheme, _, rest = self.url.partition("://")
        return f"proxy `{scheme}://{rest.rpartition('@')[2].rstrip('/')}` ({self.source})"

    @property
    def hint(self) -> str:
        """How to ask without it."""
        return f"NO_PROXY={self.host} asks without the proxy"


def proxy_of(url: str) -> Proxy | None:
    """The proxy that a URL is asked through, or None."""
    parts = urlsplit(url)
    host, proxies = parts.hostname or "", getproxies()
    scheme = parts.scheme if proxies.get(parts.scheme) else "all"
    named = proxies.get(scheme)
    port = parts.port or _PORTS.get(parts.scheme)
    if not named or _is_exempt(host, port, proxies.get("no", "")) or proxy_bypass(host) or is_this_machine(host):
        return None
    variables = (name for name in os.environ if name.lower() == f"{scheme}_proxy")
    return Proxy(
        named if "://" in named else f"http://{named}",
        next(variables, "the system's settings"),
        f"[{host}]" if ":" in host else host,
    )


def exempt_this_machine(url: str) -> Proxy | None:
    """Add a URL's host to NO_PROXY where it is this machine, for libraries that read the environment by themselves.

    Returns:
        The proxy that is nevertheless used for the URL, or None.
    """
    host = urlsplit(url).hostname
    proxies = getproxies()
    is_proxied = any(name != "no" for name in proxies) and not _is_exempt(host or "", None, proxies.get("no", ""))
    if host and is_proxied and is_this_machine(host):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (proxies.get("no"), host)))
    return proxy_of(url)


def _is_exempt(host: str, port: int | None, no_proxy: str) -> bool:
    """Whether NO_PROXY names a host: by name, domain, address, network or with a port."""
    return any(_names(entry, host.rstrip("."), port) for entry in re.split(r"[,\s]+", no_proxy.lower()) if entry)


def _names(entry: str, host: str, port: int | None) -> bool:
    if entry == "*":
        return True
    match = re.fullmatch(r"(\[.+\]|[^:]+)(?::(\d+))?", entry.rpartition("://")[2])
    name, named_port = match.groups() if match else (entry, None)
    if named_port and named_port != str(port):
        return False
    name = name.strip("[].")
    try:
        return ip_address(host) in ip_network(name, strict=False)
    except ValueError:
        domain = name.removeprefix("*").lstrip(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine: a loopback or wildcard address, its own name, an alias or one of its addresses.

    Names that cannot be this machine's are not looked up: behind a proxy the proxy does that.
    """
    host = host.lower().rstrip(".")
    if host in ("localhost", "localhost.localdomain") or host.endswith(".localhost"):
        return True
    if not (_is_address(host) or _may_be_own_name(host)):
        return False
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return bool(addresses) and all(_is_own_address(family, place) for family, _, _, _, place in addresses)


def _is_address(host: str) -> bool:
    """Whether a host is an address in any form that the system reads: `127.1` and `0` are."""
    try:
        socket.inet_aton(host)
    except (OSError, UnicodeError):
        return ":" in host
    return True


def _may_be_own_name(host: str) -> bool:
    """Whether a name has no domain, begins with this machine's own name, or stands in its hosts file."""
    own = socket.gethostname().lower().partition(".")[0]
    if "." not in host or host.partition(".")[0] == own:
        return True
    try:
        lines = _HOSTS_FILE.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    except OSError:
        return False
    return any(host in line.partition("#")[0].split()[1:] for line in lines)


def _is_own_address(family: int, place: tuple[Any, ...]) -> bool:
    """Whether an address is one of this machine's: what it would send from to get there is the address itself."""
    address = ip_address(place[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback or address.is_unspecified:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((place[0], 9, *place[2:]))
            return bool(probe.getsockname()[0] == place[0])
    except OSError:
        return False
