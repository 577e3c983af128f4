"""Measure, on real vLLM and without a service, what each way to speculate gains: evaluate."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from osd.cli import bench
from osd.cli.options import ConfigOption, DraftOption, split_arguments, warn
from osd.errors import ConfigError

if TYPE_CHECKING:
    from osd.evaluate.plan import Load

app = typer.Typer()


class Usual(NamedTuple):
    """What holds where an option is not given."""

    k: str
    batch: str
    requests: int
    max_tokens: int
    repeats: int


QUICK = Usual(k="1,3", batch="1,4", requests=4, max_tokens=32, repeats=2)
WHOLE = Usual(k="1,2,3,5", batch="1,4,16", requests=64, max_tokens=256, repeats=3)
USUAL_KINDS = 2
"""Of traffic, as the built-in target has."""

ArgumentsOption = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TARGET] [SECTION.KEY=VALUE]...", help="Target model; overrides."),
]
HeadOption = Annotated[
    str | None, typer.Option(help="EAGLE-3 head beside a draft model: directory or hub name.")
]
FamilyOption = Annotated[
    str | None,
    typer.Option(help="In a checkout: models and traffic of a bench's family: prose, tiny ..."),
]
MethodsOption = Annotated[
    str | None,
    typer.Option(
        help="Of none, ngram, memory, suffix, draft, eagle3, auto. Default: all that can run."
    ),
]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(help="File of requests (.jsonl, .json, .csv); more may follow."),
]
FormOption = Annotated[
    str | None, typer.Option(help="Of the data, where its keys do not tell: gsm8k, alpaca ...")
]
LengthsOption = Annotated[str | None, typer.Option("--k", help="Draft tokens of a step: 1,3.")]
BatchOption = Annotated[
    str | None, typer.Option(help="Requests kept in flight: 1,4. Default with no other load.")
]
RateOption = Annotated[
    str | None, typer.Option(help="Requests per second, at random times (Poisson): 0.5,2.")
]
ArrivalsOption = Annotated[
    bool, typer.Option("--arrivals", help='Requests come at the times in the data ("at").')
]
TemperatureOption = Annotated[str, typer.Option(help="Of sampling: 0,0.7.")]
RequestsOption = Annotated[int | None, typer.Option(min=1, help="Requests of each file.")]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Longest answer, where the data does not say.")
]
RepeatsOption = Annotated[int | None, typer.Option(min=1, help="Runs of each arm.")]
SeedOption = Annotated[int, typer.Option(help="Which requests of a file are taken.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Few requests, lengths and batches: minutes.")
]
RunsOption = Annotated[
    Path | None,
    typer.Option(help="Directory of the runs; those that are there are not done again."),
]
FiguresOption = Annotated[bool, typer.Option("--json", help="The figures, as JSON.")]


@app.command(
    epilog="Examples:  osd evaluate tiny-cost-shaped --draft tiny --quick    "
    "osd evaluate ./llama-8b --draft ./llama-160m --head ./llama-8b-eagle3 --data gsm8k.jsonl "
    "--data sharegpt.json --k 1,3,5 --batch 1,8,32    "
    "osd evaluate ./llama-8b --draft ./llama-8b-eagle3 --data gsm8k.jsonl    "
    "osd evaluate ./llama-8b --methods none,ngram,memory --data spider.json --rate 0.5,2    "
    "osd evaluate --family prose --quick"
)
def evaluate(
    arguments: ArgumentsOption = None,
    draft: DraftOption = None,
    head: HeadOption = None,
    family: FamilyOption = None,
    methods: MethodsOption = None,
    data: DataOption = None,
    form: FormOption = None,
    k: LengthsOption = None,
    batch: BatchOption = None,
    rate: RateOption = None,
    arrivals: ArrivalsOption = False,
    temperature: TemperatureOption = "0",
    requests: RequestsOption = None,
    max_tokens: MaxTokensOption = None,
    repeats: RepeatsOption = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    out: RunsOption = None,
    config: ConfigOption = None,
    as_json: FiguresOption = False,
) -> None:
    """What each way to speculate gains on TARGET: tokens/s over none, latencies, acceptance, where
    a step's time goes, at each length and load."""
    from osd.config import reading
    from osd.evaluate import command, forms
    from osd.evaluate.models import find, possible
    from osd.evaluate.plan import Plan, methods_of, numbers, whole_numbers

    target, overrides = split_arguments(arguments or [])
    if family and (target or draft or head):
        raise ConfigError("--family: brings its own models; leave TARGET, --draft and --head out")
    own = {"serving.target": target, "serving.draft": draft}
    usual = QUICK if quick else WHOLE
    asked = command.Asked(
        config=reading.load(config, overrides, own).config,
        data=tuple(forms.read(path, form) for path in data or ()),
        traffic={},
        num_requests=requests or usual.requests,
        max_tokens=max_tokens or usual.max_tokens,
        seed=seed,
        out=out or (Path(f"evaluation-{family}") if family else None),
    )
    loads = _loads(batch, rate, arrivals, usual.batch)
    lengths = whole_numbers(k or usual.k, "--k")
    temperatures = numbers(temperature, "--temperature", least=0)
    has_suffix = command.has_suffix()
    may_be = possible(family or asked.config.serving.draft, head or "")
    may_run = methods_of(methods, may_be, has_suffix=has_suffix)
    command.check(asked, may_run, loads, is_family=bool(family))
    if family:
        flags, traffic = _family(family)
        asked = replace(
            asked,
            config=reading.load(config, overrides, own | flags).config,
            traffic=traffic,
            num_requests=requests or _usual_requests(usual, len(traffic)),
        )
    models = find(asked.config, head or "")
    plan = Plan(
        methods=methods_of(methods, models, has_suffix=has_suffix),
        lengths=lengths,
        loads=tuple(loads),
        temperatures=temperatures,
        num_repeats=repeats or usual.repeats,
    )
    # SIGTERM ends the engine too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command.run(asked, models, plan, typer.echo, warn, as_json=as_json)


def _usual_requests(usual: Usual, num_kinds: int) -> int:
    """Of each kind; as many in all as of a few files, where a family has many kinds of traffic."""
    return min(usual.requests, max(1, USUAL_KINDS * usual.requests // max(num_kinds, 1)))


def _family(name: str) -> tuple[dict[str, str], Mapping[str, Sequence[str]]]:
    """Its models as settings, and its traffic."""
    found = bench.family(name)
    flags = {"serving.target": str(found.target), "serving.draft": str(found.draft)}
    return flags, found.traffic


def _loads(batch: str | None, rate: str | None, arrivals: bool, usual: str) -> Sequence[Load]:
    from osd.evaluate.plan import Load, numbers, whole_numbers

    if batch is None and rate is None and not arrivals:
        batch = usual
    counts = [] if batch is None else whole_numbers(batch, "--batch")
    loads = [Load(streams=n) for n in counts]
    if rate is not None:
        loads += [Load(rate=n) for n in numbers(rate, "--rate", least=1e-3)]
    return [*loads, *[Load()] * arrivals]
