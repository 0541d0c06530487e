"""Server failpoints as context managers that always switch off.

A failpoint is one global setting per server: two of the same name at a time are not possible, and whoever leaves one
on breaks every test that follows. The client given must be a plain PyMongo client that the failpoint does not hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient

AnyClient = MongoClient[dict[str, Any]]


@contextmanager
def failpoint(
    client: AnyClient, name: str, data: Mapping[str, object] | None = None, *, times: int | None = None
) -> Iterator[Callable[[], None]]:
    """Switch a failpoint on, and off at the end or when the callable it gives is called (from any thread).

    Args:
        client: a client of the server that has it.
        name: of the failpoint.
        data: its arguments.
        times: how often it fires; None for as long as it is on.
    """

    def switch_off() -> None:
        client.admin.command("configureFailPoint", name, mode="off")

    mode = "alwaysOn" if times is None else {"times": times}
    try:
        client.admin.command("configureFailPoint", name, mode=mode, data=dict(data or {}))
        yield switch_off
    finally:
        switch_off()


@contextmanager
def fail_command(
    client: AnyClient, *, app_name: str, commands: Sequence[str], times: int | None = None, **data: object
) -> Iterator[Callable[[], None]]:
    """Let commands fail on the server, those of the client with this appName only.

    `closeConnection=True` fails before execution; `blockConnection=True, blockTimeMS=n` ignores maxTimeMS.

    Args:
        client: another client than the one that is to fail.
        app_name: the failing client's `appName`; make it random.
        commands: names of commands, e.g. `["insert"]`.
        times: how many of them fail; None for all.
        data: what happens, e.g. `errorCode=91, errorLabels=["RetryableWriteError"]`, `writeConcernError={...}`.
    """
    with failpoint(client, "failCommand", {"failCommands": list(commands), "appName": app_name, **data}, times=times) as off:
        yield off


@contextmanager
def hold_inserts(client: AnyClient, namespace: str, *, interruptible: bool = False) -> Iterator[Callable[[], None]]:
    """Hold inserts into one collection inside the engine, session checked out, nothing written, no lock taken.

    Args:
        client: not the one whose inserts are held.
        namespace: "database.collection".
        interruptible: whether maxTimeMS, killSessions and killOp end a held insert at once. If not, they mark it and it
            ends, unwritten, when it is let go, as most real stalls do (disk, lock, JavaScript). Server 4.4 reads this
            for updates only: held inserts and deletes are always interruptible there.
    """
    with _hold(client, "hangDuringBatchInsert", namespace, interruptible=interruptible) as release:
        yield release


@contextmanager
def hold_updates(client: AnyClient, namespace: str, *, interruptible: bool = False) -> Iterator[Callable[[], None]]:
    """Hold updates, single and multi, of one collection inside the engine; see `hold_inserts`."""
    with _hold(client, "hangDuringBatchUpdate", namespace, interruptible=interruptible) as release:
        yield release


@contextmanager
def hold_deletes(client: AnyClient, *, interruptible: bool = False) -> Iterator[Callable[[], None]]:
    """Hold deletes inside the engine, of **all** collections: this failpoint reads no namespace on 4.4 to 6.0."""
    with _hold(client, "hangDuringBatchRemove", None, interruptible=interruptible) as release:
        yield release


@contextmanager
def hold_find_and_modify(client: AnyClient, *, interruptible: bool = False) -> Iterator[Callable[[], None]]:
    """Hold findAndModify updates of **all** collections inside the engine; only from server 5.0."""
    with _hold(client, "hangBeforeFindAndModifyPerformsUpdate", None, interruptible=interruptible) as release:
        yield release


@contextmanager
def _hold(client: AnyClient, name: str, namespace: str | None, *, interruptible: bool) -> Iterator[Callable[[], None]]:
    data: dict[str, object] = {"shouldCheckForInterrupt": interruptible}
    if namespace is not None:
        data["nss"] = namespace
    with failpoint(client, name, data) as release:
        yield release
