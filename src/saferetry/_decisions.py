"""What was decided about a call or a record, told to the log at DEBUG: in words, and as an object for ``saferetry.testing``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, TypeAlias

logger = logging.getLogger("saferetry")

What: TypeAlias = Literal["resent", "executed again", "given up", "refused", "skipped", "recovered"]
_WORDS: dict[str, str] = {"resent": "sent again", "executed again": "executed again", "recovered": "handed to the recoverer"}
ATTRIBUTE = "saferetry_decided"  # of a log record


@dataclass(frozen=True)
class Decided:
    """Say what was decided.

    Attributes:
        what: "resent" (a call, as the same write), "executed again" (a handler), "given up" (attempts, executions or time are
            spent), "refused" (it could take effect twice, or cannot be protected or undone), "skipped" (the record was done
            before), "recovered" (the recoverer has the record).
        subject: The method on its namespace, or the handler's name.
        reason: Why, where there is more to say.
        wait: Seconds waited before.
    """

    what: What
    subject: str
    reason: str = ""
    wait: float | None = None


def tell(what: What, subject: str, reason: str = "", wait: float | None = None) -> None:
    """Tell what was decided."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    ending = f" in {wait:.3f} s" if wait is not None else ""
    why = f" ({reason})" if reason else ""
    logger.debug(
        "%s: %s%s%s", subject, _WORDS.get(what, what), ending, why, extra={ATTRIBUTE: Decided(what, subject, reason, wait)}
    )
