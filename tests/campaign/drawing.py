"""Random handlers: a few steps over all guarded methods, on the record's own documents and one counter of all records."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.campaign.steps import OWNER, Condition, Step

KEYS = 5  # documents that a record has at first; others it may make
_MORE_KEYS = 9
_UNIQUE = 3  # values of the unique field
Draw = Callable[[random.Random], Step]


def _id(key: int) -> str:
    return f"{OWNER}:{key}"


def _key(rng: random.Random) -> int:
    return rng.randrange(_MORE_KEYS)


def _there(rng: random.Random) -> int:
    return rng.randrange(KEYS)


def _keys(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(_MORE_KEYS), count)


def _document(rng: random.Random, key: int | None = None, **more: Any) -> dict[str, Any]:
    document = {"owner": OWNER, "n": rng.randrange(9), "tags": ["a"], "new": rng.randrange(1000), **more}
    if key is not None:
        document = {"_id": _id(key), **document}
    if rng.random() < 0.1:
        document["u"] = f"{OWNER}/{rng.randrange(_UNIQUE)}"
    return document


def _update(rng: random.Random) -> Any:
    return rng.choice(
        [
            {"$inc": {"n": rng.randint(1, 5)}},
            {"$inc": {"n": 1}, "$push": {"tags": rng.randrange(100)}},
            {"$push": {"tags": {"$each": [1, 2], "$position": 0}}},
            {"$set": {"same": 1}},  # changes nothing the second time
            {"$mul": {"n": 2}},
            {"$pop": {"tags": 1}},
            [{"$set": {"n": {"$add": [{"$ifNull": ["$n", 0]}, 10]}, "m": {"$ifNull": ["$n", 0]}}}],
        ]
    )


def _insert_one(rng: random.Random) -> Step:
    key = _key(rng) if rng.random() < 0.5 else None
    return Step("insert_one", {"document": _document(rng, key)}, catches=rng.random() < 0.6)


def _insert_many(rng: random.Random) -> Step:
    documents = [_document(rng, key if rng.random() < 0.6 else None) for key in _keys(rng, rng.randint(1, 5))]
    return Step("insert_many", {"documents": documents, "ordered": rng.random() < 0.5}, catches=rng.random() < 0.6)


def _insert_many_thousands(rng: random.Random) -> Step:
    documents = [{"owner": OWNER, "n": number} for number in range(rng.randint(1_001, 2_100))]
    return Step("insert_many", {"documents": documents, "ordered": rng.random() < 0.5})


def _update_one(rng: random.Random) -> Step:
    return Step("update_one", {"filter": {"_id": _id(_key(rng))}, "update": _update(rng)})


def _update_one_upsert(rng: random.Random) -> Step:
    if rng.random() < 0.5:
        which: Mapping[str, Any] = {"owner": OWNER, "slot": rng.randrange(3)}
        return Step("update_one", {"filter": which, "update": {"$inc": {"n": 1}}, "upsert": True})
    arguments = {"filter": {"_id": _id(_key(rng))}, "update": {"$inc": {"n": 1}, "$setOnInsert": {"owner": OWNER}}}
    return Step("update_one", {**arguments, "upsert": True})


def _update_one_filters(rng: random.Random) -> Step:
    arguments = {"update": {"$inc": {"grid.$[g].q": 1}}, "array_filters": [{"g.q": {"$gte": rng.randint(0, 5)}}]}
    return Step("update_one", {"filter": {"_id": _id(_there(rng))}, **arguments})


def _update_one_failing(rng: random.Random) -> Step:
    unique = {"$set": {"u": f"{OWNER}/{rng.randrange(_UNIQUE)}"}}
    return Step("update_one", {"filter": {"_id": _id(_there(rng))}, "update": unique}, catches=rng.random() < 0.6)


def _replace_one(rng: random.Random) -> Step:
    replacement = _document(rng)
    arguments = {"filter": {"_id": _id(_key(rng))}, "replacement": replacement, "upsert": rng.random() < 0.5}
    return Step("replace_one", arguments, catches=rng.random() < 0.6)


def _delete_one(rng: random.Random) -> Step:
    return Step("delete_one", {"filter": rng.choice([{"_id": _id(_key(rng))}, {"_id": _id(1), "n": {"$lt": 4}}])})


def _find_one_and_update(rng: random.Random) -> Step:
    own = {"filter": {"_id": _id(_key(rng))}, "update": {"$inc": {"n": 1}, "$set": {"owner": OWNER}}}
    if rng.random() < 0.3:
        own = {"filter": {"owner": OWNER}, "update": {"$inc": {"n": 10}}, "sort": [["n", 1], ["_id", 1]]}
    return Step("find_one_and_update", {**own, "upsert": rng.random() < 0.5, "return_document": rng.random() < 0.5})


def _find_one_and_replace(rng: random.Random) -> Step:
    arguments = {"filter": {"_id": _id(_there(rng))}, "replacement": _document(rng), "return_document": rng.random() < 0.5}
    return Step("find_one_and_replace", arguments, catches=rng.random() < 0.6)


def _find_one_and_delete(rng: random.Random) -> Step:
    return Step("find_one_and_delete", {"filter": {"_id": _id(_key(rng))}})


def _update_many(rng: random.Random) -> Step:
    return Step("update_many", {"filter": {"owner": OWNER, "n": {"$gte": rng.randrange(4)}}, "update": {"$inc": {"n": 1}}})


def _delete_many(rng: random.Random) -> Step:
    return Step("delete_many", {"filter": {"_id": {"$in": [_id(key) for key in _keys(rng, 3)]}}})


def _request(rng: random.Random, key: int) -> list[Any]:
    """Return a member of a bulk; members stay apart, since the driver's own resend may look at those without effect again."""
    which = {"_id": _id(key)}
    match rng.randrange(6):
        case 0 | 1:
            return ["InsertOne", {"document": _document(rng, key if rng.random() < 0.6 else None)}]
        case 2 | 3:
            increase = {"$inc": {"n": 1}, "$set": {"owner": OWNER}}
            return ["UpdateOne", {"filter": which, "update": increase, "upsert": rng.random() < 0.4}]
        case 4:
            replacement = {"owner": OWNER, "n": rng.randrange(9)}
            return ["ReplaceOne", {"filter": which, "replacement": replacement, "upsert": rng.random() < 0.4}]
    return ["DeleteOne", {"filter": which}]


