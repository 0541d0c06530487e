"""A TCP proxy before a mongod that loses replies, cuts messages and falls silent on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, get_args

from saferetry.lab._frames import Frame, read_frame

Mode = Literal[
    "close", "drop", "drop_reply", "cut", "cut_reply", "delay", "delay_reply", "throttle", "notice", "refuse_hello", "silent"
]

_NO_ANSWER: frozenset[Mode] = frozenset({"refuse_hello", "silent"})


_PIECES = 10  # that a throttled reply comes in


@dataclass(frozen=True, slots=True, eq=False)
class Strike:
    """What befalls one command; see `Proxy` for the modes.

    Attributes:
        mode: a mode that is applied to a command.
        delay: seconds, for "delay", "delay_reply" and "throttle".
        on_hit: called when it takes place; see `Proxy.arm`.
    """

    mode: Mode
    delay: float = 0.0
    on_hit: Callable[[], object] | None = None


Script = Callable[[str, bytes], Strike | None]


@dataclass(slots=True)
class _Fault:
    """What is armed; `seen` is only touched under the proxy's lock."""

    strike: Strike
    needle: bytes | None
    command: str | None
    times: int
    skip: int
    every: int
    seen: int = 0
    struck: int = 0

    def strikes(self, frame: Frame) -> bool:
        """Count a frame that matches and tell whether the fault applies to it."""
        if self.strike.mode in _NO_ANSWER or self.struck >= self.times or frame.is_handshake:
            return False
        if self.command is not None and frame.command != self.command:
            return False
        if self.needle is not None and self.needle not in frame.data:
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.seen - self.skip) % self.every:
            return False
        self.struck += 1
        return True


