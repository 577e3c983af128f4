"""`osd bench control_async`: `osd bench control` with engines that schedule asynchronously."""

from __future__ import annotations

from benchmarks.control import control
from benchmarks.record import Options
from benchmarks.result import Result


def run(options: Options) -> Result:
    """Measure every cell of every draft."""
    return control.run(options, is_async=True)
