"""Settings of the server: the recipe's section `serve`, and the API keys, which no recipe holds."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from specdec_cli.errors import UsageError
from specdec_cli.recipe.schema import Serve

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server behaves.

    Args:
        serve: the recipe's section.
        api_keys: any of them gives access to every route; without keys, everyone has access.
    """

    serve: Serve
    api_keys: tuple[str, ...] = ()

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names that a Host header may have, in lower case; None for any.

        On loopback a page of another site could otherwise reach the server under a name of its own (DNS rebinding).
        """
        named = {host.lower().strip("[]") for host in self.serve.allowed_hosts}
        if is_loopback(self.serve.host):
            return frozenset({*named, *_LOOPBACK_NAMES, self.serve.host.lower()})
        return frozenset(named) if named else None

    def check_exposure(self, insecure_no_auth: bool) -> None:
        """Refuse to listen beyond this machine without a key, unless that is wanted.

        Raises:
            UsageError: no key, and an address that others can reach.
        """
        if self.api_keys or insecure_no_auth or is_loopback(self.serve.host):
            return
        raise UsageError(
            f"`--host {self.serve.host}` lets other machines in, and there is no API key",
            f"set {self.serve.api_key_env} (or --api-key), or add --insecure-no-auth if everybody may use the server",
        )


def read_keys(keys: Sequence[str], listed: str = "") -> tuple[str, ...]:
    """API keys.

    Args:
        keys: one key each, as on a command line.
        listed: several, separated by commas, as in the environment.

    Raises:
        UsageError: an empty key was given, or one with characters that no HTTP header can carry.
    """
    if not all(key.strip() for key in keys):
        raise UsageError("`--api-key` is empty", "give a key, or leave the option out")
    all_keys = tuple(key.strip() for key in (*keys, *listed.split(",")) if key.strip())
    if any(not key.isascii() or not key.isprintable() for key in all_keys):
        raise UsageError("an API key may hold printable ASCII characters only", "choose another key")
    return all_keys


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