class Proxy:
    """A proxy on 127.0.0.1 that applies one fault to the first commands that match it.

    Modes, each applied to `times` matching commands (all matching ones are counted, only client commands can match,
    and a hello never does):

    - "close": the command is executed, its reply is thrown away, both connections are closed: a lost reply.
    - "drop_reply": the same, but the connection stays open, so that the client's socket timeout strikes.
    - "cut": the server gets the first half of the command, then both connections are closed: never executed.
    - "cut_reply": executed, the client gets the first half of the reply, then both connections are closed.
    - "delay": the command reaches the server `delay` seconds late, even if the client has left meanwhile.
    - "delay_reply": the reply reaches the client `delay` seconds late.
    - "drop": the server never gets the command, and the connection stays open.
    - "throttle": the reply reaches the client in ten pieces, in the course of `delay` seconds.
    - "notice": nothing happens to it; `on_hit` is called before the server gets the command.

    Two modes apply to everything until `recover()`:

    - "refuse_hello": TCP connections are accepted, no hello is answered; other commands on old connections are.
    - "silent": TCP connections are accepted, nothing is answered, and nothing reaches the server.

    A lost reply must be lost twice (`times=2`), or the driver's own resend hides it. Connections that compress are
    forwarded but not understood. Thread-safe.

    Example:
        with Proxy(mongod.port, command="insert", times=2) as proxy:
            client = MongoClient(proxy.uri())
    """

    def __init__(
        self,
        target_port: int,
        needle: bytes | None = None,
        mode: Mode = "close",
        times: int = 0,
        *,
        command: str | None = None,
        skip: int = 0,
        every: int = 1,
        delay: float = 0.0,
        on_hit: Callable[[], object] | None = None,
        target_host: str = "127.0.0.1",
    ) -> None:
        """Describe the proxy of the mongod at `target_host`:`target_port`; it listens after `start()` or on entering it.

        The other arguments are those of `arm`; with `times=0` nothing but the modes without an answer is armed.
        """
        self._target = (target_host, target_port)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._hits = 0
        self._fault: _Fault | None = None
        self._script: Script | None = None
        self.arm(needle, mode, times, command=command, skip=skip, every=every, delay=delay, on_hit=on_hit)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def port(self) -> int:
        """The port it listens on (127.0.0.1)."""
        if self._listener is None:
            raise RuntimeError("the proxy was not started")
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def hits(self) -> int:
        """Faults that really took place since the last `arm`.

        A reply thrown away or cut counts only if it said ok: 1, so `hits == 2` says that two executed commands went
        unanswered.
        """
        with self._lock:
            return self._hits

    def uri(self, **options: object) -> str:
        """Return the connection string of a direct connection through the proxy.

        Args:
            options: more URI options, e.g. `socketTimeoutMS=500`; booleans may be given as such.
        """
        settings = {"directConnection": True, **options}
        query = "&".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()
        )
        return f"mongodb://127.0.0.1:{self.port}/?{query}"

    def start(self) -> Self:
        """Listen on a free port."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name=f"proxy-{self.port}", daemon=True)
        self._acceptor.start()
        return self

    def arm(
        self,
        needle: bytes | None = None,
        mode: Mode = "close",
        times: int = 1,
        *,
        command: str | None = None,
        skip: int = 0,
        every: int = 1,
        delay: float = 0.0,
        on_hit: Callable[[], object] | None = None,
    ) -> None:
        """Replace the fault and set `hits` to 0.

        Args:
            needle: bytes that must stand somewhere in the command's frame (names, values, BSON).
            mode: see the class.
            times: how many matching commands it is applied to.
            command: the command's name, e.g. "insert": exactly the first key of its document. With `needle` both must
                match; with neither every command does.
            skip: matching commands that pass before the first one that does not.
            every: after those, only each n-th matching command is hit.
            delay: seconds, for "delay" and "delay_reply".
            on_hit: called in a thread of the proxy when the fault takes place (the reply has come in, say) and before
                the client hears of it on this connection: to kill and restart the server in between.

        Raises:
            ValueError: an unknown mode.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"unknown mode {mode!r}, one of {', '.join(get_args(Mode))}")
        with self._lock:
            self._hits = 0
            self._script = None
            self._fault = _Fault(Strike(mode, delay, on_hit), needle, command, times, skip, every)

    def follow(self, script: Script) -> None:
        """Ask `script` about each command instead, given its name and its frame, and set `hits` to 0.

        Args:
            script: returns what befalls the command, None for nothing; called in the proxy's threads, in several at a time.
        """
        with self._lock:
            self._hits = 0
            self._script, self._fault = script, None

    def recover(self) -> None:
        """Forward everything again; connections that swallowed something are closed."""
        with self._lock:
            self._fault = self._script = None
            swallowed = [link for link in self._links if link.swallowed]
        for link in swallowed:
            link.shut()

    def disconnect(self) -> None:
        """Close all connections there are now; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.shut()

    def close(self) -> None:
        """Close everything and wait for the proxy's threads (at most 5 seconds each). May be called again."""
        if self._listener is None or self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):  # wakes accept() on every platform
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        if self._acceptor is not None:
            self._acceptor.join(5.0)
        self._listener.close()
        self.disconnect()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.thread.join(5.0)

    # What a link asks its proxy.

    def _strike_for(self, frame: Frame) -> Strike | None:
        with self._lock:
            script, fault = self._script, self._fault
            if script is None:
                return fault.strike if fault is not None and fault.strikes(frame) else None
        return None if frame.is_handshake else script(frame.command, frame.data)

    def _swallows(self, request: Frame | None) -> bool:
        """Tell whether this request (None: any reply) vanishes at present."""
        with self._lock:
            mode = self._fault.strike.mode if self._fault else None
        return mode == "silent" or (mode == "refuse_hello" and request is not None and request.is_handshake)

    def _took_place(self, strike: Strike) -> None:
        with self._lock:
            if self._script is not None or (self._fault is not None and strike is self._fault.strike):
                self._hits += 1
        if strike.on_hit is not None:
            strike.on_hit()

    def _pause(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = listener.accept()
            if self._closing.is_set():
                client.close()
                return
            link = _Link(self, client, self._target)
            with self._lock:
                self._links.add(link)
            link.thread.start()


class _Link:
    """One connection of a client and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: socket.socket, target: tuple[str, int]) -> None:
        self.swallowed = False
        self.thread = threading.Thread(target=self._run, name="proxy-link", daemon=True)
        self._proxy = proxy
        self._client = client
        self._server = socket.socket()
        self._target = target
        self._awaited: dict[int, Strike] = {}  # by request id; one thread adds before the other can see the reply

    def shut(self) -> None:
        """Make both threads of this link end; safe from any thread and more than once."""
        for side in (self._client, self._server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            with self._client, self._server:
                for side in (self._client, self._server):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    self._server.connect(self._target)
                except OSError:
                    return  # the server is down: the client sees its connection closed
                if self._proxy._closing.is_set():
                    return  # it was closed before there was a connection to shut
                replies = threading.Thread(target=self._forward_replies, name="proxy-replies", daemon=True)
                replies.start()
                try:
                    self._forward_requests()
                finally:
                    replies.join()
        finally:
            self._proxy._forget(self)

    def _forward_requests(self) -> None:
        with contextlib.suppress(OSError):
            while frame := read_frame(self._client):
                if self._proxy._swallows(frame):
                    self.swallowed = True
                    continue
                strike = self._proxy._strike_for(frame)
                if strike is None:
                    self._server.sendall(frame.data)
                elif not self._forward_struck(frame, strike):
                    return
        # Only our sending half: closing both at once could throw away a request the server has not read yet.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_WR)

    def _forward_struck(self, frame: Frame, strike: Strike) -> bool:
        """Forward what the strike leaves of a command; tell whether the link goes on."""
        match strike.mode:
            case "cut":
                self._server.sendall(frame.data[: len(frame.data) // 2])
                self._proxy._took_place(strike)
                self.shut()
                return False
            case "drop":
                self.swallowed = True
                self._proxy._took_place(strike)
            case "delay" | "notice":
                self._proxy._took_place(strike)
                self._proxy._pause(strike.delay)
                self._server.sendall(frame.data)
            case _:
                self._awaited[frame.request_id] = strike
                self._server.sendall(frame.data)
        return True

    def _forward_replies(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while frame := read_frame(self._server):
                    if self._proxy._swallows(None):
                        self.swallowed = True
                    elif not self._deliver(frame):
                        return
        finally:
            self.shut()

    def _deliver(self, frame: Frame) -> bool:
        """Deliver a reply, or what the fault leaves of it; tell whether the link goes on."""
        strike = self._awaited.pop(frame.response_to, None)
        if strike is None:
            self._client.sendall(frame.data)
            return True
        if frame.says_ok:
            self._proxy._took_place(strike)
        match strike.mode:
            case "delay_reply":
                self._proxy._pause(strike.delay)
                self._client.sendall(frame.data)
            case "throttle":
                size = -(-len(frame.data) // _PIECES)
                for start in range(0, len(frame.data), size):
                    self._proxy._pause(strike.delay / _PIECES)
                    self._client.sendall(frame.data[start : start + size])
            case "cut_reply":
                self._client.sendall(frame.data[: len(frame.data) // 2])
        return strike.mode in ("drop_reply", "delay_reply", "throttle")
