"""A write call cut into commands, and the results of the commands put together again.

The driver packs as many statements into a command as fit and splits a call where they do not; on a lost reply it starts its
own resend at that command, but a whole call made again would start at the first one. Here each command is a driver call of
its own, so that an acknowledged one is never sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bson.raw_bson import RawBSONDocument
from pymongo.errors import BulkWriteError
from pymongo.operations import DeleteMany, UpdateMany
from pymongo.results import BulkWriteResult, InsertManyResult

from saferetry._driver import REQUEST_TYPES
from saferetry._identity import encoded_size
from saferetry._seam import bulk_statements

MOST_STATEMENTS = 1_000
MOST_BYTES = 16 * 1024 * 1024
LARGEST_DOCUMENT = MOST_BYTES + 16 * 1024  # the server's limit and its allowance for its own fields
_INSERT, _UPDATE = 0, 1  # the driver's operation types; 2 is delete


@dataclass(slots=True)
class Part:
    """Be one command of a call.

    Attributes:
        invoke: Makes the driver call for it, given the collection, database or client.
        positions: Which of the user's documents or requests it holds, in its order.
        multi: A statement of it may change many documents, or it is no statement (DDL, an unannounced command).
        made_ids: The ``_id`` made for this call, by place in this command; complete if it holds inserts without ``_id`` only.
        requests: The bulk requests it holds, where it is one of a bulk.
        resend: Makes the driver call for some of the requests, where it is one of a bulk.
        is_insert: Its statements are inserts.
    """

    invoke: Callable[[Any], Any]
    positions: Sequence[int] = (0,)
    multi: bool = False
    made_ids: Mapping[int, Any] = field(default_factory=dict)
    requests: Sequence[Any] = ()
    resend: Callable[[Any, Sequence[Any]], Any] = lambda *_: None
    is_insert: bool = False

    @property
    def statements(self) -> int:
        """Number of statements."""
        return len(self.positions)

    def only(self, places: Sequence[int]) -> Part:
        """Return the command for some of the statements."""
        chosen = [self.requests[place] for place in places]
        return replace(
            self,
            invoke=lambda target: self.resend(target, chosen),
            positions=[self.positions[place] for place in places],
            made_ids={new: self.made_ids[old] for new, old in enumerate(places) if old in self.made_ids},
            requests=chosen,
        )

    @property
    def is_id_protected(self) -> bool:
        """Whether a second copy of any of its statements would hit an ``_id`` that only this call can have written."""
        return bool(self.made_ids) and len(self.made_ids) == self.statements


def are_requests(requests: Any) -> bool:
    """Whether the driver would take these as a bulk's requests."""
    return isinstance(requests, list) and bool(requests) and all(isinstance(item, REQUEST_TYPES) for item in requests)


def has_multi(requests: Any) -> bool:
    """Whether some request of a bulk may change many documents."""
    return isinstance(requests, list) and any(isinstance(request, (UpdateMany, DeleteMany)) for request in requests)


def are_documents(documents: Any) -> bool:
    """Whether the driver would take these as documents to insert."""
    return isinstance(documents, list) and bool(documents) and all(isinstance(item, Mapping) for item in documents)


def cut_bulk(
    bulk_write: Callable[..., Any],
    collection: Any,
    requests: Sequence[Any],
    options: Mapping[str, Any],
    *,
    made_ids: Mapping[int, Any],
) -> list[Part]:
    """Cut a bulk at command borders, before members that are multi, at 1,000 statements and at 16 MB.

    Args:
        bulk_write: The driver's own method.
        collection: The collection it is called on.
        requests: All requests.
        options: The other arguments of the call.
        made_ids: The ``_id`` made for this call, by position.

    Raises:
        TypeError, ValueError: The driver's own, before anything is sent.
        InvalidDocument, OverflowError: A statement cannot be encoded, hence none is sent.
    """
    ordered = bool(options.get("ordered", True))
    statements = bulk_statements(collection, requests, ordered)

    def send(target: Any, chosen: Sequence[Any]) -> Any:
        return bulk_write(target, chosen, **options)

    def part(positions: Sequence[int]) -> Part:
        chosen = [requests[position] for position in positions]
        return Part(
            lambda target: send(target, chosen),
            positions,
            multi=_is_multi(statements[positions[0]]),
            made_ids={place: made_ids[at] for place, at in enumerate(positions) if at in made_ids},
            requests=chosen,
            resend=send,
            is_insert=statements[positions[0]][0] == _INSERT,
        )

    sizes = _measure(statements, collection.codec_options)
    order: Sequence[int] = range(len(statements))
    if not ordered:  # as the driver does: inserts, updates, deletes; here those that are multi come last of their kind
        order = sorted(order, key=lambda at: (statements[at][0], _is_multi(statements[at])))
    # What the server will refuse goes first, and then nothing else is sent: plain PyMongo's command is refused whole.
    refused = [at for at in order if sizes[at] > LARGEST_DOCUMENT][:1]
    runs = _runs(statements, sizes, [at for at in order if at not in refused])
    return [part(positions) for positions in ([refused] if refused else []) + list(runs)]


def _is_multi(statement: tuple[int, Mapping[str, Any]]) -> bool:
    kind, document = statement
    return kind != _INSERT and bool(document.get("multi") or document.get("limit") == 0)


def _measure(statements: Sequence[tuple[int, Any]], codec_options: Any) -> list[int]:
    """Return the sizes in bytes; a single statement needs none."""
    if len(statements) == 1:
        return [0]
    return [encoded_size(document, codec_options) for _, document in statements]


def _runs(statements: Sequence[tuple[int, Any]], sizes: Sequence[int], order: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of the statements of each command."""
    run: list[int] = []
    size = 0
    for at in order:
        starts_anew = run and (
            statements[at][0] != statements[run[-1]][0]
            or _is_multi(statements[at])
            or _is_multi(statements[run[-1]])
            or len(run) == MOST_STATEMENTS
            or size + sizes[at] > MOST_BYTES
        )
        if starts_anew:
            yield run
            run, size = [], 0
        run.append(at)
        size += sizes[at]
    if run:
        yield run


# results

COUNTS = ("nInserted", "nUpserted", "nMatched", "nModified", "nRemoved")


def empty_result() -> dict[str, Any]:
    """Return the driver's bulk result for nothing done."""
    return {"writeErrors": [], "writeConcernErrors": [], **dict.fromkeys(COUNTS, 0), "upserted": []}


def merge(results: Sequence[tuple[Part, Mapping[str, Any]]]) -> BulkWriteResult:
    """Put the results of a bulk's commands together as the driver would have.

    Raises:
        BulkWriteError: Some statement failed.
    """
    full = empty_result()
    for part, result in results:
        for name in COUNTS:
            full[name] += result.get(name, 0)
        full["writeConcernErrors"] += result.get("writeConcernErrors", ())
        for name in ("writeErrors", "upserted"):
            full[name] += ({**entry, "index": part.positions[entry["index"]]} for entry in result.get(name, ()))
    if full["writeErrors"] or full["writeConcernErrors"]:
        full["writeErrors"].sort(key=lambda entry: entry["index"])
        raise BulkWriteError(full)
    return BulkWriteResult(full, acknowledged=True)


def insert_many_result(documents: Sequence[Any]) -> InsertManyResult:
    """Return the driver's result of an insert_many that went through."""
    ids = [document["_id"] for document in documents if not isinstance(document, RawBSONDocument)]
    return InsertManyResult(ids, acknowledged=True)
