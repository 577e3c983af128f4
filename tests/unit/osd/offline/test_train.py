"""`osd train` on generated traces: its result, its verdict, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffers.codec import encode_trace
from buffers.trace_file import write_traces
from osd.config import reading
from osd.errors import ConfigError, OSDError
from osd.models import resolve
from osd.offline import recorded
from osd.offline.prompts import read_prompts
from osd.offline.report import REPORT
from osd.offline.train import Job, check_draft, run
from osd.records import Trace
from tests.support.heads import write_head
from tests.support.served_targets import served_target
from tests.support.starving import MemoryFor
from tests.support.tiny_drafts import TARGET_ID, VOCAB_SIZE, after, chain_traces, save_draft
from trainer.batch import TrainBatch
from trainer.distiller import Distiller
from trainer.draft import load_draft
from trainer.evaluate import replay

SETTINGS = [
    "trainer.device=cpu",
    "trainer.learning_rate=1.0e-2",
    "trainer.warmup_steps=2",
    "trainer.max_length=64",
    "trainer.replay_batches=3",
    "gate.min_holdout_traces=4",
]
TRAINING = chain_traces(64)
HELD_OUT = chain_traces(12, start=500, holdout=True)


def write(path: Path, traces: list[Trace], target_id: str = TARGET_ID) -> Path:
    with write_traces(path, target_id) as file:
        for trace in traces:
            file.add(encode_trace(trace))
    return path


class Run:
    """One `osd train` in a directory of its own, and what it said."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory, directory / "new"
        self.draft = save_draft(directory / "draft")
        self.said: list[str] = []
        self.warned: list[str] = []

    def __call__(
        self, *files: Path, epochs: int = 2, force: bool = False, settings: tuple[str, ...] = ()
    ) -> int:
        config = reading.load(
            None, [*SETTINGS, *settings], {"serving.draft": str(self.draft)}, {}
        ).config
        job = Job(
            config=config, draft=check_draft(config), out=self.out, epochs=epochs, force=force
        )
        return run(job, files, self.said.append, self.warned.append)

    def names(self) -> set[str]:
        """What lies in the directory now, beside draft and traces."""
        return {name for name in os.listdir(self.directory) if not name.endswith(".traces")} - {
            "draft"
        }


