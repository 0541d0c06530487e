"""Whether and when to try again: facts in, a decision out. No clock, no random, no I/O."""

from __future__ import annotations

import enum
import random

from tenacity import RetryCallState, wait_exponential

from saferetry import _world
from saferetry._outcomes import HISTORY_LOST, NEWER_NUMBER, Facts, Outcome, Reading, Signal, is_overload
from saferetry._settings import Settings

SHORTEST_CALL = 0.1  # seconds a driver call is taken to need at least

# The retryable-writes specification's codes ("retryable error", Driver Errors).
DRIVER_RETRYABLE_CODES = frozenset({6, 7, 89, 91, 134, 189, 262, 9001, 10058, 10107, 11600, 11602, 13435, 13436})
# And those where trying again is worth while although drivers do not: LockTimeout, MaxTimeMSExpired, WriteConflict,
# Interrupted, and the throttle of hosted look-alikes.
RETRYABLE_CODES = DRIVER_RETRYABLE_CODES | {24, 50, 112, 11601, 16500}


class Decision(enum.Enum):
    """Say what follows a failed driver call."""

    RESEND = "resend"
    FINAL = "final"  # the error is the answer
    REFUSED = "refused"  # sending again could repeat an effect


def is_passing(reading: Reading) -> bool:
    """Whether an error may go away by itself."""
    code = reading.code
    match reading.signal:
        case Signal.SELECTION | Signal.NETWORK:
            return True
        case Signal.COMMAND_ERROR | Signal.WRITE_ERROR:
            if code in (HISTORY_LOST, NEWER_NUMBER):
                return False
            return code in RETRYABLE_CODES or "RetryableWriteError" in reading.labels or is_overload(reading)
        case Signal.WRITE_CONCERN:
            return code in DRIVER_RETRYABLE_CODES
    return False


def decide(facts: Facts, outcome: Outcome, *, repeatable: bool, id_protected: bool) -> Decision:
    """Return what follows a failed driver call.

    Args:
        facts: What is known of the command.
        outcome: What became of it so far.
        repeatable: The user said that running it twice is right.
        id_protected: All its statements are inserts whose ``_id`` was made for this call.
    """
    if not is_passing(facts.reading):
        return Decision.FINAL
    match outcome:
        case Outcome.NOT_SENT | Outcome.NOT_APPLIED:
            return Decision.RESEND
        case Outcome.APPLIED:  # waits again for the write concern, at the same address
            return Decision.RESEND if facts.numbered and not facts.multi else Decision.FINAL
        case Outcome.UNKNOWN if facts.foreign:
            return Decision.REFUSED
        case Outcome.UNKNOWN:
            return Decision.RESEND if facts.numbered or repeatable or id_protected else Decision.REFUSED
    return Decision.FINAL


class FullJitter(wait_exponential):
    """Wait between 0 and an exponentially growing, capped limit ("full jitter").

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        super().__init__(multiplier=settings.backoff_base_ms / 1000, max=settings.backoff_cap_ms / 1000)
        self._rng = rng

    def __call__(self, retry_state: RetryCallState) -> float:
        """Return the seconds to wait before the next attempt."""
        return _world.uniform(self._rng, super().__call__(retry_state))


def enough_time(remaining: float, wait: float, longest: float) -> bool:
    """Whether one more attempt, as long as the longest so far, fits after the wait; all in seconds."""
    return remaining >= wait + max(longest, SHORTEST_CALL)
