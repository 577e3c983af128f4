"""Which runs are planned, in which order, and which methods can be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from osd.errors import ConfigError
from osd.evaluate.engines import options_of, plan_of
from osd.evaluate.plan import Arm, Load, Models, Plan, methods_of, numbers, whole_numbers

PAIR = Models(target=Path("t"), draft=Path("d"))


def test_every_engine_serves_none_beside_its_own_arms_in_turns() -> None:
    plan = Plan(
        methods=("none", "ngram", "draft"),
        lengths=(1, 3),
        loads=(Load(streams=1), Load(rate=2.0)),
        num_repeats=2,
    )
    assert plan.engines == ("ngram", "draft")
    runs = list(plan.runs("draft"))
    assert [run.arm.name for run in runs[:6]] == [
        *("none", "draft 1", "draft 3"),
        *("draft 1", "draft 3", "none"),
    ]
    assert [run.load.name for run in runs] == ["batch 1"] * 6 + ["2/s"] * 6
    assert len({run.file for run in runs}) == len(runs) == plan.num_runs / 2
    assert runs[1].file == "draft/draft-k1_batch-1_t0_0.json"


def test_alone_none_has_an_engine_that_cannot_speculate() -> None:
    plan = Plan(methods=("none",), lengths=(1,), loads=(Load(streams=1),))
    assert plan.engines == ("none",)
    assert [run.arm for run in plan.runs("none")] == [Arm(method="none")]
    assert options_of("none", PAIR, 1, 4, {})["speculative_config"] is None


def test_the_control_is_one_arm_that_is_not_forced_and_has_all_that_can_propose() -> None:
    plan = Plan(methods=("none", "auto"), lengths=(1, 3), loads=(Load(streams=1),))
    assert plan.engines == ("auto",)
    assert [run.arm.name for run in plan.runs("auto")] == ["none", "auto 3"]
    assert plan_of(Arm(method="auto", k=3)) is None
    options = options_of("auto", PAIR, 3, 4, {})
    assert options["speculative_config"]["model"] == "d"
    settings = options["additional_config"]["osd"]
    assert (settings["mode"], settings["proposers"]) == ("auto", ["draft", "memory"])
    assert (settings["k_max"], settings["memory_k_max"]) == (3, 3)
    headed = options_of("auto", Models(target=Path("t"), head=Path("h")), 3, 4, {})
    assert headed["speculative_config"]["method"] == "eagle3"
    alone = options_of("auto", Models(target=Path("t")), 3, 4, {})
    assert alone["additional_config"]["osd"]["proposers"] == ["memory"]


def test_the_methods_that_can_be_run_are_the_default() -> None:
    target = Models(target=Path("t"))
    assert methods_of(None, target, has_suffix=False) == ("none", "ngram", "memory", "auto")
    assert methods_of(None, PAIR, has_suffix=True) == (
        *("none", "ngram", "memory", "suffix", "draft", "auto"),
    )
    assert methods_of("draft, none", PAIR, has_suffix=False) == ("none", "draft")
    assert methods_of("draft", PAIR, has_suffix=False) == ("none", "draft")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("suffix", "suffix needs the package arctic-inference, which is not installed"),
        ("eagle3", "eagle3 needs an EAGLE-3 head: --head DIRECTORY"),
        ("none,medusa", "'medusa' is none of none, ngram"),
        (",", "is empty"),
    ],
)
def test_a_method_that_cannot_be_run_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        methods_of(text, PAIR, has_suffix=False)


def test_numbers_of_flags() -> None:
    assert whole_numbers("3,1,3", "--k") == (1, 3)
    assert numbers("0.7,0", "--temperature", least=0) == (0.0, 0.7)
    for text in ("0", "1.5", "x", "", "1,,2", "inf", "nan"):
        with pytest.raises(ConfigError, match=r"--k=.*: must be whole numbers of at least 1"):
            whole_numbers(text, "--k")
    with pytest.raises(ConfigError, match=r"--temperature=-1: must be numbers of at least 0"):
        numbers("-1", "--temperature", least=0)


def test_the_engine_of_a_method_speculates_by_it() -> None:
    draft = options_of("draft", PAIR, 3, 4, {"dtype": "float32", "additional_config": {"a": 1}})
    assert draft["speculative_config"] == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 3,
    }
    assert draft["additional_config"]["a"] == 1
    assert draft["additional_config"]["osd"]["proposers"] == ["draft"]
    assert draft["dtype"] == "float32" and draft["max_num_seqs"] == 4
    assert draft["enable_prefix_caching"] is draft["async_scheduling"] is False
    for engine, is_drawn in {"draft": True, "auto": True, "memory": False, "ngram": False}.items():
        drawn = options_of(engine, PAIR, 3, 4, {}, "probabilistic")["speculative_config"]
        assert (drawn.get("draft_sample_method") == "probabilistic") is is_drawn
    ahead = options_of("draft", PAIR, 3, 4, {"async_scheduling": True})
    assert ahead["async_scheduling"] is True
    memory = options_of("memory", Models(target=Path("t")), 3, 4, {})
    assert memory["speculative_config"]["method"] == "ngram"  # which is never asked
    assert memory["additional_config"]["osd"]["proposers"] == ["memory"]
    suffix = options_of("suffix", PAIR, 3, 4, {})
    assert suffix["speculative_config"] == {"method": "suffix", "num_speculative_tokens": 3}
    assert suffix["additional_config"]["osd"]["proposers"] == ["draft"]


def test_an_arm_is_a_plan_that_is_forced() -> None:
    assert plan_of(Arm(method="none")).name == "off"
    assert plan_of(Arm(method="ngram", k=3)).name == "draft 3"
    assert plan_of(Arm(method="memory", k=3)).name == "memory 3"
