"""Records: what they refuse, and that the examples in their docstrings are true."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from osd import records
from osd.records import ACCEPTED, HOLDOUT_ONE_IN, PLAIN, REJECTED, EvalReport, Trace
from tests.support.builders import make_trace

RECORDS = [
    cls
    for _, cls in inspect.getmembers(records, inspect.isclass)
    if cls.__module__.startswith("osd.records") and "Example:" in (cls.__doc__ or "")
]


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_the_example_of_each_record_is_one(cls: type) -> None:
    call = re.search(
        rf"({cls.__name__}\(.*?\))\n(?!\s+\w+=)", inspect.cleandoc(cls.__doc__ or "") + "\n", re.S
    )
    assert call, "no example"
    report = EvalReport(
        num_traces=1, num_tokens=1, k=1, alpha_base=0, alpha_candidate=0, alpha_base_per_pos=(0,),
        alpha_candidate_per_pos=(0,), diff=0, diff_low=0, diff_high=0,
    )  # fmt: skip
    names = {**vars(records), "ACCEPTED": ACCEPTED, "PLAIN": PLAIN, "REJECTED": REJECTED}
    text = (
        call.group(1).replace("EvalReport(...)", "report")
        if cls is not EvalReport
        else call.group(1)
    )
    text = text.replace("RoundOutcome(...)", "None").replace("DraftRelease(...)", "release")
    release = records.DraftRelease(
        version=1, parent=0, path="/v1", sha256="ab", target_id="9f2c", created_at=1.0
    )
    example = eval(text, {**names, "report": report, "release": release})
    assert isinstance(example, cls)
    if cls is not Trace:
        assert records.decode(records.encode(example), cls) == example


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position": [0]}, "position"),
        ({"position": [99]}, "position"),
        ({"keep_prob": [0.0]}, "keep_prob"),
        ({"target_logprobs": [[np.nan, -1.0]]}, "NaN"),
        ({"target_logprobs": [[0.5, -1.0]]}, "above 0"),
        ({"kind": [1, 2]}, "kind has 2 rows"),
        ({"target_ids": [[1, 2, 3]]}, "differ"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_by_name(change: dict, says: str) -> None:
    good = {
        "trace_id": "t1",
        "target_id": "x",
        "finished_at": 1.0,
        "prompt_ids": [1, 2],
        "output_ids": [3, 4],
        "position": [3],
        "kind": [REJECTED],
        "draft_ids": [9],
        "target_ids": [[4, 5]],
        "target_logprobs": [[-0.1, -3.0]],
        "tail_logprob": [-4.0],
        "keep_prob": [1.0],
        "draft_version": [1],
    }
    Trace(**good)
    with pytest.raises(ValueError, match="trace t1.*" + says):
        Trace(**{**good, **change})


def test_about_one_trace_in_eight_is_held_out_and_always_the_same() -> None:
    traces = [make_trace(trace_id=f"cmpl-{i}") for i in range(4000)]
    held = sum(t.is_holdout for t in traces)
    assert abs(held - 4000 / HOLDOUT_ONE_IN) < 4 * np.sqrt(4000 / HOLDOUT_ONE_IN)
    assert [t.is_holdout for t in traces[:50]] == [
        make_trace(trace_id=f"cmpl-{i}").is_holdout for i in range(50)
    ]


def test_all_samples_of_a_request_are_on_the_same_side() -> None:
    for i in range(200):
        sides = {make_trace(trace_id=f"{n}_cmpl-{i}").is_holdout for n in range(4)}
        assert sides == {make_trace(trace_id=f"cmpl-{i}").is_holdout}
