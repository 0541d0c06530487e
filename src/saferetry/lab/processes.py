"""A Python program in a process of its own that tells what it does, line by line, and can be killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from saferetry.lab._leash import leashed

Event = dict[str, Any]


class ProcessError(RuntimeError):
    """A process ended, or said nothing in time, although something was still to come of it."""


class TellingProcess:
    """Run `python -m module PLAN`, whose standard output is one JSON object a line, each with a key "event".

    What it is asked later comes to its standard input, a JSON object a line too.

    Its methods may be called from any thread, `wait_for` and `finish` from one at a time. Use it as a context manager: it
    is killed at the end if it still runs.

    Attributes:
        events: what it told so far, oldest first.

    Example:
        with TellingProcess("saferetry.lab.consumer", plan) as consumer:
            consumer.wait_for("execution")
            consumer.kill()
    """

    def __init__(
        self,
        module: str,
        plan: Mapping[str, Any],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            module: of the program; it gets the plan as JSON in its first argument.
            plan: what it is to do.
            folder: where it runs; None: where we do.
            environment: more variables for it; the place for secrets, which others see on a command line.
        """
        self.events: list[Event] = []
        self._module = module
        self._new: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: its output has ended
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._started = threading.Event()
        self._process: subprocess.Popen[str]
        self._command = leashed([sys.executable, "-m", module, json.dumps(dict(plan))])
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self._reader = threading.Thread(target=self._read, name=f"reader-{module}", daemon=True)
        self._reader.start()
        self._started.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def told(self, event: str) -> list[Event]:
        """Return the events of this kind so far."""
        return [found for found in list(self.events) if found["event"] == event]

    def wait_for(self, event: str, timeout: float = 60.0) -> Event:
        """Wait until it tells the next event of this kind, and return that; others before it are only remembered.

        Raises:
            ProcessError: it ended before, or `timeout` seconds passed.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                found = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ProcessError(f"{self._module} did not tell {event!r} in {timeout:g} s{self.trace()}") from None
            if found is None:
                self._new.put(None)
                raise ProcessError(f"{self._module} ended before it told {event!r}{self.trace()}")
            if found["event"] == event:
                return found

    def ask(self, **facts: Any) -> None:
        """Write a line to its standard input; harmless once it has ended."""
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(facts) + "\n")
            self._process.stdin.flush()

    def finish(self, timeout: float = 60.0) -> int:
        """Wait until it has ended and all it told was read, and return its exit code (negative: the signal).

        Raises:
            ProcessError: it did not end in time.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self._module} did not end in {timeout:g} s{self.trace()}") from None
        self._reader.join(timeout)
        return code

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it with SIGKILL, as the out-of-memory killer would; harmless once it has ended."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """Stop it (SIGSTOP), as a machine that swaps or a frozen container would."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it if it still runs, and wait for its end. May be called again."""
        self.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._stderr.close()

    def trace(self) -> str:
        """Return its last event and the end of its standard error, for messages."""
        stderr = os.pread(self._stderr.fileno(), 1 << 20, 0)  # the child shares the file's position: it must not move
        return f"; its last event: {self.events[-1:]}; stderr:\n{stderr.decode(errors='replace')[-4000:]}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _read(self) -> None:
        # Started here, since the leash is the thread's.
        self._process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self._started.set()
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        with self._process.stdout as lines:
            for line in lines:
                event = json.loads(line)
                self.events.append(event)
                self._new.put(event)
        self._new.put(None)
        self._process.wait()


def tell(event: str, **facts: object) -> None:
    """Tell the parent process, which reads this at once; called by the program in a `TellingProcess`. Thread-safe."""
    os.write(1, (json.dumps({"event": event, **facts}) + "\n").encode())  # one write: no line is torn
