"""`osd bench fleet`: what many replicas cost their Redis and their controller.

    simulated replicas (`replicas.py`) ──► a private Valkey ◄── the controller (`controller.py`)
         1 or 2 processes                                          a process of its own

Replicas are the product's loops over engines that do nothing: they poll, report and put traces as
those of busy engines. `parts.py` starts the processes, `scene.py` measures, `report.py` makes
figures of it.
"""

from __future__ import annotations

from benchmarks.fleet import report
from benchmarks.fleet.report import summarise
from benchmarks.record import Goal, Notebook, Options, Protocol
from benchmarks.result import Result

__all__ = ["protocol", "run", "summarise"]


def protocol(options: Options) -> Protocol:
    """What will be measured."""
    from osd.config.schema import Config
    from osd.exchange.registry import FEED_LENGTH

    config, quick = Config(), options.quick
    poll_s = config.serving.seconds_between_polls
    return Protocol(
        bench="fleet",
        question="What does a deployment of many replicas cost its Redis and its controller?",
        arms=report.ARMS,
        order="Per fleet: a new server, controller and replicas. First they poll and report, then "
        "they pause, then they only put traces; then the wanted draft changes while they poll. At "
        "last another controller takes over, which knows what an older one would.",
        sizes={
            "replicas": [8, 16] if quick else [16, 64, 256],
            "spans": 2 if quick else 3,
            "span_seconds": 1.5 if quick else 20,
            "fan_outs": 3 if quick else 20,
            "seconds_between_polls": poll_s,
            "seconds_between_looks": config.control.seconds_between_looks,
            "traces_per_second": 50 if quick else 500,
            "trace_tokens": [256, 160],
            "top_k": config.capture.top_k,
            "domains": "unlabelled",
            "max_traces": 1000 if quick else 2000,
            "history_seconds": 60 if quick else 3600,
            "feed_length": FEED_LENGTH,
            "max_memory": config.buffer.max_memory,
            "extrapolated_traces_per_second": 10_000,
            "server": "private Valkey, append-only file",
        },
        goals=(
            Goal(figure=report.REDIS, at_most=0.5),
            Goal(figure=report.CONTROLLER, at_most=0.5),
            Goal(figure=report.CONTROLLER_LATER, at_most=0.5),
            Goal(figure=report.LAST, at_most=2 * poll_s + 0.5),
            Goal(figure=report.HOLDS, at_least=3600),
        ),
    )


def run(options: Options) -> Result:
    """Measure each fleet."""
    from benchmarks.fleet.scene import measure

    plan = protocol(options)
    notebook = Notebook(options, plan)
    for num_replicas in plan.sizes["replicas"]:
        measure(num_replicas, notebook, plan, options)
    return summarise(plan, notebook.rows)
