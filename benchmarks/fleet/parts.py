"""A process of the bench that is asked by lines of JSON: the controller, or some of the replicas.

    bench ──{"ask": NAME, ...}──► process, on its standard input
      ▲                             │
      └──────────{...}──────────────┘ on its standard output; the first line says that it has begun

It ends with its standard input, and so with the bench.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from osd.errors import OSDError

SECONDS_TO_END = 10.0


class Part:
    """Seen from the bench. `settings` is what the module's `main` is given; the process logs to
    `log`.

    Example:
        with Part("benchmarks.fleet.controller", {"url": "redis://..."}, Path("log")) as part:
            part.wait_ready()
            part.ask("report")  # {"cpu_seconds": 1.2, ...}
    """

    def __init__(self, module: str, settings: Mapping[str, Any], log: Path) -> None:
        self._module, self._log = module, log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._say(dict(settings))

    def wait_ready(self) -> dict[str, Any]:
        """Block until it has begun; returns what it says of its start."""
        return self._hear()

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        self._say({"ask": name, **arguments})
        return self._hear()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSDError(f"{self._module} ended; see {self._log}")
        found: dict[str, Any] = json.loads(line)
        return found


Answers = Mapping[str, Callable[..., dict[str, Any]]]
"""What may be asked -> what answers."""


def settings() -> dict[str, Any]:
    """In the process: what it was given."""
    found: dict[str, Any] = json.loads(sys.stdin.readline())
    return found


def answer(answers: Answers, **begun: Any) -> None:
    """In the process: say that it has begun, and answer until nobody asks any more."""
    _write(begun)
    for line in sys.stdin:
        asked = json.loads(line)
        _write(answers[asked.pop("ask")](**asked))


def _write(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
