"""The process of one engine: `python -m osd.evaluate.child JOB.json` does the runs of the job and
keeps each in its file.

It writes a line of JSON to standard output for each run: {"run": FILE, "tokens_per_second": ...},
and {"error": ...} where it can say in one line what is wrong. All else goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from osd.errors import OSDError
from osd.evaluate.drive import Drive, Driver
from osd.evaluate.engines import Job, plan_of
from osd.evaluate.plan import Arm, Load, Planned
from osd.evaluate.recorder import Seen
from osd.evaluate.runs import Counters, Directory, Run, write
from serving.vllm.in_process import EngineInProcess
from serving.vllm.schedules import why_no_none
from serving.vllm.server import prepare_environment

WARM_UP = 3
"""Requests that each arm serves before anything counts."""


class Measured:
    """An engine that can be put into each arm."""

    def __init__(self, target: str, options: dict[str, Any]) -> None:
        self._engine = EngineInProcess(target, options)
        if reason := why_no_none(self._engine.scheduler.vllm_config):
            remedy = "give serving.vllm.compilation_config.cudagraph_mode=PIECEWISE"
            raise OSDError(f"{reason}; {remedy}")
        self._engine.rpc("osd_measure")
        self.add, self.step = self._engine.add, self._engine.step
        self._so_far = Counters()

    def take(self) -> Seen:
        """What the scheduler saw of the newest step."""
        seen: Seen = self._engine.scheduler.take()
        return seen

    def begin(self, arm: Arm) -> None:
        """From now on every step follows the arm. Nothing is remembered of earlier runs."""
        self._command("forget")
        self._engine.rpc("osd_forget")
        self._command("force", list(plan_of(arm) or ()))
        self.parts()
        self.counters()

    def parts(self) -> list[list[float]]:
        """Of the steps since this was last asked."""
        found: list[list[float]] = json.loads(self._engine.rpc("osd_measured"))
        return found

    def counters(self) -> Counters:
        """What vLLM has counted since this was last asked."""
        found = self._engine.speculation()
        now = Counters(
            num_drafts=found.get("drafts", 0),
            num_draft_tokens=found.get("draft_tokens", 0),
            num_accepted_tokens=found.get("accepted_tokens", 0),
            accepted_per_position=tuple(found.get("accepted_tokens_per_pos", ())),
        )
        before, self._so_far = self._so_far, now
        return since(before, now)

    def check(self) -> None:
        """Raise `OSDError` where the control has ended: no arm is in force since then."""
        if problem := self._command("report")["problem"]:
            raise OSDError(f"the control of speculation has ended, and arms with it: {problem}")

    def _command(self, name: str, argument: Any = None) -> Any:
        return json.loads(self._engine.scheduler.osd_command(name, json.dumps(argument)))


def since(before: Counters, now: Counters) -> Counters:
    """How far counters have gone on."""
    earlier = before.accepted_per_position or (0,) * len(now.accepted_per_position)
    pairs = zip(now.accepted_per_position, earlier, strict=True)
    return Counters(
        num_drafts=now.num_drafts - before.num_drafts,
        num_draft_tokens=now.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=now.num_accepted_tokens - before.num_accepted_tokens,
        accepted_per_position=tuple(new - old for new, old in pairs),
    )


def work(job: Job, target: str) -> None:
    """All runs of a job."""
    directory = Directory(Path(job.directory))
    requests = directory.requests()
    planned = [msgspec.convert(one, Planned) for one in job.runs]
    engine, started = Measured(target, job.options), uuid.uuid4().hex
    arms = dict.fromkeys(one.arm for one in planned)
    for arm in arms:
        engine.begin(arm)
        some = requests[:WARM_UP]
        Driver(
            engine, some, Load(streams=2), temperature=0.0, stop_token_ids=job.stop_token_ids
        ).run()
    for one in planned:
        engine.begin(one.arm)
        driver = Driver(
            engine,
            requests,
            one.load,
            temperature=one.temperature,
            stop_token_ids=job.stop_token_ids,
        )
        run = _run(one, started, driver.run(), engine)
        engine.check()
        write(directory.file(one), run)
        speed = run.num_tokens / run.seconds
        tell({"run": one.file, "arm": one.arm.name, "load": one.load.name, "speed": speed})


def _run(planned: Planned, started: str, found: Drive, engine: Measured) -> Run:
    steps, parts = found.steps, engine.parts()
    computed = [i for i, step in enumerate(steps) if step.width]
    if len(parts) >= len(computed):  # the last ones are of the step that ran nothing
        told = dict(zip(computed, parts[: len(computed)], strict=True))
        steps = tuple(
            msgspec.structs.replace(step, parts=tuple(told[i])) if i in told else step
            for i, step in enumerate(steps)
        )
    return Run(
        engine=planned.engine,
        method=planned.arm.method,
        k=planned.arm.k,
        load=planned.load.name,
        temperature=planned.temperature,
        repeat=planned.repeat,
        started=started,
        seconds=found.seconds,
        steps=steps,
        requests=found.requests,
        counters=engine.counters(),
    )


def tell(message: dict[str, Any]) -> None:
    """A line to who started this process."""
    os.write(TOLD, json.dumps(message).encode() + b"\n")


TOLD = 1
"""Where messages go."""


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    global TOLD
    TOLD = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no message
    file, target = arguments
    prepare_environment()
    job = msgspec.json.decode(Path(file).read_bytes(), type=Job)
    try:
        work(job, target)
    except OSDError as error:
        tell({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
