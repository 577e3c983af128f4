"""Train without a running service, on the traces of one: train, distil, traces."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.answers import tell
from osd.cli.options import (
    ConfigOption,
    DeploymentOption,
    EpochsOption,
    FirstDraftOption,
    JsonOption,
    NoHeadOption,
    OutOption,
    UrlOption,
    client_of,
    is_override,
    split_arguments,
    warn,
)
from osd.errors import ConfigError

app = typer.Typer()
traces_app = typer.Typer(help="The traces a running service has stored.", no_args_is_help=True)


@traces_app.command(
    epilog="Examples:  osd traces purge --all    osd traces purge --before 7d    --domain sql"
)
def purge(
    every: Annotated[bool, typer.Option("--all", help="Every stored trace.")] = False,
    domain: Annotated[
        str | None, typer.Option(help='Traces with this label; "" for those without.')
    ] = None,
    before: Annotated[
        str | None, typer.Option(help="Traces from before a date, or so long ago: 7d, 12h.")
    ] = None,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete stored traces. Says which drafts may have learnt from them."""
    from osd.common.wording import moment

    if every == (domain is not None or before is not None):
        raise ConfigError("say which traces: --all, or --domain and --before")
    until = moment(before) if before is not None else None
    tell(client_of(url, deployment).purge(domain, until), as_json)


@traces_app.command(epilog="Example:  osd traces export monday.traces")
def export(
    file: Annotated[Path, typer.Argument(help="File to write; only this user may read it.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
) -> None:
    """Write every stored trace to FILE, for `osd train`."""
    from osd.offline import recorded

    recorded.export(client_of(url, deployment), file, force=force, say=typer.echo)


@app.command(
    epilog="Examples:  osd train --traces monday.traces --draft ./draft --out ./draft-2    "
    "osd train --traces monday.traces --draft ./head --out ./head-2 serving.target=./llama-8b    "
    "osd train --traces monday.traces --draft ./draft --out ./drafts --pool 3"
)
def train(
    traces: Annotated[list[Path], typer.Option(help="File of traces; more may follow.")],
    out: OutOption,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]... [SECTION.KEY=VALUE]...", help="More files; overrides."),
    ] = None,
    draft: FirstDraftOption = None,
    head: NoHeadOption = False,
    config: ConfigOption = None,
    epochs: EpochsOption = 3,
    force: Annotated[
        bool, typer.Option("--force", help="Take the draft even if it is not better.")
    ] = False,
    pool: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="So many drafts, in OUT/1, OUT/2, ...: each learns what those before it do not "
            "reproduce; fewer where nothing new is left.",
        ),
    ] = None,
) -> None:
    """Distil from recorded traces alone: no engine, no cluster, no Redis. Exits with 1 when the
    draft is not better."""
    from osd.config import reading
    from osd.offline import pool as pools
    from osd.offline import recorded, train

    files = [*traces, *(Path(a) for a in arguments or [] if not is_override(a))]
    overrides = [a for a in arguments or [] if is_override(a)]
    _end_on_sigterm()
    resolved = reading.load(config, overrides, {"serving.draft": draft}).config
    train.check_out(out)
    recorded.check_files(files)  # before a draft is fetched
    job = train.Job(
        config=resolved, draft=train.check_draft(resolved), out=out, epochs=epochs, force=force
    )
    if pool is not None:
        sys.exit(pools.run(job, pool, files, typer.echo, warn))
    sys.exit(train.run(job, files, typer.echo, warn))


@app.command(
    epilog="Examples:  osd distil ./llama-8b --draft ./llama-160m --prompts prompts.txt "
    "--out ./draft-0    "
    "osd distil --config configs/tiny-cpu.yaml --prompts prompts.jsonl --out ./draft-0 "
    "--keep-traces day0.traces    "
    "osd distil ./llama-8b --new-head --prompts prompts.txt --out ./head-0"
)
def distil(
    prompts: Annotated[
        Path, typer.Option(help=".txt (a prompt on each line) or .jsonl (a request on each).")
    ],
    out: OutOption,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET] [SECTION.KEY=VALUE]...", help="Target model; overrides."),
    ] = None,
    draft: FirstDraftOption = None,
    new_head: Annotated[
        bool, typer.Option("--new-head", help="Begin with a new EAGLE-3 head instead of a draft.")
    ] = False,
    head: NoHeadOption = False,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a new head may propose: the target's most frequent. Default: 32000, "
            "or all."
        ),
    ] = None,
    config: ConfigOption = None,
    keep_traces: Annotated[
        Path | None, typer.Option(help="Keep what was captured in this file.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer, where a prompt does not say.")
    ] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the answers.")] = 0.0,
    streams: Annotated[int, typer.Option(min=1, help="Prompts answered at a time.")] = 16,
    epochs: EpochsOption = 3,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Take the draft even if it is not better; replace --keep-traces."
        ),
    ] = False,
) -> None:
    """A draft before there is traffic: TARGET answers the prompts, the draft learns. Exits with 1
    if no better."""
    from osd.config import reading
    from osd.offline import distil as command
    from osd.offline.prompts import Asking

    _end_on_sigterm()
    target, overrides = split_arguments(arguments or [])
    flags = {"serving.target": target, "serving.draft": draft}
    sys.exit(
        command.run(
            lambda own: reading.load(config, overrides, flags | own).config,
            begin=command.Begin(new_head, draft_vocab),
            prompts_file=prompts,
            out=out,
            keep_traces=keep_traces,
            asking=Asking(max_tokens=max_tokens, temperature=temperature, streams=streams),
            epochs=epochs,
            force=force,
            say=typer.echo,
            warn=warn,
        )
    )


def _end_on_sigterm() -> None:
    """As on Ctrl-C: all that was started ends too, and no temporary directory stays."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
