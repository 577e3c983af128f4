"""`osd evaluate`: reads the data, lets one engine after the other do the runs that are missing, and
says what all of them say.

    data ─► requests ─► for each engine: a process (`child.py`) ─► runs/*.json ─► table, report
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from osd.common.files import replace_file
from osd.common.machine import describe
from osd.common.progress import Advance, stages
from osd.config.schema import Config
from osd.config.secrets import without_secrets
from osd.config.serving import argument
from osd.errors import ConfigError, OSDError
from osd.evaluate.bound.own import Bound, bounds
from osd.evaluate.drive import arrivals
from osd.evaluate.engines import Job, options_of
from osd.evaluate.figures import Figures, figures_of
from osd.evaluate.forms import Question
from osd.evaluate.models import fitted
from osd.evaluate.plan import AUTO, DRAFT, MEMORY, SUFFIX, Load, Models, Plan, Planned
from osd.evaluate.report import html
from osd.evaluate.requests import built_in_traffic, choose, encode, questions_of, stop_tokens
from osd.evaluate.runs import Directory, Request, writing
from osd.evaluate.success import Success, successes
from osd.evaluate.table import table
from osd.models import built_in
from osd.models.compatibility import context_length, read_config
from osd.models.resolve import check_name, fingerprint

if TYPE_CHECKING:
    from trainer.draft import Draft

Say = Callable[[str], None]
OPEN_LOOP_SEQS = 64
"""Requests that run at once where they come at times of their own."""
BUILT_IN_VLLM = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 512,
}
"""What engines of the built-in targets and of a bench's family are given, unless told otherwise."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
LOGS = "logs"
USUAL_CONTEXT = 4096
"""Where the target's configuration does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is asked for.

    Example:
        Asked(config=config, data=(forms.read(Path("gsm8k.jsonl")),), traffic={},
              num_requests=32, max_tokens=128, seed=0, out=None)
    """

    config: Config
    data: tuple[Sequence[Question], ...]
    """Of each file."""
    traffic: Mapping[str, Sequence[str]]
    """Kind -> prompts, where there is no data; {} = that of a built-in target."""
    num_requests: int
    """Of each file."""
    max_tokens: int
    seed: int
    out: Path | None

    @property
    def directory(self) -> Path:
        """Of the runs."""
        return self.out or Path(f"evaluation-{Path(self.config.serving.target).name}")


def check(asked: Asked, methods: Sequence[str], loads: Sequence[Load], *, is_family: bool) -> None:
    """Raise `ConfigError` for what is wrong whatever the models are, which may yet have to be
    fetched or built. `is_family`: the traffic of a bench's family comes with its models."""
    serving = asked.config.serving
    if not is_family:
        check_name(serving.target, "serving.target")
    for method in (MEMORY, SUFFIX, AUTO):
        if method in methods and argument(serving.vllm, "async_scheduling"):
            raise ConfigError(
                f"--methods: {method} cannot be measured with serving.vllm.async_scheduling=true; "
                "leave one of them out"
            )
    if not asked.data and not is_family and serving.target not in built_in.TARGETS:
        raise ConfigError("--data: is missing; give files of requests (JSON lines)")
    chosen = choose(asked.data, asked.num_requests, asked.seed)
    for load in loads:
        arrivals(load, chosen)  # which fails where the data does not tell them
    if asked.directory.exists() and not asked.directory.is_dir():
        raise ConfigError(f"--out: {asked.directory}: is a file; give a directory")


