"""The command line. Importing it loads neither torch nor vllm nor ray: `osd --help` answers at once."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import osd
from osd.errors import ConfigError, OSDError

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="osd",
    help="Serve a large model with a draft model that keeps learning from live traffic.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
)
drafts_app = typer.Typer(help="The drafts a running service has: list them, choose one.", no_args_is_help=True)
config_app = typer.Typer(help="The configuration: what it is and where each value comes from.", no_args_is_help=True)
traces_app = typer.Typer(help="The traces a running service has stored.", no_args_is_help=True)
app.add_typer(drafts_app, name="drafts")
app.add_typer(traces_app, name="traces")
app.add_typer(config_app, name="config")

UrlOption = Annotated[str | None, typer.Option("--url", help="Control port of the service (default: the one running).")]
DeploymentOption = Annotated[str | None, typer.Option("--deployment", help="Which running service, by name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="All of it, as JSON.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
OutOption = Annotated[Path, typer.Option(help="New directory for the draft, in Hugging Face format.")]
EpochsOption = Annotated[int, typer.Option(min=1, help="Passes over the traces.")]


def main() -> None:
    """Entry point: every error a user can cause is one line; `OSD_DEBUG=1` shows where it came from."""
    try:
        app()
    except OSDError as error:
        if os.environ.get("OSD_DEBUG"):
            raise
        print(f"osd: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_status)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"osd {osd.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


@app.command(
    epilog="Examples:  osd serve ./llama-8b --draft ./llama-160m    "
    "osd serve --config configs/tiny-cpu.yaml serving.port=9000"
)
def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[TARGET] [SECTION.KEY=VALUE]...", help="Target model; overrides.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: directory, hub name, or tiny.")] = None,
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option(help="Service port.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="A Redis or Valkey to use instead of a private one.")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster: local, auto, or an address.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; the service runs on.")] = False,
) -> None:
    """Serve TARGET through the OpenAI API, with a draft that keeps learning. Ctrl-C ends everything."""
    target, overrides = split_arguments(arguments or [])
    flags = {
        "serving.target": target,
        "serving.draft": draft,
        "serving.port": port,
        "buffer.redis_url": redis_url,
        "ray.address": address,
    }
    from osd.config import reading

    resolved = reading.load(config, overrides, flags)
    if detach:
        from osd.service.detach import serve_detached

        serve_detached(resolved.config, sys.argv, typer.echo)
        return
    from osd.service import launch

    launch.serve(resolved.config, typer.echo)


@app.command(
    epilog="Examples:  osd profile ./llama-8b --draft ./llama-160m    "
    "osd profile --config configs/tiny-cpu.yaml --again"
)
def profile(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[TARGET] [SECTION.KEY=VALUE]...", help="Target model; overrides.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: directory, hub name, or tiny.")] = None,
    config: ConfigOption = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even if a stored profile fits.")] = False,
) -> None:
    """Measure what steps take on this hardware with these models, keep it for `osd serve`, and print it."""
    target, overrides = split_arguments(arguments or [])
    from osd.config import reading

    flags = {"serving.target": target, "serving.draft": draft}
    resolved = reading.load(config, overrides, flags)
    from osd.service.profile import run

    run(resolved.config, again=again, say=typer.echo)


@app.command(epilog="Example:  osd stop")
def stop(deployment: DeploymentOption = None) -> None:
    """End a running service of this user."""
    from osd.service.detach import stop_service

    typer.echo(f"{stop_service(deployment)} has stopped")


@app.command(epilog="Example:  osd demo --html report.html")
def demo(
    report: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts to this file.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the run's data directory and say where it is.")] = False,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """Tiny models, real vLLM, drifting traffic: acceptance and speed fall, and recover as the draft learns."""
    from osd.demo.story import run

    sys.exit(run(report_path=report, html_path=html, keep=keep, overrides=overrides or []))


@app.command(epilog="Examples:  osd status    osd status --json")
def status(
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a running service is doing; the first line is what is wrong, and the remedy."""
    client = _client(url, deployment)
    state = client.get("/osd/status")
    if as_json:
        _show(state)
        return
    from osd.observe.status_text import page

    typer.echo(page(state, client.get("/osd/events")))


@app.command(epilog="Examples:  osd top    osd top --window 24h    osd top --once")
def top(
    url: UrlOption = None,
    deployment: DeploymentOption = None,
    window: Annotated[str, typer.Option(help="How far the curve reaches back: 5m, 1h, 24h, 7d.")] = "5m",
    once: Annotated[bool, typer.Option("--once", help="Print one frame (always so without a terminal).")] = False,
) -> None:
    """The dashboard at a glance, in this terminal: health, acceptance over time, the loop, events. q leaves."""
    from osd.observe.top.run import run

    run(lambda: _client(url, deployment), window, once=once)