@pytest.fixture
def train(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def umask_of_groups() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def alpha(directory: Path, traces: list[Trace]) -> float:
    value = replay(load_draft(directory), traces, 4, max_length=64).alpha
    assert value is not None
    return value


# Student sampling


def test_the_draft_also_learns_from_its_own_text_where_the_target_is_there(
    train: Run, tmp_path: Path
) -> None:
    target = save_draft(tmp_path / "target", seed=3, scale=0.3)
    target_id = resolve.fingerprint(target)
    traces = [replace(trace, target_id=target_id) for trace in TRAINING + HELD_OUT]
    file = write(tmp_path / "a.traces", traces, target_id)
    settings = (f"serving.target={target}", "trainer.sampling=mixed")
    assert train(file, epochs=1, settings=settings, force=True) == 0
    report = json.loads((train.out / REPORT).read_text())
    assert report["num_student_traces"] == 64 * 4 / 2, "traces, replay, share"
    assert 0 < report["sampling_cpu_s"] < report["seconds"]
    assert 0 < report["scoring_cpu_s"] < report["seconds"]


def test_student_sampling_without_the_target_or_with_another_is_refused(
    train: Run, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    with pytest.raises(ConfigError, match="trainer.sampling=student: needs the target that the"):
        train(file, settings=("trainer.sampling=student",))
    other = save_draft(tmp_path / "other", seed=4)
    settings = (f"serving.target={other}", "trainer.sampling=student")
    with pytest.raises(ConfigError, match=f"and the traces were recorded from {TARGET_ID}; give"):
        train(file, settings=settings)
    assert not train.out.exists()


# Heads


def test_a_head_is_trained_with_the_target_of_its_traces_and_stays_of_its_form(
    train: Run, tmp_path: Path
) -> None:
    target = served_target(tmp_path / "target")
    train.draft = write_head(tmp_path / "head", target, draft_vocab_size=40)
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    with pytest.raises(ConfigError, match="is a head, which learns from .*; set serving.target"):
        train(file)
    other = served_target(tmp_path / "other", hidden_size=48)
    with pytest.raises(
        ConfigError, match="reads hidden states of 32 numbers, the target's have 48"
    ):
        train(file, settings=(f"serving.target={other}",))
    given = f"serving.target={target}"
    with pytest.raises(ConfigError, match="trainer.sampling=mixed: an EAGLE-3 head learns from"):
        train(file, settings=(given, "trainer.sampling=mixed"))
    with pytest.raises(ConfigError, match=f"recorded from {TARGET_ID}; give that one$"):
        train(file, settings=(given,))
    target_id = resolve.fingerprint(target)
    traces = [replace(trace, target_id=target_id) for trace in TRAINING + HELD_OUT]
    ours = write(tmp_path / "b.traces", traces, target_id)
    assert train(ours, epochs=1, settings=(given,), force=True) == 0
    before, after = (load_file(path / "model.safetensors") for path in (train.draft, train.out))
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {
        n: (t.dtype, t.shape) for n, t in after.items()
    }
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "fc.weight" in moved and not moved & {"d2t", "t2d"}
    kept = [(path / "config.json").read_bytes() for path in (train.draft, train.out)]
    assert kept[0] == kept[1]


# What it makes


@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_makes_a_better_draft_that_stands_alone(train: Run, tmp_path: Path, method: str) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    assert train(file, settings=(f"trainer.method={method}",)) == 0
    unseen = chain_traces(30, start=900)
    before, after = alpha(train.draft, unseen), alpha(train.out, unseen)
    print(f"α on traces it never saw: {before:.3f} -> {after:.3f}")
    assert after > before + 0.5
    assert train.names() == {"new"}
    assert set(os.listdir(train.draft)) | {REPORT} == set(os.listdir(train.out))


def test_what_it_says_and_reports_is_what_a_replay_of_the_draft_gives(
    train: Run, tmp_path: Path
) -> None:
    train(write(tmp_path / "a.traces", TRAINING + HELD_OUT))
    report = json.loads((train.out / REPORT).read_text())
    before, after = alpha(train.draft, HELD_OUT), alpha(train.out, HELD_OUT)
    assert report["eval"]["alpha_base"] == pytest.approx(before)
    assert report["eval"]["alpha_candidate"] == pytest.approx(after)
    assert (report["is_better"], report["epochs"], report["target_id"]) == (True, 2, TARGET_ID)
    assert (report["num_training_traces"], report["num_holdout_traces"]) == (64, 12)
    assert report["loss_last"] < report["loss_first"] / 2
    low, high = report["eval"]["diff_low"], report["eval"]["diff_high"]
    assert train.said[0] == f"traces: 64 to learn from, 12 held out; target {TARGET_ID}"
    assert train.said[1] == (
        f"α on 12 held-out requests: {before:.3f} before, {after:.3f} after; "
        f"gain {after - before:+.3f} (80 % interval {low:+.3f} to {high:+.3f})"
    )
    assert train.said[2] == f"draft: {train.out}"


def test_all_of_the_draft_may_be_read_by_whom_the_umask_allows(
    train: Run, tmp_path: Path, umask_of_groups: None
) -> None:
    """Another user's engine may serve it."""
    assert train(write(tmp_path / "a.traces", TRAINING + HELD_OUT), epochs=1, force=True) == 0
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in train.out.iterdir()}
    assert set(modes.values()) == {0o640}, modes
    assert stat.S_IMODE(train.out.stat().st_mode) == 0o750


def test_more_passes_are_more_steps(train: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "a.traces", TRAINING[:16] + HELD_OUT)
    steps = []
    for epochs in (1, 3):
        train.out = tmp_path / f"new-{epochs}"
        train(file, epochs=epochs, force=True)
        steps.append(json.loads((train.out / REPORT).read_text())["num_steps"])
    assert steps[1] == 3 * steps[0]


def test_many_small_rounds_become_fewer(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osd.offline.train.MAX_ROUNDS", 4)
    rounds = []
    monkeypatch.setattr("osd.offline.train._figures", lambda outcome: rounds.append(outcome) or "")
    train(
        write(tmp_path / "a.traces", TRAINING + HELD_OUT),
        epochs=2,
        settings=("trainer.max_new_traces=8",),
        force=True,
    )
    assert len(rounds) == 4, "not one for every eight of 2 x 64 traces, nor four an epoch"


def test_the_buffer_holds_all_that_was_held_out() -> None:
    held_out = chain_traces(200, holdout=True)
    whole = recorded.Recorded(
        target_id=TARGET_ID, training=chain_traces(10, start=900), holdout=held_out
    )
    assert len(whole.buffer().holdout(1000)) == 200


def test_small_rounds_train_on_all_traces_too(train: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    assert train(file, settings=("trainer.max_new_traces=16",)) == 0
    assert alpha(train.out, HELD_OUT) > 0.5


def test_held_out_traces_are_not_learnt(train: Run, tmp_path: Path) -> None:
    # They speak another language: a draft that had seen them would speak it too.
    poison = chain_traces(40, start=500, holdout=True, step=7)
    file = write(tmp_path / "a.traces", TRAINING + poison)
    unguarded = ("gate.min_holdout_traces=41",)
    assert train(file, settings=unguarded, force=True) == 0
    assert alpha(train.out, poison) < 0.1
    assert alpha(train.out, chain_traces(8, start=900)) > 0.5


def test_files_of_one_kind_after_the_other_are_judged_on_all(train: Run, tmp_path: Path) -> None:
    """The service would judge on the newest alone, as the draft is worse there."""
    known = write(tmp_path / "known.traces", TRAINING + HELD_OUT)
    assert train(known) == 0
    later = chain_traces(16, start=2000, holdout=True, step=7)
    other = write(tmp_path / "other.traces", chain_traces(32, start=2000, step=7) + later)
    train.draft, train.out = train.out, tmp_path / "next"
    train(known, other)
    num = len(HELD_OUT) + len(later)
    assert any(f"α on {num} held-out requests" in line for line in train.said)


def noisy_traces(num: int, start: int, **fields: Any) -> list[Trace]:
    """Answers of which every third token follows from nothing, so that too many passes learn them
    by heart."""
    made = []
    for trace in chain_traces(num, start=start, num_output=24, **fields):
        rng, served = np.random.default_rng(int(trace.finished_at)), trace.output_ids.copy()
        for i in range(len(served)):
            is_noise = rng.random() < 0.3
            before = served[i - 1] if i else trace.prompt_ids[-1]
            served[i] = rng.integers(VOCAB_SIZE) if is_noise else after(int(before), 5)
        targets = np.stack([served, (served + 1) % VOCAB_SIZE], 1)
        made.append(replace(trace, output_ids=served, draft_ids=served, target_ids=targets))
    return made


def test_of_too_many_passes_the_round_is_taken_that_was_best(train: Run, tmp_path: Path) -> None:
    held_out = noisy_traces(40, 5000, holdout=True)
    file = write(tmp_path / "a.traces", noisy_traces(24, 0) + held_out)
    own = ("trainer.learning_rate=5.0e-3", "trainer.replay_batches=1", "speculation.k_max=4")
    assert train(file, epochs=16, settings=own) == 0
    said = next(line for line in train.said if line.startswith("the last round's α is "))
    last, best = (float(word.strip(",:")) for word in said.split() if word.startswith("0."))
    print(said)
    assert best > last + 0.03
    assert alpha(train.out, held_out) == pytest.approx(best, abs=1e-3)
    assert train.names() == {"new"}
    report = json.loads((train.out / REPORT).read_text())
    assert report["eval"]["alpha_candidate"] == pytest.approx(best, abs=1e-3)
    assert report["num_steps"] < 16 * 6, "those of the rounds that led to it"


# What it refuses


def test_a_draft_that_is_not_better_is_kept_aside(train: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    useless = ("trainer.learning_rate=1.0e-12",)
    assert train(file, epochs=1, settings=useless) == 1
    assert train.names() == {"new.refused"}
    assert train.said[-1].startswith("refused: no gain: held-out α ")
    assert train.said[-1].endswith(f"; the draft is kept aside in {tmp_path / 'new.refused'}")
    assert json.loads((tmp_path / "new.refused" / REPORT).read_text())["is_better"] is False
    assert train(file, epochs=1, settings=useless) == 1
    assert train.names() == {"new.refused", "new.refused-2"}


def test_force_takes_it_all_the_same(train: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    assert train(file, epochs=1, settings=("trainer.learning_rate=1.0e-12",), force=True) == 0
    assert train.names() == {"new"}
    why = "taken by --force although not shown to be better"
    assert train.said[-1] == f"draft: {train.out}  ({why})"


def test_too_few_held_out_traces_are_said_before_anything_is_trained(
    train: Run, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT[:3])
    with pytest.raises(
        ConfigError,
        match="^--traces: only 3 held out .one in 8., gate.min_holdout_traces=4 are needed",
    ):
        train(file)
    assert train.names() == set()
    assert train(file, epochs=1, force=True) == 0
    assert train.said[-2] == "α: not judged, too few held-out requests"


def test_two_targets_are_refused(train: Run, tmp_path: Path) -> None:
    one = write(tmp_path / "a.traces", TRAINING)
    other = write(
        tmp_path / "b.traces", chain_traces(4, start=80, target_id="target-b"), "target-b"
    )
    with pytest.raises(
        ConfigError, match=f"--traces: {other} holds traces of target target-b, {one} of target-a"
    ):
        train(one, other)
    mixed = write(tmp_path / "c.traces", chain_traces(4, start=80, target_id="target-b"))
    with pytest.raises(ConfigError, match=f"--traces: {mixed} holds traces of target target-b"):
        train(mixed)


def test_traces_of_another_tokenizer_are_refused(train: Run, tmp_path: Path) -> None:
    foreign = chain_traces(1, start=300, output_ids=[VOCAB_SIZE] * 12)
    with pytest.raises(
        ConfigError, match="has 64 tokens, the traces hold token 64; use a draft with the tokenizer"
    ):
        train(write(tmp_path / "a.traces", TRAINING + HELD_OUT + foreign))


def test_an_existing_directory_is_not_touched(train: Run, tmp_path: Path) -> None:
    train.out.mkdir()
    with pytest.raises(
        ConfigError, match=f"--out: {train.out}: exists already; name a new directory"
    ):
        train(write(tmp_path / "a.traces", TRAINING + HELD_OUT), force=True)


def test_a_directory_below_none(train: Run, tmp_path: Path) -> None:
    train.out = tmp_path / "none" / "new"
    with pytest.raises(ConfigError, match="there is no directory .*none; make it first"):
        train(write(tmp_path / "a.traces", TRAINING + HELD_OUT))


def test_traces_that_teach_another_language_leave_nothing(train: Run, tmp_path: Path) -> None:
    other = chain_traces(64, start=100, step=7)
    file = write(tmp_path / "a.traces", other + HELD_OUT)
    with pytest.raises(OSDError, match="^no round of training helped: held-out loss rose"):
        train(file)
    assert train.names() == set()


def test_a_draft_that_cannot_be_loaded_is_named_by_its_own_place(
    train: Run, tmp_path: Path
) -> None:
    (train.draft / "generation_config.json").write_text("[]")
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    with pytest.raises(OSDError, match=f"^{train.draft}: not a draft model that can be loaded"):
        train(file)
    assert train.names() == set()


def test_a_loss_that_is_not_finite_leaves_nothing(train: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    with pytest.raises(
        OSDError, match="^no round of training helped: non-finite loss; try a lower"
    ):
        train(file, settings=("trainer.learning_rate=1.0e30", "trainer.warmup_steps=0"))
    assert train.names() == set()


def test_rounds_that_are_left_behind_do_not_count(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds; the second fails at once, so the third begins with the first draft again."""
    steps = list[int]()
    real = Distiller.step

    def step(self: Distiller, batch: TrainBatch, index: int, scale: float = 1.0) -> float | None:
        steps.append(index)
        return None if steps.count(0) == 2 else real(self, batch, index, scale)

    monkeypatch.setattr(Distiller, "step", step)
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    train(file, epochs=1, force=True, settings=("trainer.max_new_traces=22",))
    assert steps.count(0) == 3
    report = json.loads((train.out / REPORT).read_text())
    assert report["num_steps"] == steps[-1] + 1, "those of the third"


# Files


def test_memory_that_runs_out_is_told_and_leaves_nothing(train: Run, tmp_path: Path) -> None:
    traces = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    told = pytest.raises(OSDError, match="^memory runs out .*; lower trainer.batch_size=8, lower ")
    with told, MemoryFor(2000):
        train(traces)
    assert train.names() == set()


def test_several_files_count_each_request_once(train: Run, tmp_path: Path) -> None:
    one = write(tmp_path / "a.traces", TRAINING[:40] + HELD_OUT)
    other = write(tmp_path / "b.traces", TRAINING[30:] + HELD_OUT)
    assert train(one, other, epochs=1, force=True) == 0
    counts = "64 to learn from, 12 held out, 22 repeated left out"
    assert train.said[0] == f"traces: {counts}; target {TARGET_ID}"


def test_what_is_damaged_is_skipped_counted_and_named(train: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "a.traces", TRAINING + HELD_OUT)
    data = bytearray(file.read_bytes())
    size = len(data) // 76
    for number in range(5):
        data[500 + number * size] ^= 1
    file.write_bytes(data[:-10])
    assert train(file, epochs=1, force=True) == 0
    assert train.warned[0] == f"{file}: record 1: CRC32 does not match; this trace is skipped"
    assert len(train.warned) == recorded.MAX_REPORTED + 1
    assert "3 more that cannot be read, skipped; the last: " in train.warned[-1]
    assert "record 77: cut short" in train.warned[-1]
    assert ", 6 damaged left out" in train.said[0]


def test_a_file_with_nothing_to_learn_from(train: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a.traces: no trace to learn from in there"):
        train(write(tmp_path / "a.traces", HELD_OUT))


# Prompts


def test_prompts_as_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n  two \r\n")
    assert [p.prompt for p in read_prompts(tmp_path / "p.txt")] == ["one", "two"]


def test_a_mark_of_byte_order_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    for name, text in (("p.txt", "one\n"), ("p.jsonl", '{"prompt": "one"}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [p.prompt for p in read_prompts(tmp_path / name)] == ["one"]


def test_prompts_as_json(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "domain": "sql", "max_tokens": 7}',
        '{"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]}',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    first, second = read_prompts(tmp_path / "p.jsonl")
    assert (first.prompt, first.domain, first.max_tokens, first.messages) == ("a", "sql", 7, [])
    assert [(m.role, m.content) for m in second.messages] == [("system", "b"), ("user", "c")]


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "Input data was truncated"),
        ('{"text": "a"}', "unknown field `text`"),
        ("{}", "must have either a prompt or messages"),
        (
            '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}',
            "must have either a prompt or messages",
        ),
        ('{"prompt": 3}', "Expected `str`, got `int`"),
        ('{"prompt": "a", "max_tokens": -1}', "max_tokens=-1 must be at least 1"),
        (
            '{"messages": [{"role": "a", "content": [{"b": ' + "[" * 100_000,
            "maximum recursion depth exceeded",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"p.jsonl line 3: .*{reason}"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("name, content, reason", [
    ("p.txt", b" \n\n", "holds no prompt"),
    ("p.txt", b"one\n\xff\n", "line 2: not UTF-8 text"),
    ("p.csv", b"one", "must end in .txt"),
    ("none.txt", None, "cannot be read .No such file"),
])  # fmt: skip
def test_a_file_that_is_none(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_prompts(tmp_path / name)


def test_sampled_drafts_are_judged_by_what_is_accepted_of_them(train: Run) -> None:
    held_out = [replace(one, temperature=1.0) for one in HELD_OUT]
    files = write(train.directory / "a.traces", [*TRAINING, *held_out])
    how = ("speculation.draft_sample_method=probabilistic",)
    train(files, epochs=1, settings=how, force=True)
    first = replay(load_draft(train.draft), held_out, 4, max_length=64, is_sampled=True).alpha
    assert any(f"{first:.3f}" in line for line in train.said)