def _bulk_write(rng: random.Random) -> Step:
    requests = [_request(rng, key) for key in _keys(rng, rng.randint(1, 6))]
    return Step("bulk_write", {"requests": requests, "ordered": rng.random() < 0.5}, catches=rng.random() < 0.6)


def _bulk_write_refill(rng: random.Random) -> Step:
    """Draw members of one document, of two kinds, hence in two commands."""
    key = _key(rng)
    requests = [["DeleteOne", {"filter": {"_id": _id(key)}}], ["InsertOne", {"document": _document(rng, key)}]]
    return Step("bulk_write", {"requests": requests})


def _bulk_write_multi(rng: random.Random) -> Step:
    first, second, third, fourth = _keys(rng, 4)
    many = {"filter": {"_id": {"$in": [_id(first), _id(second)]}}}
    multi = rng.choice([["UpdateMany", {**many, "update": {"$inc": {"n": 1}}}], ["DeleteMany", many]])
    requests = [_request(rng, third), multi, _request(rng, fourth)]
    return Step("bulk_write", {"requests": requests, "ordered": rng.random() < 0.5}, catches=rng.random() < 0.6)


def _read(rng: random.Random) -> Step:
    own = {"owner": OWNER}
    return rng.choice(
        [
            Step("find_one", {"filter": {"_id": _id(_key(rng))}}),
            Step(
                "find",
                {"filter": {"owner": OWNER, "n": {"$lt": 1_000}}, "sort": [["n", 1], ["new", 1], ["_id", 1]], "limit": 3},
            ),
            Step("count_documents", {"filter": own}),
            Step("distinct", {"key": "n", "filter": own}),
            Step("aggregate", {"pipeline": [{"$match": own}, {"$group": {"_id": None, "sum": {"$sum": "$n"}}}]}),
        ]
    )


def _count(rng: random.Random) -> Step:
    return Step("count", {"owner": OWNER})


def _gridfs_put(rng: random.Random) -> Step:
    size = rng.randint(1, 3_000)
    return Step(
        "gridfs_put", {"id": f"{OWNER}:f{rng.randrange(3)}{rng.randrange(10)}", "owner": OWNER, "size": size, "chunk": 1_000}
    )


def _fail(rng: random.Random) -> Step:
    return Step("fail", {"times": rng.choice([1, 1, 2, 9])})


_STEPS: tuple[tuple[int, Draw], ...] = (
    (6, _insert_one),
    (5, _insert_many),
    (8, _update_one),
    (4, _update_one_upsert),
    (2, _update_one_filters),
    (2, _update_one_failing),
    (3, _replace_one),
    (3, _delete_one),
    (4, _find_one_and_update),
    (2, _find_one_and_replace),
    (2, _find_one_and_delete),
    (3, _update_many),
    (2, _delete_many),
    (5, _bulk_write),
    (2, _bulk_write_refill),
    (2, _bulk_write_multi),
    (4, _read),
    (4, _count),
    (2, _gridfs_put),
    (1, _fail),
)
_RARE = 0.005  # thousands of documents take their time


def steps(rng: random.Random) -> tuple[Step, ...]:
    """Draw a handler of 1 to 8 steps."""
    weights = [weight for weight, _ in _STEPS]
    drawn: list[Step] = []
    while len(drawn) < rng.randint(1, 8):
        if rng.random() < _RARE:
            drawn.append(_insert_many_thousands(rng))
            continue
        if rng.random() < 0.06:  # drop and refill, whose repetition must not swallow the second half
            keys = _keys(rng, 2)
            drawn.append(Step("delete_many", {"filter": {"_id": {"$in": [_id(key) for key in keys]}}}))
            drawn.append(Step("insert_many", {"documents": [_document(rng, key) for key in keys]}))
            continue
        (_, draw), *_ = rng.choices(_STEPS, weights)
        step = draw(rng)
        drawn.append(_with_habits(rng, step))
    return tuple(drawn)


def _with_habits(rng: random.Random, step: Step) -> Step:
    condition = Condition(_there(rng), rng.randrange(6)) if rng.random() < 0.15 else None
    tries = rng.randint(2, 3) if rng.random() < 0.15 and step.do != "fail" else 1
    return Step(step.do, step.arguments, condition, step.catches, tries)


def first_documents(owner: str) -> list[dict[str, Any]]:
    """Return what a record has at first."""
    documents: list[dict[str, Any]] = [
        {"_id": f"{owner}:{key}", "owner": owner, "n": key, "tags": ["a", "b"], "grid": [{"q": 1}, {"q": 5}]}
        for key in range(KEYS)
    ]
    documents[0]["u"] = f"{owner}/0"
    return documents
