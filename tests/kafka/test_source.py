"""A queue that shows a message again unless it is deleted in time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from saferetry import current_record, handler
from saferetry.errors import ConfigurationError
from saferetry.kafka import run_source


class Queue:
    """A queue as SQS is: what is not deleted comes again."""

    def __init__(self, *messages: str) -> None:
        self.messages = list(messages)
        self.stop = threading.Event()
        self.receives = 0
        self.most_receives = 5

    def receive(self) -> list[str]:
        self.receives += 1
        if not self.messages or self.receives >= self.most_receives:
            self.stop.set()
        return list(self.messages)

    def delete(self, message: str) -> None:
        self.messages.remove(message)


def run(queue: Queue, work: Any, **options: Any) -> None:
    given: dict[str, Any] = {"visibility_timeout": 1_000, "delete": queue.delete, "stop": queue.stop, **options}
    run_source(queue.receive, work, **given)


def test_a_message_that_is_done_is_deleted() -> None:
    queue = Queue("a", "b")
    seen: list[str] = []
    run(queue, seen.append)
    assert (seen, queue.messages) == (["a", "b"], [])


def test_one_that_failed_is_left_and_comes_again_while_the_others_go_on() -> None:
    queue = Queue("a", "b")
    seen: list[str] = []

    def work(message: str) -> None:
        seen.append(message)
        if seen.count("a") < 3 and message == "a":
            raise ValueError("not now")

    run(queue, work)
    assert (seen, queue.messages) == (["a", "b", "a", "a"], [])


def test_each_message_is_a_record_with_its_id_as_key_and_a_share_of_the_time() -> None:
    seen: list[tuple[str, float]] = []

    def work(message: str) -> None:
        record = current_record()
        assert record is not None
        assert record.key is not None
        seen.append((record.key.stream, record.remaining()))

    run(Queue("a", "b"), work, key=lambda message: f"queue-{message}")
    assert [stream for stream, _ in seen] == ["queue-a", "queue-b"]
    assert all(0 < left <= 900 for _, left in seen)


def test_a_handler_keeps_to_its_messages_time() -> None:
    budgets: list[float] = []

    @handler(name="t", budget=2_000)
    def work(message: str) -> None:
        record = current_record()
        assert record is not None
        budgets.append(record.remaining())

    run(Queue("a"), work)
    assert budgets[0] <= 900


def test_a_message_that_there_is_no_time_for_is_left(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue("a", "b")
    queue.most_receives = 2
    run(queue, lambda message: threading.Event().wait(0.2), visibility_timeout=0.1)
    assert queue.messages == ["b"]
    assert "a message was left" in caplog.text


def test_an_error_that_is_a_mistake_of_the_program_ends_the_loop() -> None:
    queue = Queue("a")
    with pytest.raises(ConfigurationError):
        run(queue, lambda message: (number for number in [1]))
    assert queue.messages == ["a"]


@pytest.mark.parametrize("seconds", [0, -1, True, None, "30"])
def test_a_time_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="visibility_timeout must be"):
        run(Queue("a"), print, visibility_timeout=seconds)
