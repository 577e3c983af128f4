"""`osd bench NAME`: a command for each bench. Importing this module loads none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import BENCHES, READ_TRACES

app = typer.Typer(
    help="Measured costs, with raw runs, intervals and a report kept.", no_args_is_help=True
)


Quick = Annotated[
    bool, typer.Option("--quick", help="Smaller models, fewer repeats: a look, no result.")
]
Out = Annotated[
    Path | None, typer.Option(help="Directory for its files (default: one in bench-results/).")
]
Traces = Annotated[Path | None, typer.Option(help="Directory of the traces that it reads.")]


def _add(name: str, summary: str) -> None:
    def bench(quick: Quick = False, out: Out = None) -> None:
        _run(name, quick, out)

    def bench_of_traces(traces: Traces = None, quick: Quick = False, out: Out = None) -> None:
        _run(name, quick, out, traces)

    reads_traces = name in READ_TRACES
    app.command(
        name,
        help=summary,
        short_help=summary,
        epilog=f"Example:  osd bench {name} {'--traces data' if reads_traces else '--quick'}",
    )(bench_of_traces if reads_traces else bench)


def _run(name: str, quick: bool, out: Path | None, traces: Path | None = None) -> None:
    from benchmarks.runner import begin_in_huge_pages, run

    begin_in_huge_pages()
    run(name, quick=quick, out=out, traces=traces, say=typer.echo)


for _name, (_, _summary) in BENCHES.items():
    _add(_name, _summary)
