"""`osd distil`: trains a draft before there is any traffic, on the target's answers to prompts.

    prompts ─► answering.py ─► file of traces ─► train.py
               (the service, capturing everything, without a trainer)

With `--new-head` there is no draft yet: `new_head.py` makes one once the answers are there.

Training begins after the service has ended, since it may need the engine's memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from osd.common.model_directory import WEIGHTS
from osd.config.schema import Config
from osd.errors import ConfigError, OSDError
from osd.models import resolve
from osd.offline import new_head, recorded, train
from osd.offline.prompts import Asking, Prompt, read_prompts
from osd.offline.recorded import Say
from osd.records import HOLDOUT_ONE_IN


def settings(data_dir: Path) -> dict[str, Any]:
    """Keys that `osd distil` sets, whatever configuration was given: everything is captured, and
    nothing outlives the run."""
    return {
        "deployment": f"distil-{random.randrange(16**8):08x}",
        "data_dir": str(data_dir),
        "releases.dir": "",
        "buffer.redis_url": "",
        "serving.port": 0,
        "control.port": 0,
        "trainer.enabled": False,
        # Always propose, also where it does not pay: the draft learns from rejected tokens.
        "speculation.mode": "fixed",
        "speculation.proposers": ["draft"],
        "capture.enabled": True,
        "capture.accepted_fraction": 1.0,
        "capture.plain_fraction": 1.0,
        "capture.max_bytes_per_second": 1 << 40,
    }


@dataclass(frozen=True, slots=True)
class Begin:
    """With which draft to begin.

    is_new_head: with a new EAGLE-3 head, made once the target has answered; else with
        `serving.draft`
    draft_vocab: tokens that a new head may propose; None = `new_head.USUAL_SIZE`
    """

    is_new_head: bool = False
    draft_vocab: int | None = None


def run(
    load: Callable[[dict[str, Any]], Config],
    *,
    begin: Begin,
    prompts_file: Path,
    out: Path,
    keep_traces: Path | None,
    asking: Asking,
    epochs: int,
    force: bool,
    say: Say,
    warn: Say,
) -> int:
    """Record, then train. Returns the exit status.

    load: reads the configuration, with the given keys set
    """
    _check_begin(begin)
    train.check_out(out)
    if keep_traces is not None:
        recorded.check_new_file(keep_traces, "--keep-traces", force)
        if keep_traces.absolute() == out.absolute():
            raise ConfigError(f"--keep-traces: {keep_traces}: is --out as well; name another file")
    prompts = read_prompts(prompts_file)
    with train.workplace(out) as work:
        own = settings(work)
        config = load(own)
        _check_draft_given(config, begin)
        expected = len(prompts) // HOLDOUT_ONE_IN
        train.check_holdout(
            expected,
            f"--prompts: {prompts_file}: {len(prompts)} prompts: about",
            config.gate,
            force,
        )
        resolve.check_name(config.serving.target, "serving.target")  # before a draft is fetched
        size = _check_new_head(config, begin.draft_vocab) if begin.is_new_head else 0
        if begin.is_new_head:
            config = load(own | _with_stand_in(config, work))
        job = train.Job(
            config=config, draft=train.check_draft(config), out=out, epochs=epochs, force=force
        )
        traces = keep_traces or work / "traces"
        keep_head = partial(_kept_head, config, size, work, out) if begin.is_new_head else None
        where = partial(_where_kept, traces, keep_traces, out, keep_head)
        _record(config, prompts, asking, traces, out, where, say=say, warn=warn)
        if keep_traces is not None:
            say(f"traces: {keep_traces}, for `osd train`")
        with _telling(where, warn):
            read = recorded.load([traces], warn)
            if begin.is_new_head:
                job = replace(job, draft=_new_head(config, read, size, work))
            return train.train(job, read, say)


def _record(
    config: Config,
    prompts: Sequence[Prompt],
    asking: Asking,
    traces: Path,
    out: Path,
    where: Callable[[], str],
    *,
    say: Say,
    warn: Say,
) -> None:
    """Let the target answer into the file `traces`. Where it fails or is stopped, the logs are
    kept, and what the file has."""
    from osd.offline import answering  # loads torch, which the checks before do not need

    try:
        answering.record(config, prompts, asking, traces, say)
    except answering.Stopped:
        warn(f"stopped; {where()}")
        raise
    except OSDError as error:
        text = _with_logs_kept(str(error), config, out)
        if isinstance(error, answering.Incomplete):
            text += f"; {where()}"
        raise type(error)(text) from None


@contextmanager
def _telling(where: Callable[[], str], warn: Say) -> Iterator[None]:
    """Keep the traces where the body does not come to its end, and say where."""
    try:
        yield
    except OSDError as error:
        raise type(error)(f"{error}; {where()}") from None
    except BaseException as error:
        warn(f"{'stopped' if isinstance(error, KeyboardInterrupt) else 'failed'}; {where()}")
        raise


def _where_kept(
    traces: Path, keep_traces: Path | None, out: Path, keep_head: Callable[[Path], Path] | None
) -> str:
    place = kept(traces, keep_traces, out)
    told = f"{place} has what was captured"
    if keep_head is not None:
        with suppress(OSDError):  # too little was captured for a head
            told += f", {keep_head(place)} is the head to begin with"
    return f"{told}, for `osd train`"


def _kept_head(config: Config, size: int, work: Path, out: Path, traces: Path) -> Path:
    """The new head, not yet trained, in a place that outlives the run."""
    made = work / "head"
    if not (made / WEIGHTS).is_file():
        _new_head(config, recorded.load([traces], lambda line: None), size, work)
    return made.rename(train.free_name(out, "head"))


def _check_begin(begin: Begin) -> None:
    if begin.draft_vocab is not None and not begin.is_new_head:
        raise ConfigError("--draft-vocab: is of a new head; give --new-head, too, or leave it out")


def _check_draft_given(config: Config, begin: Begin) -> None:
    if not config.serving.draft and not begin.is_new_head:
        raise ConfigError(
            "--draft: is missing; give the draft to begin with, or --new-head for a new EAGLE-3 "
            "head"
        )


def _check_new_head(config: Config, draft_vocab: int | None) -> int:
    """How many tokens the new head will have. Raises `ConfigError` where there can be none."""
    if config.serving.draft:
        raise ConfigError(
            f"--new-head: makes a new draft, and serving.draft={config.serving.draft} is one to "
            "begin with; leave out one of them (serving.draft= where a file sets it)"
        )
    if config.trainer.method == "lora":
        raise ConfigError(
            "--new-head: trainer.method=lora trains adapters beside weights that stay as they are, "
            "and those of a new head know nothing yet; use trainer.method=full"
        )
    return new_head.size_for(_target(config), draft_vocab)


def _with_stand_in(config: Config, work: Path) -> dict[str, Any]:
    """Settings under which the target answers without a draft. The service still loads one, but
    nothing is proposed: a head that knows nothing would only cost time."""
    stand_in = new_head.write_stand_in(work / "stand-in", _target(config))
    return {"serving.draft": str(stand_in), "speculation.mode": "off"}


def _new_head(config: Config, read: recorded.Recorded, size: int, work: Path) -> Path:
    seed = config.trainer.seed
    return new_head.write_for(work / "head", _target(config), read.training, size=size, seed=seed)


def _target(config: Config) -> Path:
    return resolve.resolve(config.serving.target, "serving.target")


def kept(traces: Path, keep_traces: Path | None, out: Path) -> Path:
    """Where the traces of a run that failed lie: a place that outlives it."""
    if keep_traces is not None:
        return keep_traces
    return traces.rename(train.free_name(out, "traces"))


def _with_logs_kept(text: str, config: Config, out: Path) -> str:
    """The error's text, with its logs moved to a place that outlives the run."""
    logs, kept = config.data_path / "logs", train.free_name(out, "logs")
    if not logs.is_dir():
        return text
    logs.rename(kept)
    return text.replace(str(logs), str(kept))
