"""What the lab must know of the server it plays on: one of its own, or one that the user named."""

from __future__ import annotations

from typing import Protocol

from saferetry.lab.proxy import Proxy


class Server(Protocol):
    """A primary that is reached directly.

    Attributes:
        host: name or address.
        port: TCP port.
        has_failpoints: whether writes can be held in its engine.
        has_javascript: whether `$where` works on it.
        sees_all_users: whether operations of every user may be looked at, or only the own user's.
    """

    host: str
    port: int
    has_failpoints: bool
    has_javascript: bool
    sees_all_users: bool

    @property
    def uri(self) -> str:
        """The connection string, with credentials if there are any."""

    @property
    def version(self) -> str:
        """The server's version, e.g. "6.0.5"."""

    def uri_through(self, proxy: Proxy) -> str:
        """Return the connection string through a proxy before it."""