@app.command(epilog="Example:  osd pause")
def pause(url: UrlOption = None, deployment: DeploymentOption = None) -> None:
    """No training, no publishing; serving goes on."""
    _show(_client(url, deployment).admin("pause"))


@app.command(epilog="Example:  osd resume")
def resume(url: UrlOption = None, deployment: DeploymentOption = None) -> None:
    """End a pause."""
    _show(_client(url, deployment).admin("resume"))


@drafts_app.command("list", epilog="Examples:  osd drafts list    osd drafts list --json")
def drafts_list(url: UrlOption = None, deployment: DeploymentOption = None, as_json: JsonOption = False) -> None:
    """Every draft there is: where it came from, how it was judged, what it is doing."""
    drafts = _client(url, deployment).get("/osd/drafts")
    if as_json:
        return _show(drafts)
    from osd.observe.status_text import drafts_table

    typer.echo(drafts_table(drafts, time.time()))


@drafts_app.command(epilog="Example:  osd drafts promote 3")
def promote(version: int, url: UrlOption = None, deployment: DeploymentOption = None) -> None:
    """Serve VERSION now; training goes on from it."""
    _show(_client(url, deployment).admin("promote", version=version))


@drafts_app.command(epilog="Example:  osd drafts rollback")
def rollback(url: UrlOption = None, deployment: DeploymentOption = None) -> None:
    """Serve the draft before the current one, and train on from it. The current one can be promoted again."""
    _show(_client(url, deployment).admin("rollback"))


@drafts_app.command(epilog="Example:  osd drafts pin 3")
def pin(version: int, url: UrlOption = None, deployment: DeploymentOption = None) -> None:
    """Serve VERSION until unpinned, whatever training finds."""
    _show(_client(url, deployment).admin("pin", version=version))


@drafts_app.command(epilog="Example:  osd drafts unpin")
def unpin(url: UrlOption = None, deployment: DeploymentOption = None) -> None:
    """End a pin: what is trained from now on may serve again."""
    _show(_client(url, deployment).admin("unpin"))


@drafts_app.command(epilog="Example:  osd drafts keep 3")
def keep(version: int, url: UrlOption = None, deployment: DeploymentOption = None) -> None:
    """Never prune VERSION."""
    _show(_client(url, deployment).admin("keep", version=version))


@traces_app.command(epilog="Examples:  osd traces purge --all    osd traces purge --before 7d    --domain sql")
def purge(
    every: Annotated[bool, typer.Option("--all", help="Every stored trace.")] = False,
    domain: Annotated[str | None, typer.Option(help='Traces with this label; "" for those without.')] = None,
    before: Annotated[str | None, typer.Option(help="Traces from before a date, or so long ago: 7d, 12h.")] = None,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
) -> None:
    """Delete stored traces. Says which drafts may have learnt from them."""
    from osd.common.wording import moment

    if every == (domain is not None or before is not None):
        raise ConfigError("say which traces: --all, or --domain and --before")
    until = moment(before) if before is not None else None
    _show(_client(url, deployment).purge(domain, until))


