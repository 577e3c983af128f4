"""`osd distil --new-head` with real vLLM: prompts in, a head that fits its target out."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from osd.client.load import send
from osd.models import resolve
from osd.models.fit import check_fit
from osd.offline import recorded
from osd.offline.report import REPORT
from osd.records import PLAIN
from osd.tiny.traffic import HOME, requests
from tests.support import services
from tests.support.paths import ROOT
from tests.support.traffic import MODEL

pytestmark = pytest.mark.timeout(900)

NUM_PROMPTS = 96
DRAFT_VOCAB = 200
TARGET = "tiny-deep"
OWN = [
    "trainer.learning_rate=3.0e-3",
    "trainer.num_threads=1",
    "trainer.replay_batches=4",
    "trainer.device=cpu",
    "capture.top_k=16",
    "gate.min_holdout_traces=2",  # chance holds out few now and then
]


class Made:
    """One `osd distil --new-head` that has ended."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out, self.kept = directory, directory / "head", directory / "a.traces"
        texts = [request.prompt for request in requests(HOME, NUM_PROMPTS, seed=77)]
        prompts = directory / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
        files = ["--prompts", prompts, "--out", self.out, "--keep-traces", self.kept]
        of_a_service = services.settings("ignored", directory / "ignored", Path(TARGET), Path())
        of_a_service = [s for s in of_a_service if not s.startswith("serving.draft=")]
        head = ["--new-head", "--draft-vocab", DRAFT_VOCAB, "--max-tokens", 48]
        command = [sys.executable, "-m", "osd", "distil", *of_a_service, *OWN, *head, *files]
        self.done = subprocess.run(
            list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=800
        )
        print(self.done.stdout, self.done.stderr)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    with services.runtime_directory(tmp_path_factory.mktemp("run")):
        made = Made(tmp_path_factory.mktemp("head"))
    assert made.done.returncode == 0, made.done
    return made


def test_it_has_learnt_to_draft(made: Made) -> None:
    found = json.loads((made.out / REPORT).read_text())["eval"]
    print(f"α {found['alpha_base']:.3f} -> {found['alpha_candidate']:.3f}")
    assert found["alpha_base"] < 0.1
    assert found["alpha_candidate"] > found["alpha_base"] + 0.3
    assert min(found["alpha_candidate_per_pos"]) > 0.2, "at every depth"


def test_it_fits_its_target_and_proposes_what_was_said(made: Made) -> None:
    check_fit(resolve.resolve(TARGET, "serving.target"), made.out)
    tensors = load_file(made.out / "model.safetensors")
    ids = (torch.arange(DRAFT_VOCAB) + tensors["d2t"]).tolist()
    read = recorded.load([made.kept], print)
    said = Counter(int(i) for trace in read.training for i in trace.output_ids)
    assert {i for i, _ in said.most_common(50)} <= set(ids)


def test_the_target_answered_alone_and_every_place_has_a_row(made: Made) -> None:
    read = recorded.load([made.kept], print)
    assert len(read.training) + len(read.holdout) == NUM_PROMPTS
    for trace in [*read.training, *read.holdout]:
        assert trace.num_rows == len(trace.output_ids)
        assert (trace.kind == PLAIN).all(), "nothing was proposed"


@pytest.mark.slow
def test_a_service_begins_with_it(made: Made, tmp_path: Path) -> None:
    """And serves as the replay of held-out answers promised."""
    run = tmp_path / "run"
    run.mkdir()
    own = services.settings("new-head", tmp_path, Path(TARGET), made.out)
    questions = [request.prompt for request in requests(HOME, 24, seed=991)]
    bodies: list[dict[str, object]] = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 48,
            "temperature": 0,
        }
        for text in questions
    ]
    with (
        services.runtime_directory(run),
        services.supervised([*own, "speculation.proposers=[draft]", "trainer.enabled=false"]) as on,
    ):
        answers = asyncio.run(send(on.url, bodies, streams=8))
        page = httpx.get(f"{on.url}/metrics").text
    assert [answer.error for answer in answers if not answer.ok] == []
    accepted = counts(page, "accepted_tokens_per_pos_total")
    num_tested = sum(counts(page, "drafts_total")) + sum(accepted[:-1])
    found = json.loads((made.out / REPORT).read_text())["eval"]
    print(f"α {sum(accepted) / num_tested:.3f} live, {found['alpha_candidate']:.3f} replayed")
    assert sum(accepted) / num_tested == pytest.approx(found["alpha_candidate"], abs=0.2)


def counts(page: str, name: str) -> list[float]:
    """The values of one of vLLM's series of speculation, by position."""
    return [float(n) for n in re.findall(rf"^vllm:spec_decode_num_{name}{{.*}} (\S+)$", page, re.M)]


def test_nothing_else_is_left(made: Made) -> None:
    assert set(os.listdir(made.directory)) == {"prompts.jsonl", "head", "a.traces"}
