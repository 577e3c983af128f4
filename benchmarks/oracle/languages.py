"""`osd bench oracle_languages`: `osd bench oracle` on prose in five languages."""

from __future__ import annotations

from benchmarks.oracle import oracle
from benchmarks.record import Options
from benchmarks.result import Result


def run(options: Options) -> Result:
    """Build and record what the cache lacks, time steps, then replay."""
    return oracle.run(options, oracle.LANGUAGES)