@traces_app.command(epilog="Example:  osd traces export monday.traces")
def export(
    file: Annotated[Path, typer.Argument(help="File to write; only this user may read it.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    url: UrlOption = None,
    deployment: DeploymentOption = None,
) -> None:
    """Write every stored trace to FILE, for `osd train`."""
    from osd.offline import recorded

    recorded.export(_client(url, deployment), file, force=force, say=typer.echo)


@app.command(epilog="Example:  osd train --traces monday.traces --draft ./draft --out ./draft-2")
def train(
    traces: Annotated[list[Path], typer.Option(help="File of traces; more may follow.")],
    out: OutOption,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]... [SECTION.KEY=VALUE]...", help="More files; overrides.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft to begin with: directory, hub name, or tiny.")] = None,
    config: ConfigOption = None,
    epochs: EpochsOption = 3,
    force: Annotated[bool, typer.Option("--force", help="Take the draft even if it is not better.")] = False,
) -> None:
    """Distil from recorded traces alone: no engine, no cluster, no Redis. Exits with 1 when the draft is not better."""
    from osd.config import reading
    from osd.offline import train

    files = [*traces, *(Path(a) for a in arguments or [] if not _is_override(a))]
    overrides = [a for a in arguments or [] if _is_override(a)]
    resolved = reading.load(config, overrides, {"serving.draft": draft}).config
    job = train.Job(config=resolved, draft=train.check_draft(resolved), out=out, epochs=epochs, force=force)
    sys.exit(train.run(job, files, typer.echo, _warn))


@app.command(
    epilog="Examples:  osd distil ./llama-8b --draft ./llama-160m --prompts prompts.txt --out ./draft-0    "
    "osd distil --config configs/tiny-cpu.yaml --prompts prompts.jsonl --out ./draft-0 --keep-traces day0.traces"
)
def distil(
    prompts: Annotated[Path, typer.Option(help=".txt (a prompt on each line) or .jsonl (a request on each).")],
    out: OutOption,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[TARGET] [SECTION.KEY=VALUE]...", help="Target model; overrides.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft to begin with: directory, hub name, or tiny.")] = None,
    config: ConfigOption = None,
    keep_traces: Annotated[Path | None, typer.Option(help="Keep what was captured in this file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, where a prompt does not say.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the answers.")] = 0.0,
    streams: Annotated[int, typer.Option(min=1, help="Prompts answered at a time.")] = 16,
    epochs: EpochsOption = 3,
    force: Annotated[
        bool, typer.Option("--force", help="Take the draft even if it is not better; replace --keep-traces.")
    ] = False,
) -> None:
    """A draft before there is traffic: TARGET answers the prompts, the draft learns. Exits with 1 if no better."""
    from osd.config import reading
    from osd.offline import distil as command
    from osd.offline.prompts import Asking

    target, overrides = split_arguments(arguments or [])
    flags = {"serving.target": target, "serving.draft": draft}
    sys.exit(
        command.run(
            lambda own: reading.load(config, overrides, flags | own).config,
            prompts_file=prompts,
            out=out,
            keep_traces=keep_traces,
            asking=Asking(max_tokens=max_tokens, temperature=temperature, streams=streams),
            epochs=epochs,
            force=force,
            say=typer.echo,
            warn=_warn,
        )
    )


@config_app.command("show", epilog="Example:  osd config show configs/tiny-cpu.yaml serving.port=9000")
def config_show(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[FILE] [SECTION.KEY=VALUE]...")] = None,
) -> None:
    """The resolved configuration, each value with its origin."""
    from osd.config import reading
    from osd.exchange.redis_url import mask_url

    file, overrides = split_arguments(arguments or [])
    resolved = reading.load(file, overrides)
    leaves = reading.leaves(resolved.config)
    url = resolved.config.buffer.redis_url
    for key, value in (leaves | ({"buffer.redis_url": mask_url(url)} if url else {})).items():
        origin = resolved.origins.get(key) or next(
            (o for k, o in resolved.origins.items() if k.startswith(key + ".")), "default"
        )
        typer.echo(f"{key} = {json.dumps(value)}    # {origin}")


def _add_benches(checkout: Path) -> None:
    """The laboratory stands beside the product in a checkout, and is no part of an installation."""
    if (checkout / "pyproject.toml").exists() and (checkout / "benchmarks").is_dir():
        sys.path.append(str(checkout))
        from benchmarks.cli import app as benches

        app.add_typer(benches, name="bench")
        return

    @app.command("bench", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def bench() -> None:
        raise ConfigError("osd bench: the benches stand in a checkout of the project, not in an installation")


_add_benches(Path(__file__).parents[1])


@app.command(
    epilog="Examples:  osd doctor    osd doctor --config configs/tiny-cpu.yaml    "
    "osd doctor serving.target=./llama-8b serving.draft=./llama-160m"
)
def doctor(
    config: ConfigOption = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
) -> None:
    """What is installed, which engine runs and why, whether the models fit, what the draft costs, what is broken."""
    from osd.config import reading
    from osd.doctor.ladder import run

    sys.exit(run(reading.load(config, overrides or []).config, typer.echo))


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Positional arguments: at most one without `=`, the others `name.name=value`."""
    plain = [a for a in arguments if not _is_override(a)]
    if len(plain) > 1:
        raise ConfigError(f"{plain[1]!r}: one model or file and overrides of the form section.key=value are expected")
    return (plain[0] if plain else None), [a for a in arguments if _is_override(a)]


def _is_override(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and all(part.isidentifier() for part in key.split("."))


def _client(url: str | None, deployment: str | None) -> Any:
    from osd.client.http import Client

    return Client(url, deployment)


def _warn(line: str) -> None:
    typer.echo(f"osd: {line}", err=True)


def _show(answer: Any) -> None:
    typer.echo(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
