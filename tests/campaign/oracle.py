"""The oracle: the same handler on plain PyMongo, alone and undisturbed, and what a delivery may have left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pymongo.errors import DuplicateKeyError

from tests.campaign import steps
from tests.campaign.handling import RawDatabase, Told, comparable, described
from tests.campaign.schedule import Plan
from tests.campaign.steps import DOCUMENTS, GRIDFS, Progress, Step
from tests.support.driving import run_without_waiting

State = dict[str, list[dict[str, Any]]]  # the documents of one record, by collection, in the order they were inserted
_UNSENT = {"NOT_SENT", "NOT_APPLIED"}
_CANCELLED = {"CancelledError", "TimeoutError"}
_AMPLE = 10.0  # seconds, a budget that lets a handler be executed again
_MOST = 4  # documents shown
_LATE = 1_000  # executions, after which no handler raises an error of its own any more


def state_of(database: RawDatabase, plan: Plan) -> State:
    """Return what a record has now."""
    state: State = {DOCUMENTS: list(database[DOCUMENTS].find({"owner": plan.owner}).hint("owner_1"))}
    if any(step.do in GRIDFS for step in plan.steps):
        own = {"$regex": f"^{plan.owner}:"}
        state["fs.files"] = list(database["fs.files"].find({"_id": own}))
        state["fs.chunks"] = list(database["fs.chunks"].find({"files_id": own}))
    return state


def put(database: RawDatabase, plan: Plan, state: State) -> None:
    """Let a record have this and nothing else."""
    database[DOCUMENTS].delete_many({"owner": plan.owner})
    if any(step.do in GRIDFS for step in plan.steps):
        own = {"$regex": f"^{plan.owner}:"}
        database["fs.files"].delete_many({"_id": own})
        database["fs.chunks"].delete_many({"files_id": own})
    for name, documents in state.items():
        if documents:
            database[name].insert_many(documents)


def same(one: State, other: State) -> bool:
    """Whether two states are equal, the values of made ids aside."""
    return bool(_seen(one) == _seen(other))


def _seen(state: State) -> Any:
    return {name: Counter(map(_frozen, documents)) for name, documents in state.items()}


def _frozen(document: Mapping[str, Any]) -> str:
    plain = comparable({name: value for name, value in document.items() if name != "_id" or isinstance(value, str)}, "\0")
    return repr(plain)  # the order of fields is part of a document


def between(found: State, before: State, after: State) -> bool:
    """Whether some documents are as before, and the others as they were to be."""
    for name, documents in found.items():
        here, old, new = (Counter(map(_frozen, given)) for given in (documents, before[name], after[name]))
        if not (old & new) <= here <= (old | new):
            return False
    return True


@dataclass
class Clean:
    """An undisturbed run.

    Attributes:
        states: before the first step, after the first, and so on; after the step that failed too.
        results: of the steps that did not fail.
        error: what left the handler; None for nothing.
        counts: for each step whether it was added to the shared counter.
        caught: the errors that the handler caught.
    """

    states: list[State]
    results: list[Any] = field(default_factory=list)
    error: dict[str, Any] | None = None
    counts: list[bool] = field(default_factory=list)
    caught: list[Exception] = field(default_factory=list)

    @property
    def at(self) -> int:
        """The last step that was begun."""
        return len(self.states) - 2

    @property
    def end(self) -> State:
        """What there is in the end."""
        return self.states[-1]

    def leaves_transaction(self) -> bool:
        """Whether a transaction ends with an error: one that leaves, or one that is caught and no lone duplicate."""
        return self.error is not None or any(not isinstance(error, DuplicateKeyError) for error in self.caught)


class Model:
    """Run handlers alone on a clean database of the same server, with plain PyMongo.

    Args:
        database: that database, prepared as the one of the campaign.
    """

    def __init__(self, database: RawDatabase) -> None:
        self._database = database

    def run(self, plan: Plan, before: State) -> Clean:
        """Run a record's handler on what the record has."""
        put(self._database, plan, before)
        clean = Clean([before])
        results: list[Any] = []
        for step in plan.steps:
            result, error = self._run_step(plan, step)
            clean.states.append(state_of(self._database, plan))
            clean.counts.append(step.do == "count" and error is None and result != steps.LEFT_OUT)
            if error is not None:
                clean.error = described(error)
                break
            results.append(result)
            if isinstance(result, Exception):
                clean.caught.append(result)
        clean.results = comparable(results, self._database.name)
        return clean

    def partly(self, plan: Plan, step: Step, before: State, after: State) -> Iterator[State]:
        """Yield what the first statements of a step leave, of one, of two, and so on, but not of all."""
        for prefix in step.prefixes(len(after[DOCUMENTS]) - len(before[DOCUMENTS])):
            put(self._database, plan, before)
            self._run_step(plan, prefix)
            yield state_of(self._database, plan)

    def _run_step(self, plan: Plan, step: Step) -> tuple[Any, Exception | None]:
        progress = Progress(executions=_LATE)
        try:
            (result,) = run_without_waiting(steps.run(self._database, plan.owner, [step], progress))
        except Exception as exc:  # noqa: BLE001 - it is the answer
            return None, exc
        return result, None


