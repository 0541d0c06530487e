"""A test server of the user's own, given by its connection string."""

from __future__ import annotations

import socket
import uuid
from typing import Any
from urllib.parse import quote_plus, urlencode

from pymongo import MongoClient, uri_parser
from pymongo.errors import OperationFailure, PyMongoError

from saferetry.lab.proxy import Proxy

_PATIENCE_MS = 5_000
_KEPT = {"authsource": "authSource", "authmechanism": "authMechanism"}
_UNAUTHORIZED = 13
_SRV = "mongodb+srv://"

AnyClient = MongoClient[dict[str, Any]]


class GivenServerError(RuntimeError):
    """The lab cannot play on this server; the message says why, and holds no part of the connection string but hosts."""


class GivenServer:
    """The primary among the hosts of a connection string, reached directly.

    Hosts and credentials are taken from the string; all other options are the scenarios' own. The lab writes into databases
    of its own with random names, `lab_...`, empties them, and ends only sessions of its own clients.

    Attributes:
        host: the primary's.
        port: the primary's.
        has_failpoints: whether it was started with test commands, and this user may see that.
        has_javascript: whether `$where` works.
        sees_all_users: False: only the own user's operations are looked at, which needs no privilege.
        ignored: names of the string's options that are not used.
    """

    sees_all_users = False

    def __init__(self, uri: str) -> None:
        """Look at the server.

        Args:
            uri: the connection string.

        Raises:
            GivenServerError: it cannot be played on.
        """
        parsed = _parsed(uri)
        self._credentials = (parsed["username"], parsed["password"])
        options = {name.lower(): value for name, value in parsed["options"].items()}
        self._options = {_KEPT[name]: value for name, value in options.items() if name in _KEPT}
        if parsed["username"] and "authSource" not in self._options and parsed["database"]:
            self._options["authSource"] = parsed["database"]
        self.ignored = sorted(set(options) - set(_KEPT) - {"replicaset", "directconnection", "tls"})
        self.host, self.port = self._primary(parsed["nodelist"])
        with self._client() as client:
            self.version = str(client.server_info()["version"])
            self.has_failpoints = _has_failpoints(client)
            self.has_javascript = _can_write_and_has_javascript(client)

    def __repr__(self) -> str:
        return f"GivenServer({self.host}:{self.port})"

    @property
    def uri(self) -> str:
        """The connection string of a direct connection, with credentials."""
        return self._uri(self.host, self.port)

    def uri_through(self, proxy: Proxy) -> str:
        """Return the connection string through a proxy before it."""
        return self._uri("127.0.0.1", proxy.port)

    def _uri(self, host: str, port: int) -> str:
        user, password = self._credentials
        who = f"{quote_plus(user)}:{quote_plus(password or '')}@" if user else ""
        return f"mongodb://{who}{host}:{port}/?{urlencode({'directConnection': 'true', **self._options})}"

    def _client(self, host: str = "", port: int = 0) -> AnyClient:
        uri = self._uri(host or self.host, port or self.port)
        return AnyClient(uri, serverSelectionTimeoutMS=_PATIENCE_MS, connectTimeoutMS=_PATIENCE_MS)

    def _primary(self, hosts: list[tuple[str, int]]) -> tuple[str, int]:
        seen = []
        for host, port in hosts:
            address = _ipv4(host, port)
            try:
                with self._client(address, port) as client:
                    hello = client.admin.command("isMaster")
            except OperationFailure:
                raise GivenServerError(
                    f"{host}:{port} did not let this user in: look at user, password and authSource"
                ) from None
            except PyMongoError as exc:
                seen.append(f"{host}:{port} does not answer ({type(exc).__name__}; the lab speaks without TLS)")
                continue
            if hello.get("msg") == "isdbgrid":
                raise GivenServerError(f"{host}:{port} is a mongos: give the connection string of a replica set")
            if not hello.get("setName"):
                raise GivenServerError(
                    f"{host}:{port} is a standalone, which remembers no writes: make it a replica set, which may have one node "
                    "(mongod --replSet rs0, then rs.initiate())"
                )
            if hello["ismaster"]:
                return address, port
            seen.append(f"{host}:{port} is no primary (that is {hello.get('primary', 'nobody at present')})")
        raise GivenServerError(f"no primary found: {'; '.join(seen)}")


def _parsed(uri: str) -> dict[str, Any]:
    if uri.startswith(_SRV):
        raise GivenServerError(
            "mongodb+srv means TLS, which the lab's proxy cannot read: give the hosts, of a server without TLS"
        )
    try:
        parsed = uri_parser.parse_uri(uri, warn=False)
    except (PyMongoError, ValueError) as exc:  # the driver's text may quote a badly escaped password
        raise GivenServerError(
            f"this is no connection string ({type(exc).__name__}): mongodb://[user:password@]host:port/, with user and "
            "password percent-encoded"
        ) from None
    if parsed["options"].get("tls"):
        raise GivenServerError(
            "the lab's proxy reads and cuts what goes over the wire, so TLS will not do: give a server without it"
        )
    if sockets := [host for host, port in parsed["nodelist"] if port is None]:
        raise GivenServerError(f"{', '.join(sockets)}: the lab's proxy speaks TCP, not UNIX sockets")
    return dict(parsed)


def _ipv4(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        raise GivenServerError(f"{host} has no IPv4 address") from None
    return str(found[0][4][0])


def _has_failpoints(client: AnyClient) -> bool:
    try:
        return bool(client.admin.command("getParameter", enableTestCommands=1)["enableTestCommands"])
    except OperationFailure:
        return False


def _can_write_and_has_javascript(client: AnyClient) -> bool:
    """Write into a database of the lab's own, as the scenarios will, and look at it with JavaScript.

    Raises:
        GivenServerError: this user may not.
    """
    database = client[f"lab_{uuid.uuid4().hex[:12]}"]
    try:
        database.look.insert_one({})
    except OperationFailure as exc:
        if exc.code != _UNAUTHORIZED:
            raise
        raise GivenServerError(
            f"this user may not write to a database of the lab's own ({database.name}): it needs readWriteAnyDatabase"
        ) from None
    try:
        return database.look.find_one({"$where": "true"}) is not None
    except OperationFailure:
        return False
    finally:
        database.drop_collection("look")  # with its last collection the database is gone