def has_suffix() -> bool:
    """Whether what vLLM's suffix decoding needs is installed."""
    return importlib.util.find_spec("arctic_inference") is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the runs say.

    Example:
        Found(figures=figures, bounds=[], successes=[])
    """

    figures: list[Figures]
    bounds: list[Bound]
    successes: list[Success]
    """Of the draft model."""


class Evaluation:
    """One evaluation, from the data to the report."""

    def __init__(self, asked: Asked, models: Models, plan: Plan, warn: Say) -> None:
        self._asked, self._models, self._plan, self._warn = asked, models, plan, warn
        serving = asked.config.serving
        own = BUILT_IN_VLLM if serving.target in built_in.TARGETS or asked.traffic else {}
        given = {name.replace("-", "_"): value for name, value in serving.vllm.items()}
        self._vllm = {**own, **given}
        self._env = (ONE_THREAD if own else {}) | serving.env
        self._stop_token_ids = stop_tokens(models.target)
        self.settings: dict[str, Any] = {}
        self.directory = Directory(asked.directory)

    def run(self) -> Found:
        """Do what is missing. Returns what all runs say."""
        requests = self._requests()
        self.settings = self._settings(requests)
        self.directory.open(self.settings, requests)
        try:
            self._measure_missing()
        except KeyboardInterrupt:
            self._warn(f"stopped; the same command goes on with the runs in {self.directory.path}")
            raise
        return self._found(requests)

    def measured(self) -> dict[str, Any]:
        """On what, and with which settings."""
        machine = describe()
        versions = machine.pop("versions")
        return {"target": self._asked.config.serving.target, **machine, **versions, **self.settings}

    def _found(self, requests: Sequence[Request]) -> Found:
        """In the runs that are asked for now."""
        planned = [one for engine in self._plan.engines for one in self._plan.runs(engine)]
        runs = [self.directory.read(one) for one in planned]
        draft = self._replayable_draft()
        return Found(
            figures=figures_of(runs, requests),
            bounds=bounds(runs, requests, self._plan.loads, draft),
            successes=successes(runs, requests, draft) if draft is not None else [],
        )

    def _replayable_draft(self) -> Draft | None:
        """The draft model, for replays. One that cannot be read costs no figure that was
        measured."""
        if DRAFT not in self._plan.methods:
            return None
        from trainer.draft import load_draft

        try:
            return load_draft(self._fitted_draft())
        except OSDError as error:
            self._warn(f"{error}: success by k is left out, and the draft in the upper bound")
            return None

    def _fitted_draft(self) -> Path:
        assert self._models.draft is not None, "without one the method is refused"
        path = self.directory.path / "draft"
        with writing(path):
            return fitted(self._models.draft, self._models.target, path)

    # -- requests ---------------------------------------------------------------------------------

    def _requests(self) -> list[Request]:
        asked = self._asked
        data = asked.data or questions_of(asked.traffic or built_in_traffic())
        chosen = choose(data, asked.num_requests, asked.seed)
        requests, num_left_out = encode(
            chosen, self._models.target, max_tokens=asked.max_tokens, context=self._context()
        )
        if num_left_out:
            why = "are empty or do not fit the context"
            self._warn(f"{num_left_out} requests {why}, and are left out")
        return requests

    def _context(self) -> int:
        own = context_length(read_config(self._models.target)) or USUAL_CONTEXT
        given = self._vllm.get("max_model_len")
        return given if isinstance(given, int) and given > 0 else own

    def _settings(self, requests: Sequence[Request]) -> dict[str, Any]:
        """What must be the same for runs to be compared."""
        models = self._models
        digest = hashlib.sha256(msgspec.json.encode(requests)).hexdigest()[:16]
        return {
            "target": fingerprint(models.target),
            "draft": fingerprint(models.draft) if models.draft else None,
            "head": fingerprint(models.head) if models.head else None,
            "requests": f"{len(requests)} ({digest})",
            "max_tokens": self._asked.max_tokens,
            "vllm": without_secrets(self._vllm),
            **self._drawing(),
            "env": without_secrets(self._env),
        }

    def _drawing(self) -> dict[str, Any]:
        """How drafts pick their tokens, where not greedily."""
        how = self._asked.config.speculation
        return {"draft_sample_method": how.draft_sample_method} if how.is_sampled else {}

    # -- engines ----------------------------------------------------------------------------------

    def _measure_missing(self) -> None:
        with stages() as begin:
            for engine in self._plan.engines:
                missing = self.directory.missing(list(self._plan.runs(engine)))
                if missing:
                    advance = begin(f"engine for {engine}", len(missing), "runs")
                    self._measure(engine, missing, advance)

    def _measure(self, engine: str, missing: Sequence[Planned], advance: Advance) -> None:
        path, models = self.directory.path, self._models
        if models.draft is not None:
            models = replace(models, draft=self._fitted_draft())
        job = Job(
            engine=engine,
            directory=str(path),
            options=options_of(
                *(engine, models, max(self._plan.lengths), self._num_seqs(), self._vllm),
                **self._drawing(),
            ),
            stop_token_ids=self._stop_token_ids,
            runs=tuple(asdict(one) for one in missing),
        )
        file, log = path / LOGS / f"{engine}.job.json", path / LOGS / f"{engine}.log"
        with writing(file):
            file.parent.mkdir(exist_ok=True)
            replace_file(file, msgspec.json.encode(job))
        run_child([str(file), str(self._models.target)], self._env, log, advance)

    def _num_seqs(self) -> int:
        streams = [load.streams or OPEN_LOOP_SEQS for load in self._plan.loads]
        return max(streams)


def run_child(arguments: Sequence[str], env: dict[str, str], log: Path, advance: Advance) -> None:
    """The runs of one engine, in a process of its own. Raises `OSDError` where it fails."""
    command = [sys.executable, "-m", "osd.evaluate.child", *arguments]
    environment = environment_of({**os.environ, **env})
    problem = ""
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                told = json.loads(line)
                if "error" in told:
                    problem = told["error"]
                else:
                    advance(1, f"{told['arm']}, {told['load']}: {told['speed']:.0f} tokens/s")
        finally:
            child.terminate()
    if problem:
        raise OSDError(problem)
    if child.returncode:
        raise OSDError(
            f"the engine ended with status {child.returncode}: {_last_line(log)}; see {log}"
        )


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """Of an engine's process. vLLM's n-gram lookup is compiled by numba, which sets OpenMP's number
    of threads to its own; vLLM's kernels, which have begun with another, then wait for ever."""
    found = {"VLLM_LOGGING_LEVEL": "WARNING", **given}
    found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is asked between steps
    if threads := given.get("OMP_NUM_THREADS"):
        found.setdefault("NUMBA_NUM_THREADS", threads)
    return found


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it said nothing"


def run(asked: Asked, models: Models, plan: Plan, say: Say, warn: Say, *, as_json: bool) -> None:
    """Measure, print the table, and write it beside the runs."""
    evaluation = Evaluation(asked, models, plan, warn)
    found = evaluation.run()
    path = evaluation.directory.path
    tree = json.dumps(asdict(found), indent=2)
    report = html(found.figures, found.bounds, found.successes, evaluation.measured())
    with writing(path):
        replace_file(path / "figures.json", tree.encode() + b"\n")
        replace_file(path / "report.html", report.encode())
    told = table(found.figures, found.bounds, found.successes)
    say(tree if as_json else f"{told}\nreport: {path / 'report.html'}")
