"""`osd train --pool`: drafts that make up for one another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osd.config import reading
from osd.control import policy
from osd.errors import ConfigError
from osd.offline import pool
from osd.offline.recorded import Recorded
from osd.offline.report import REPORT
from osd.offline.train import Job, check_draft
from osd.records import Trace
from tests.support.heads import write_head
from tests.support.served_targets import served_target
from tests.support.tiny_drafts import chain_traces, save_draft, tiny_llama
from tests.unit.osd.offline.test_train import SETTINGS, write
from trainer.draft import load_draft
from trainer.evaluate import is_match

SLOWLY = [*SETTINGS, "trainer.learning_rate=3.0e-3", "trainer.replay_batches=8"]
USUAL = chain_traces(64)
RARE = chain_traces(16, start=100, step=13)
HELD_OUT = [
    *chain_traces(12, start=500, holdout=True),
    *chain_traces(12, start=600, holdout=True, step=13),
]


class Pool:
    """One `osd train --pool` in a directory of its own, and what it said."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory, directory / "pool"
        self.draft, self.said = save_draft(directory / "draft"), list[str]()

    def __call__(
        self, num: int, traces: list[Trace], *, epochs: int = 1, force: bool = False
    ) -> int:
        config = reading.load(None, SLOWLY, {"serving.draft": str(self.draft)}, {}).config
        job = Job(
            config=config, draft=check_draft(config), out=self.out, epochs=epochs, force=force
        )
        file = write(self.directory / "a.traces", traces)
        return pool.run(job, num, [file], self.said.append, self.said.append)

    def report(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / str(number) / REPORT).read_text())
        return found

    def learnt_from(self, number: int) -> int:
        return int(self.report(number)["num_training_traces"])


@pytest.fixture
def train(tmp_path: Path) -> Pool:
    return Pool(tmp_path)


def test_each_draft_learns_what_those_before_it_do_not_reproduce(train: Pool) -> None:
    assert train(2, USUAL + RARE + HELD_OUT) == 0
    assert sorted(os.listdir(train.out)) == ["1", "2"]
    first = load_draft(train.out / "1")
    shares = [is_match(first, trace, 64).mean() for trace in USUAL + RARE]
    assert train.learnt_from(1) == len(USUAL + RARE)
    assert train.learnt_from(2) == sum(share < pool.REPRODUCED for share in shares) > 0
    assert train.report(1)["draft"] == train.report(2)["draft"] == str(train.draft)
    together = [float(line.split()[6]) for line in train.said if "together propose" in line]
    held = np.concatenate([is_match(first, trace, 64)[0] for trace in HELD_OUT])
    assert together[0] == pytest.approx(held.mean(), abs=0.001)
    assert together[1] > together[0] + 0.03


def test_nine_tokens_in_ten_are_enough_to_reproduce_an_answer(train: Pool) -> None:
    """Of 10 tokens that are asked of the draft, and of 5, all but the last are its own."""
    model = tiny_llama()

    def answered(num: int) -> Trace:
        ids = [5, 9, 2]
        for _ in range(num + 1):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return Trace.of_text(ids[:3], [*ids[3:-1], ids[-1] ^ 1], trace_id=str(num))

    config = reading.load(None, SLOWLY, {"serving.draft": str(train.draft)}, {}).config
    job = Job(config=config, draft=train.draft, out=train.draft, epochs=1, force=False)
    given = Recorded("target-a", [answered(10), answered(5)], [answered(10)])
    left = pool._without_reproduced(job, given)
    assert [trace.trace_id for trace in left.training] == ["5"] and not left.holdout


def test_a_pool_ends_where_nothing_is_left(train: Pool) -> None:
    assert train(3, USUAL + HELD_OUT[:12]) == 0
    assert train.said[-1] == "the pool ends with 1 of 3 drafts: nothing is left to learn"
    assert os.listdir(train.out) == ["1"]


def test_a_pool_ends_where_another_draft_would_be_the_same(
    train: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "REPRODUCED", 1.1)
    assert train(3, USUAL + HELD_OUT[:12]) == 0
    assert train.said[-1].endswith("1 of 3 drafts: another would learn from the same answers")


def test_a_pool_ends_where_too_little_is_held_out_to_judge_the_next(train: Pool) -> None:
    assert train(2, USUAL + RARE + HELD_OUT[:12]) == 0
    assert train.said[-1].endswith(
        "0 held-out traces are left to judge by, see gate.min_holdout_traces"
    )
    assert os.listdir(train.out) == ["1"]


def test_by_force_the_next_is_trained_though_too_little_is_held_out(train: Pool) -> None:
    assert train(2, USUAL + RARE + HELD_OUT[:12], force=True) == 0
    assert sorted(os.listdir(train.out)) == ["1", "2"]


def test_a_draft_that_is_not_better_ends_the_pool(
    train: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "should_publish", lambda *_, **__: policy.Decision(False, "worse"))
    assert train(2, USUAL + HELD_OUT) == 1
    assert os.listdir(train.out) == ["1.refused"]


def test_where_the_first_draft_cannot_be_trained_nothing_is_left_behind(train: Pool) -> None:
    with pytest.raises(ConfigError, match="gate.min_holdout_traces=4 are needed to judge"):
        train(2, USUAL)
    assert not train.out.exists()


def test_what_is_there_already_and_heads_are_refused(train: Pool, tmp_path: Path) -> None:
    train.out.mkdir()
    with pytest.raises(ConfigError, match="exists already; name a new directory"):
        train(2, USUAL)
    train.out.rmdir()
    train.draft = write_head(tmp_path / "head", served_target(tmp_path / "target"))
    config = reading.load(
        None,
        [*SETTINGS, f"serving.target={tmp_path / 'target'}"],
        {"serving.draft": str(train.draft)},
        {},
    ).config
    job = Job(config=config, draft=train.draft, out=train.out, epochs=1, force=False)
    with pytest.raises(ConfigError, match="--pool 2: .* is a head, and a pool is of draft models"):
        pool.run(job, 2, [], print, print)
    assert not train.out.exists()
