"""A write call before it is made: the commands that it comes to, what it inserts, and what tells it from another call."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo.operations import InsertOne
from pymongo.results import InsertOneResult

from saferetry._arguments import Parameters
from saferetry._identity import canonical, without_moments
from saferetry._parts import Part, are_documents, are_requests, cut_bulk, insert_many_result
from saferetry._seam import inserted_document, request_values


class DriverMethod(Protocol):
    """Say what a plan needs to know of the driver's method.

    Attributes:
        name: Its name.
        original: It itself.
        parameters: Its parameters.
        bulk_write: The driver's own, of the same class, where it has one.
        find_one: The same.
    """

    name: str
    original: Any
    parameters: Parameters
    bulk_write: Any
    find_one: Any


class Inserted:
    """Know the documents that a call inserts, by position, and the ``_id`` made for them."""

    def __init__(self, documents: Mapping[int, Any]) -> None:
        self.documents = documents
        self.made_ids: dict[int, Any] = {}
        self.are_derived = False

    def make_ids(self, earlier: Mapping[int, Any], derive: Callable[[Any], ObjectId] | None = None) -> None:
        """Give each document without ``_id`` one, as the driver would.

        Args:
            earlier: Those of the call that this one repeats.
            derive: Makes them from the documents, where they are to be the same after a redelivery.
        """
        if not self.documents:
            return
        self.are_derived = derive is not None
        for position, document in self.documents.items():
            if type(document) is not dict and (
                isinstance(document, RawBSONDocument) or not isinstance(document, MutableMapping)
            ):
                continue  # the server makes it, or the driver refuses the document
            if "_id" not in document:
                made = earlier.get(position) or (derive(document) if derive is not None else ObjectId())
                document["_id"] = self.made_ids[position] = made
            elif position in earlier and document["_id"] == earlier[position]:
                self.made_ids[position] = earlier[position]


NOTHING = Inserted({})


class Plan:
    """Be a call that inserts nothing: one command.

    Args:
        method: The driver's method.
        owner: The collection, database or client on which it is made.
        arguments: The user's, by name.
        multi: A statement of it may change many documents, or it is no statement.
        is_whole: It is not to be cut into commands.

    Attributes:
        inserted: The documents it inserts.
        ordered: It stops at the first statement that fails.
        is_one_command: Whatever its arguments.
    """

    ordered = True
    is_one_command = True
    inserted = NOTHING
    positions: Sequence[int] = (0,)  # of its only command

    def __init__(
        self, method: DriverMethod, owner: Any, arguments: dict[str, Any], *, multi: bool = False, is_whole: bool = True
    ) -> None:
        self.method = method
        self.owner = owner
        self.arguments = arguments
        self.multi = multi
        self._is_whole = is_whole

    def cut(self) -> Sequence[Part]:
        """Return its commands, in order; asked once the inserted documents have their ``_id``."""
        return [Part(self.method.parameters.calling(self.arguments), self.positions, self.multi, self.inserted.made_ids)]

    def invoke(self) -> Any:
        """Make the driver call for the whole of it."""
        if self.method.parameters.has_no_stars:  # most; without a function of ours in between
            return self.method.original(self.owner, **self.arguments)
        return self.method.parameters.call(self.owner, self.arguments)

    def invoke_in(self, session: Any) -> Any:
        """Make the driver call in the transaction of a session."""
        return self.method.parameters.call_in(session, self.owner, self.arguments)

    def fingerprint(self, made_ids: Mapping[int, Any], moments: tuple[dt.datetime, dt.datetime] | None = None) -> bytes | None:
        """Return it in a form that can be compared, or None where there is none.

        Args:
            made_ids: The ``_id`` made for it, which are left out.
            moments: The times between which an execution ran, so that all in between are alike.
        """
        compared = {name: self.arguments[name] for name in sorted(self.arguments) if name != "session"}
        compared |= self._without(made_ids)
        if moments is not None:
            compared = without_moments(compared, *moments)
        return canonical(compared, self.codec_options)

    def _without(self, made_ids: Mapping[int, Any]) -> Mapping[str, Any]:  # noqa: ARG002 - it inserts nothing
        """Return the arguments that hold made ids, without them."""
        return {}

    @property
    def codec_options(self) -> Any:
        """Those of its collection."""
        return getattr(self.owner, "codec_options", None)

    def conclude(self, result: Any) -> Any:
        """Turn the driver's result into the method's."""
        return result

    def recovered(self) -> Any:
        """Return the method's result where the only reply said that the insert had been made before."""
        return None

    def inserts(self, id_: Any) -> bool:  # noqa: ARG002 - it inserts nothing
        """Whether it inserts one document, with this very ``_id``, of the same type."""
        return False


