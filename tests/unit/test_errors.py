"""The errors: one tree, picklable with their facts, and not to be taken for the driver's."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
from pymongo.errors import PyMongoError

import saferetry
from saferetry import Outcome, WriteView, errors
from saferetry.errors import (
    ConfigurationError,
    DeadLetterError,
    DriverMismatchError,
    KeyReusedError,
    PartitionLostError,
    RetryRefusedError,
    SafeRetryError,
    TakenOverError,
    UnprotectedWriteError,
    UnsettledWriteError,
)

ALL = [
    ConfigurationError,
    DeadLetterError,
    DriverMismatchError,
    KeyReusedError,
    PartitionLostError,
    RetryRefusedError,
    TakenOverError,
    UnprotectedWriteError,
    UnsettledWriteError,
]
WRITES = (
    WriteView("insert_one", "shop.orders", Outcome.APPLIED, 1, 1),
    WriteView("update_many", "shop.stock", Outcome.UNKNOWN, 1, 1, error_code=50),
)


def test_these_are_all_errors_and_all_are_public() -> None:
    found = {value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, BaseException)}
    assert found == {*ALL, SafeRetryError}
    assert {getattr(errors, name) for name in errors.__all__} == found


@pytest.mark.parametrize("kind", ALL)
def test_an_error_derives_from_saferetryerror_directly(kind: type[SafeRetryError]) -> None:
    assert kind.__bases__[0] is SafeRetryError


def test_the_root_is_an_ordinary_exception() -> None:
    assert SafeRetryError.__bases__ == (Exception,)


def test_a_configuration_error_is_a_value_error_and_no_other_is() -> None:
    assert [kind for kind in ALL if issubclass(kind, ValueError)] == [ConfigurationError]


@pytest.mark.parametrize("kind", ALL)
def test_no_error_is_one_of_the_drivers_or_of_the_system(kind: type[SafeRetryError]) -> None:
    assert not issubclass(kind, (PyMongoError, OSError, RuntimeError, TimeoutError))


@pytest.mark.parametrize("kind", [SafeRetryError, *ALL])
def test_an_error_can_be_pickled(kind: type[SafeRetryError]) -> None:
    back = pickle.loads(pickle.dumps(kind("what, why, what to do")))  # noqa: S301 - our own
    assert type(back) is kind
    assert str(back) == "what, why, what to do"


def test_a_refusal_is_pickled_with_its_facts() -> None:
    refused = RetryRefusedError("no", writes=WRITES, reason="insert_one on shop.orders is applied")
    for back in (pickle.loads(pickle.dumps(refused)), copy.copy(refused), copy.deepcopy(refused)):  # noqa: S301 - our own
        assert back.writes == WRITES
        assert back.reason == "insert_one on shop.orders is applied"
        assert str(back) == "no"


def test_an_unsettled_write_is_pickled_with_its_facts() -> None:
    back = pickle.loads(pickle.dumps(UnsettledWriteError("open", writes=WRITES)))  # noqa: S301 - our own
    assert back.writes == WRITES
    assert str(back) == "open"


def test_a_note_survives_pickling() -> None:
    refused = RetryRefusedError("no", writes=WRITES)
    refused.add_note("seen by a worker")
    assert pickle.loads(pickle.dumps(refused)).__notes__ == ["seen by a worker"]  # noqa: S301 - our own


@pytest.mark.parametrize("kind", [RetryRefusedError, UnsettledWriteError])
def test_the_facts_may_be_left_out(kind: type[RetryRefusedError | UnsettledWriteError]) -> None:
    assert kind("no").writes == ()


def test_the_message_is_what_is_shown() -> None:
    assert str(RetryRefusedError("not again: why", writes=WRITES, reason="r")) == "not again: why"
    assert RetryRefusedError("not again").args == ("not again",)


@pytest.mark.parametrize("kind", [SafeRetryError, *ALL])
def test_every_error_says_what_it_is(kind: type[SafeRetryError]) -> None:
    assert (kind.__doc__ or "").strip()
    assert kind.__module__ == "saferetry.errors"
    assert saferetry.errors is errors