@dataclass
class Judgement:
    """What the oracle says of a delivery.

    Attributes:
        faults: what must not be, a sentence each.
        counted: how often the record was added to the shared counter for sure.
        maybe: how often more it may have been.
    """

    faults: list[str] = field(default_factory=list)
    counted: int = 0
    maybe: int = 0


def judge_process(plan: Plan, told: Told, before: State, after: State, model: Model) -> Judgement:
    """Judge a delivery to a handler with guarantee "process"."""
    clean = model.run(plan, before)
    if told.is_killed:
        faults = _judge_prefix(plan, range(len(clean.states) - 1), clean, after, model)
        return Judgement(faults, 0, sum(clean.counts))
    if told.is_done:
        return Judgement(_judge_done(told, clean, after), sum(clean.counts))
    faults = []
    if told.results != clean.results[: told.at]:
        faults.append(f"its results up to step {told.at} are {told.results}, undisturbed {clean.results}")
    assert told.error is not None
    if clean.error is not None and told.at == clean.at and _is_same_error(told.error, clean.error):
        if not same(after, clean.end):
            faults.append(differ(f"it raised {told.error}", after, [clean.end]))
        return Judgement(faults, sum(clean.counts))
    faults += _judge_error(plan, told, clean)
    if told.at > clean.at:
        faults.append(f"it came to step {told.at}, undisturbed to {clean.at}")
        return Judgement(faults)
    faults += _judge_last_step(plan, told, clean, after, model)
    return Judgement(faults, sum(clean.counts[: told.at]), sum(clean.counts[told.at : told.at + 1]))


def _judge_done(told: Told, clean: Clean, after: State) -> list[str]:
    faults = []
    if clean.error is not None:
        faults.append(f"it returned, undisturbed it raises {clean.error}")
    if told.results != clean.results:
        faults.append(f"its results are {told.results}, undisturbed {clean.results}")
    if not same(after, clean.end):
        faults.append(differ("it is done", after, [clean.end]))
    return faults


def _judge_last_step(plan: Plan, told: Told, clean: Clean, after: State, model: Model) -> list[str]:
    """Judge what is left by a step that failed, by what the record says of its writes."""
    outcomes = {outcome for _, outcome, _, _ in told.writes[told.first_write :]}
    step = plan.steps[told.at]
    if not step.is_write or outcomes <= _UNSENT:
        expected = clean.states[told.at]
    elif outcomes == {"APPLIED"} and step.is_one_statement:
        expected = clean.states[told.at + 1]
    else:
        return _judge_prefix(plan, [told.at], clean, after, model)
    return [] if same(after, expected) else [differ(f"step {told.at} is {outcomes or 'no write'}", after, [expected])]


