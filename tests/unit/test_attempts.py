"""The first attempt is plain; what follows a failed one is tenacity's, which counts that one too."""

from __future__ import annotations

from typing import Any

import pytest
from tenacity import retry_if_exception_type, stop_after_attempt, wait_none

from saferetry._attempts import attempts, attempts_async

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Work:
    """Fail some times, then return how often it was called."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.asked = 0

    def controls(self) -> dict[str, Any]:
        self.asked += 1
        return {
            "retry": retry_if_exception_type(ConnectionError),
            "stop": stop_after_attempt(3),
            "wait": wait_none(),
            "reraise": True,
        }

    def do(self, argument: str) -> tuple[str, int]:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return argument, self.calls

    async def do_async(self, argument: str) -> tuple[str, int]:
        return self.do(argument)

    async def run(self, *, is_async: bool) -> Any:
        if is_async:
            return await attempts_async(self.controls, self.do_async, "x")
        return attempts(self.controls, self.do, "x")


@BOTH
async def test_the_rules_are_not_asked_where_the_first_attempt_succeeds(is_async: bool) -> None:
    work = Work()
    assert await work.run(is_async=is_async) == ("x", 1)
    assert work.asked == 0


@BOTH
@pytest.mark.parametrize("failures", [1, 2])
async def test_a_further_attempt_follows_while_the_rules_say_so(failures: int, is_async: bool) -> None:
    work = Work(*[ConnectionError(str(number)) for number in range(failures)])
    assert await work.run(is_async=is_async) == ("x", failures + 1)
    assert work.asked == 1


@BOTH
async def test_the_failed_first_attempt_counts(is_async: bool) -> None:
    last = ConnectionError("3")
    work = Work(ConnectionError("1"), ConnectionError("2"), last, ConnectionError("4"))
    with pytest.raises(ConnectionError) as caught:
        await work.run(is_async=is_async)
    assert caught.value is last
    assert work.calls == 3


@BOTH
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
async def test_what_the_rules_do_not_name_leaves_unchanged(error: BaseException, is_async: bool) -> None:
    work = Work(error)
    with pytest.raises(type(error)) as caught:
        await work.run(is_async=is_async)
    assert caught.value is error
    assert caught.value.__context__ is None
    assert work.calls == 1
