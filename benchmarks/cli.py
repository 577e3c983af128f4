"""`osd bench NAME`: a command for each bench. Importing this module loads none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import BENCHES, IN_PARTS, READ_TRACES

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
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Of the list NAME nothing but VALUE; may be given several times.",
    ),
]


def _add(name: str, summary: str) -> None:
    def bench(quick: Quick = False, out: Out = None) -> None:
        _run(name, quick, out)

    def bench_of_traces(traces: Traces = None, quick: Quick = False, out: Out = None) -> None:
        _run(name, quick, out, traces=traces)

    def bench_in_parts(only: Only = None, quick: Quick = False, out: Out = None) -> None:
        _run(name, quick, out, only=only or ())

    command: Callable[..., None] = bench
    example = "--quick"
    if name in READ_TRACES:
        command, example = bench_of_traces, "--traces data"
    if name in IN_PARTS:
        part = "seeds=0" if "seeds" in IN_PARTS[name] else "schedules=sharp"
        command, example = bench_in_parts, f"--only {part} --out run"
    cut = f" Lists that --only cuts: {', '.join(IN_PARTS[name])}." if name in IN_PARTS else ""
    epilog = f"Example:  osd bench {name} {example}"
    app.command(name, help=summary + cut, short_help=summary, epilog=epilog)(command)


def _run(
    name: str,
    quick: bool,
    out: Path | None,
    traces: Path | None = None,
    only: Sequence[str] = (),
) -> None:
    from benchmarks.runner import begin_in_huge_pages, run

    begin_in_huge_pages()
    run(name, quick=quick, out=out, traces=traces, only=only, say=typer.echo)


for _name, (_, _summary) in BENCHES.items():
    _add(_name, _summary)