def _judge_prefix(plan: Plan, places: Sequence[int], clean: Clean, after: State, model: Model) -> list[str]:
    """Judge what is left by a run that ended in one of these steps, wherever in it."""
    allowed = [state for place in places for state in clean.states[place : place + 2]]
    if any(same(after, state) for state in allowed):
        return []
    for place in places:
        before, step = clean.states[place], plan.steps[place]
        if step.is_multi and between(after, before, clean.states[place + 1]):
            return []
        if any(same(after, state) for state in model.partly(plan, step, before, after)):
            return []
    return [differ(f"it ended in one of the steps {list(places)}", after, allowed)]


def _judge_error(plan: Plan, told: Told, clean: Clean) -> list[str]:
    """Judge an error that the undisturbed run does not have: it is the handler's, the network's, the server's, or ours."""
    error = told.error or {}
    if error["data"]:
        return [f"it raised {error} at step {told.at}, which undisturbed raises {clean.error}"]
    if error["app"] and plan.steps[told.at].do != "fail":
        return [f"it raised {error} at step {told.at}, which is {plan.steps[told.at].do}"]
    if not (error["app"] or error["ours"] or error["network"] or error["code"] or error["type"] in _CANCELLED):
        return [f"it raised {error} at step {told.at}, which is neither the network's nor the server's nor the handler's"]
    return []


def _is_same_error(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("type", "code", "errors", "counts"))


def differ(what: str, after: State, allowed: Sequence[State]) -> str:
    """Say in what a state differs from each of those that are allowed; of many the last three."""
    lines = [f"{what}, and left a state that is not allowed:"]
    for state in allowed[-3:]:
        for name in after:
            here, there = (Counter(map(_frozen, given[name])) for given in (after, state))
            more, less = list((here - there).elements())[:_MOST], list((there - here).elements())[:_MOST]
            lines += [f"{name}: {more or 'nothing'} instead of {less or 'nothing'}"] if more or less else []
    return "\n    ".join(lines)


@dataclass
class Transactions:
    """Judge the deliveries to a handler with guarantee "transaction", one after another.

    Args:
        plan: of the record.
        first: what it has before all of them.
        clean: of the undisturbed run on that.
    """

    plan: Plan
    first: State
    clean: Clean
    is_done: bool = False

    def judge(self, told: Sequence[Told], after: State, markers: int) -> list[str]:
        """Judge one delivery, or several at the same moment."""
        faults: list[str] = []
        is_once = same(after, self.clean.end) and markers == 1
        is_nothing = same(after, self.first) and markers == 0
        if not (is_once or is_nothing) or (is_once and self.clean.leaves_transaction()):
            faults.append(differ(f"there are {markers} markers", after, [self.first, self.clean.end]))
        if self.is_done and not is_once:
            faults.append("it was done, and is not any more")
        for one in told:
            faults += self._judge_one(one, is_once=is_once, is_alone=len(told) == 1)
        ran = [one for one in told if one.is_done and one.answer == self.clean.results and not self.plan.stores]
        if len(ran) > (0 if self.is_done else 1):
            faults.append(f"{len(ran)} deliveries ran the handler to its end, and it was done before: {self.is_done}")
        self.is_done = self.is_done or is_once
        return faults

    def _judge_one(self, told: Told, *, is_once: bool, is_alone: bool) -> list[str]:
        if told.is_killed:
            return []
        if told.is_done:
            faults = [] if is_once else ["it returned, and nothing was done"]
            answers = [self.clean.results] if self.plan.stores else [self.clean.results, None]
            return faults if told.answer in answers else [*faults, f"it returned {told.answer}, not one of {answers}"]
        if told.recovered and is_once and is_alone:  # of two at a time one may fail for good before the other one commits
            return [f"its recoverer was called ({told.recovered}), and it is done"]
        if (
            told.error is not None
            and told.error["data"]
            and (self.clean.leaves_transaction() or self._may_be_cut_short(told.error))
        ):
            return []
        return _judge_error(self.plan, told, self.clean)

    def _may_be_cut_short(self, error: Mapping[str, Any]) -> bool:
        """Whether it is an error that the handler catches, and there was no time to execute it once more for that."""
        is_caught = any(_is_same_error(error, described(caught)) for caught in self.clean.caught)
        return is_caught and self.plan.budget < _AMPLE
