"""`osd bench papers_methods_large`: `osd bench papers_methods` with a larger target."""

from __future__ import annotations

from benchmarks.engines.models import LARGE
from benchmarks.papers import methods
from benchmarks.record import Options
from benchmarks.result import Result


def run(options: Options) -> Result:
    """Measure it."""
    return methods.run(options, LARGE)
