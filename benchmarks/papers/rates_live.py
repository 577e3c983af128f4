"""`osd bench papers_rates_live`: the same as `papers_rates`, on real engines."""

from __future__ import annotations

from benchmarks.papers.rates import HERE, protocol, summarise
from benchmarks.record import Notebook, Options
from benchmarks.result import Result

__all__ = ["run", "summarise"]


def run(options: Options) -> Result:
    """Measure each draft at each load."""
    from benchmarks.engines import engine

    engine.prepare()
    from benchmarks.papers.rates_engine import measure

    plan = protocol(options, HERE)
    notebook = Notebook(options, plan)
    for row in measure(plan.sizes, options.say):
        notebook.add(**row)
    return summarise(plan, notebook.rows)