class InsertOnePlan(Plan):
    """Be a call of ``insert_one``."""

    def __init__(self, method: DriverMethod, owner: Any, arguments: dict[str, Any], **how: bool) -> None:
        super().__init__(method, owner, arguments, **how)
        self.inserted = Inserted({0: arguments["document"]})

    def _without(self, made_ids: Mapping[int, Any]) -> Mapping[str, Any]:
        return {"document": without_made_id(self.arguments["document"], made_ids.get(0))}

    def recovered(self) -> InsertOneResult:
        """Return what the driver would have."""
        return InsertOneResult(self.arguments["document"]["_id"], acknowledged=True)

    def inserts(self, id_: Any) -> bool:
        """Whether its document has this very ``_id``, of the same type."""
        document = self.arguments["document"]
        if not isinstance(document, Mapping) or "_id" not in document:
            return False
        own = canonical({"_id": document["_id"]}, self.codec_options)
        return own is not None and own == canonical({"_id": id_}, self.codec_options)


class BulkPlan(Plan):
    """Be a call of ``bulk_write``; where its arguments are wrong it is left whole, and the driver says so."""

    is_one_command = False

    def __init__(self, method: DriverMethod, owner: Any, arguments: dict[str, Any], **how: bool) -> None:
        super().__init__(method, owner, arguments, **how)
        self._is_whole = self._is_whole or not self._is_well_formed()
        self.inserted = Inserted(self._documents())
        if not self._is_whole:
            self.ordered = bool(arguments.get("ordered", True))

    def _is_well_formed(self) -> bool:
        return are_requests(self.arguments["requests"])

    def _documents(self) -> Mapping[int, Any]:
        return documents_of(self.arguments["requests"])

    def _requests(self) -> Sequence[Any]:
        return self.arguments["requests"]  # type: ignore[no-any-return]

    def cut(self) -> Sequence[Part]:
        """Return its commands."""
        if self._is_whole:
            return super().cut()
        options = {name: value for name, value in self.arguments.items() if name not in ("requests", "documents")}
        return cut_bulk(self.method.bulk_write, self.owner, self._requests(), options, made_ids=self.inserted.made_ids)

    def _without(self, made_ids: Mapping[int, Any]) -> Mapping[str, Any]:
        return {"requests": plain_requests(self.arguments["requests"], made_ids)}


class InsertManyPlan(BulkPlan):
    """Be a call of ``insert_many``: a bulk of inserts."""

    def _is_well_formed(self) -> bool:
        return are_documents(self.arguments["documents"])

    def _documents(self) -> Mapping[int, Any]:
        documents = self.arguments["documents"]
        return dict(enumerate(documents)) if are_documents(documents) else {}

    def _requests(self) -> Sequence[Any]:
        return [InsertOne(document) for document in self.arguments["documents"]]

    def _without(self, made_ids: Mapping[int, Any]) -> Mapping[str, Any]:
        documents = enumerate(self.arguments["documents"])
        return {"documents": [without_made_id(document, made_ids.get(place)) for place, document in documents]}

    def conclude(self, result: Any) -> Any:
        """Return the result of an ``insert_many`` that went through."""
        return result if self._is_whole else insert_many_result(self.arguments["documents"])


def documents_of(requests: Any) -> dict[int, Any]:
    """Return the documents that a bulk inserts, by position."""
    listed = requests if isinstance(requests, list) else []
    return {place: inserted_document(request) for place, request in enumerate(listed) if isinstance(request, InsertOne)}


def without_made_id(document: Any, made: Any) -> Any:
    """Return a document as the user gave it, before an ``_id`` was made for it."""
    if made is None or not isinstance(document, Mapping) or document.get("_id") != made:
        return document
    return {key: value for key, value in document.items() if key != "_id"}


def plain_requests(requests: Sequence[Any], made_ids: Mapping[int, Any]) -> list[Any]:
    """Return a bulk's requests in a form that can be compared."""
    plain = []
    for position, request in enumerate(requests):
        values = request_values(request)
        if isinstance(request, InsertOne):
            values = {"_doc": without_made_id(inserted_document(request), made_ids.get(position))}
        plain.append([type(request).__name__, values])
    return plain
