"""`osd bench NAME`: a command for each bench. Importing this module loads none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import BENCHES

app = typer.Typer(
    help="Measured costs, with raw runs, intervals and a report kept.", no_args_is_help=True
)


def _add(name: str, summary: str) -> None:
    @app.command(
        name, help=summary, short_help=summary, epilog=f"Example:  osd bench {name} --quick"
    )
    def bench(
        quick: Annotated[
            bool, typer.Option("--quick", help="Smaller models, fewer repeats: a look, no result.")
        ] = False,
        out: Annotated[
            Path | None,
            typer.Option(help="Directory for its files (default: one in bench-results/)."),
        ] = None,
    ) -> None:
        from benchmarks.runner import begin_in_huge_pages, run

        begin_in_huge_pages()
        run(name, quick=quick, out=out, say=typer.echo)


for _name, _summary in BENCHES.items():
    _add(_name, _summary)
