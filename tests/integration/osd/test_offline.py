"""`osd distil` with real vLLM, and `osd traces export` of its service: one start for both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from osd.client.http import Client
from osd.client.load import send
from osd.config import reading
from osd.offline import recorded, train
from osd.offline.report import REPORT
from osd.records import Trace
from osd.releases.store import ReleaseStore
from osd.service.note import Running, find_all
from osd.service.reaper import running
from tests.support import services
from tests.support.pairs import Pair
from tests.support.paths import ROOT
from tests.support.processes import command_line
from tests.support.services import status, wait_until
from tests.support.traffic import MODEL, ids_of, prompt_texts

pytestmark = pytest.mark.timeout(900)

PROMPTS = prompt_texts(12, seed=5) * 16
"""Few different ones, so that a small draft learns them within seconds."""
TOO_LONG = " ".join(["t30"] * 300)


class Distilled:
    """One `osd distil` that has ended, and what was exported while it ran."""

    def __init__(self, directory: Path, pair: Pair) -> None:
        self.directory, self.out = directory, directory / "draft-0"
        self.kept, self.exported = directory / "kept.traces", directory / "exported.traces"
        requests: list[dict[str, object]] = [{"prompt": text, "domain": "sql"} for text in PROMPTS]
        requests.append({"messages": [{"role": "user", "content": "t30 t31"}], "max_tokens": 3})
        requests.append({"prompt": TOO_LONG})
        (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, requests)))
        self.log = directory / "log"
        with self.log.open("w") as log:
            process = subprocess.Popen(
                self.command(pair), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
            try:
                self.export(process)
                self.status = process.wait(300)
            finally:
                process.kill()
                process.wait()

    def command(self, pair: Pair) -> list[str]:
        of_a_service = services.settings(
            "ignored", self.directory / "ignored", pair.target, pair.stranger
        )
        options = {
            "prompts": self.directory / "prompts.jsonl",
            "out": self.out,
            "keep-traces": self.kept,
        }
        flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        own = ["trainer.max_length=256", "trainer.num_threads=1", "capture.top_k=16"]
        command = [sys.executable, "-m", "osd", "distil"]
        return [*command, *of_a_service, *own, *flags, "--max-tokens", "40"]

    def export(self, process: subprocess.Popen[bytes]) -> None:
        """As soon as some are stored, as another command would."""

        def note() -> Running | None:
            assert process.poll() is None, self.log.read_text()
            return next((r for r in find_all() if r.pid == process.pid), None)

        found = wait_until(note, 300, "the service of `osd distil` is ready")
        self.deployment = found.deployment

        def is_some_stored() -> bool:
            held = status(found.control_url).get("buffer") or {"num_traces": 0, "num_holdout": 0}
            return bool(held["num_traces"] > 10 and held["num_holdout"])

        wait_until(is_some_stored, 60, "traces are stored")
        # It must not end, and empty its buffer, before all is looked at.
        os.kill(process.pid, signal.SIGSTOP)
        try:
            self.look(found)
        finally:
            os.kill(process.pid, signal.SIGCONT)

    def look(self, found: Running) -> None:
        body = {"model": MODEL, "prompt": "t30 t31", "max_tokens": 5, "ignore_eos": True}
        own = {"vllm_xargs": {"osd_capture": "off"}}
        (self.completion,) = asyncio.run(send(found.service_url, [body | own], streams=1))
        recorded.export(
            Client(found.control_url, token=found.token), self.exported, force=False, say=print
        )


@pytest.fixture(scope="module")
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with services.runtime_directory(tmp_path_factory.mktemp("run")) as path:
        yield path


@pytest.fixture(scope="module")
def distilled(
    pair: Pair, runtime_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Distilled:
    started = time.monotonic()
    distilled = Distilled(tmp_path_factory.mktemp("distil"), pair)
    print(f"osd distil took {time.monotonic() - started:.1f} s:\n{distilled.log.read_text()}")
    assert distilled.status == 0, distilled.log.read_text()
    return distilled


def traces_in(file: Path) -> list[Trace]:
    said: list[str] = []
    loaded = recorded.load([file], said.append)
    assert said == []
    return loaded.training + loaded.holdout


def test_the_draft_is_better_and_can_be_released(distilled: Distilled, tmp_path: Path) -> None:
    report = json.loads((distilled.out / REPORT).read_text())
    print(f"α {report['eval']['alpha_base']:.3f} -> {report['eval']['alpha_candidate']:.3f}")
    assert report["eval"]["alpha_candidate"] > report["eval"]["alpha_base"] + 0.3
    release = ReleaseStore(tmp_path).publish(distilled.out, parent=0, target_id=report["target_id"])
    ReleaseStore(tmp_path).verify(release)
    assert "(80 % interval +" in distilled.log.read_text()


def test_every_prompt_but_the_one_too_long_left_a_row_at_every_position(
    distilled: Distilled,
) -> None:
    traces = traces_in(distilled.kept)
    assert len(traces) == len(PROMPTS) + 1
    said = f"prompts: {len(traces)} answered, 1 longer than the context, skipped"
    assert said in distilled.log.read_text()
    assert sorted({trace.domain for trace in traces}) == ["", "sql"]
    for trace in traces:
        num_prompt = len(trace.prompt_ids)
        assert trace.position.tolist() == list(
            range(num_prompt, num_prompt + len(trace.output_ids))
        )
        assert (trace.keep_prob == 1).all()
        assert np.array_equal(trace.target_ids[:, 0], trace.output_ids), (
            "temperature 0: what was served is the argmax"
        )
    (short,) = (trace for trace in traces if not trace.domain)
    assert len(short.output_ids) <= 3


def test_what_was_exported_meanwhile_is_a_part_of_what_was_kept(distilled: Distilled) -> None:
    exported, kept = traces_in(distilled.exported), traces_in(distilled.kept)
    assert len(exported) > 10
    by_id = {trace.trace_id: trace for trace in kept}
    for trace in exported:
        assert np.array_equal(trace.output_ids, by_id[trace.trace_id].output_ids)
        assert np.array_equal(trace.target_logprobs, by_id[trace.trace_id].target_logprobs)
    for file in (distilled.kept, distilled.exported):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_target_without_a_chat_template_would_be_asked_to_go_on(distilled: Distilled) -> None:
    assert distilled.completion.error == ""
    assert len(distilled.completion.token_ids) == 5
    special = (0, 1)  # are not part of the text
    shown = [i for i in distilled.completion.token_ids if i not in special]
    assert ids_of(distilled.completion.text) == shown


def test_training_on_the_kept_traces_gives_such_a_draft_again(
    distilled: Distilled, pair: Pair, tmp_path: Path
) -> None:
    settings = ["trainer.learning_rate=5.0e-3", "trainer.device=cpu", "gate.min_holdout_traces=4"]
    config = reading.load(None, [*settings, f"serving.draft={pair.stranger}"]).config
    job = train.Job(
        config=config, draft=pair.stranger, out=tmp_path / "again", epochs=1, force=False
    )
    said: list[str] = []
    assert train.run(job, [distilled.kept, distilled.exported], said.append, said.append) == 0
    assert f", {len(traces_in(distilled.exported))} repeated left out; target " in said[0]
    report = json.loads((tmp_path / "again" / REPORT).read_text())
    assert report["eval"]["alpha_candidate"] > report["eval"]["alpha_base"] + 0.3
    assert report["num_damaged"] == 0


def test_nothing_else_is_left(distilled: Distilled, runtime_directory: Path) -> None:
    expected = {"prompts.jsonl", "log", "draft-0", "kept.traces", "exported.traces"}
    assert set(os.listdir(distilled.directory)) == expected
    assert os.listdir(runtime_directory) == []
    own = [p for p in running() if str(distilled.directory) in command_line(p)]
    assert own == []
