"""Requests with what vLLM refuses beside a draft, and with all else that changes how a token is
chosen: their answers are those of an engine without speculation, alone and beside drafted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from osd.config.schema import CaptureConfig
from serving.speculation.control import Settings, Speculation
from serving.vllm import undrafted
from tests.integration.conftest import release_of
from tests.support.engines import Engine
from tests.support.older_vllm import KEEPS_TOKENS_BEHIND_STOP_STRINGS, MIXES_LOGPROBS
from tests.support.pairs import Pair

K = 5
EOS = 1
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "block_size": 32,
    "max_logprobs": -1,
    "disable_log_stats": True,
    "reasoning_config": {"reasoning_start_str": "t8", "reasoning_end_str": "t9"},
}
KEPT: list[Engine] = []
"""vLLM takes down what all engines of a process share when one of them is collected."""

BIAS = {"logit_bias": {5: 4.0, 7: -100.0, 11: 3.0, 20: 2.5}}
CHOSEN = {"logprob_token_ids": [3, 50, 7]}
MIN_P = {"min_p": 0.2, "temperature": 1.2, "seed": 5}
HOT = {"temperature": 1.0, "seed": 11}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": -0.4}
BAD = {"bad_words": ["t5", "t11 t20", "t30"]}
ALLOWED = {"allowed_token_ids": list(range(4, 40))}
LATE = {"min_tokens": 9, "stop_token_ids": list(range(10, 60)), "ignore_eos": False}
GRAMMAR = {
    "structured_outputs": StructuredOutputsParams(regex=r"( ?t[1-9][0-9]?){6,30}"),
    "ignore_eos": False,
}
THINKING = {"thinking_token_budget": 6}

UNDRAFTED: dict[str, dict[str, Any]] = {
    "bias": BIAS,
    "bias that forces": {"logit_bias": {42: 100.0}},
    "bias, hot": {**BIAS, **HOT},
    "bias, hot, top-p and top-k": {**BIAS, **HOT, "top_p": 0.8, "top_k": 20},
    "bias, logprobs": {**BIAS, "logprobs": 4},
    "bias, prompt logprobs": {**BIAS, "prompt_logprobs": 3},
    "bias, penalties": {**BIAS, **PENALTIES},
    "bias, bad words": {**BIAS, **BAD},
    "bias, allowed ids": {**BIAS, **ALLOWED},
    "bias, min tokens": {**BIAS, **LATE},
    "bias, grammar": {**BIAS, **GRAMMAR},
    "bias, stop string": {**BIAS, "stop": ["t20"], "detokenize": True},
    "bias, three samples": {**BIAS, **HOT, "n": 3, "logprobs": 1},
    "bias, thinking budget": {**BIAS, **THINKING},
    "thinking budget": THINKING,
    "min-p": MIN_P,
    "min-p of next to nothing": {**MIN_P, "min_p": 1e-6},
    "min-p, top-p and top-k": {**MIN_P, "top_p": 0.9, "top_k": 30},
    "min-p, all logprobs": {**MIN_P, "logprobs": -1},
    "min-p, penalties, bad words": {**MIN_P, **PENALTIES, **BAD},
    "min-p, allowed ids": {**MIN_P, **ALLOWED},
    "min-p, grammar": {**MIN_P, **GRAMMAR},
    "min-p, min tokens, three samples": {**MIN_P, **LATE, "n": 3},
    "chosen": CHOSEN,
    "chosen, none": {"logprob_token_ids": []},
    "chosen, as many logprobs": {**CHOSEN, "logprobs": 3},
    "chosen, flat": {**CHOSEN, "flat_logprobs": True},
    "chosen, hot": {**CHOSEN, **HOT},
    "chosen, penalties": {**CHOSEN, **PENALTIES},
    "chosen, bad words, allowed ids": {**CHOSEN, **BAD, **ALLOWED},
    "chosen, grammar": {**CHOSEN, **GRAMMAR},
    "chosen, prompt logprobs": {**CHOSEN, "prompt_logprobs": 1},
    "all three": {**BIAS, **MIN_P, "logprob_token_ids": list(range(30))},
}
"""Refused by vLLM beside a draft, or answered without log-probabilities, or disturbing others."""

DRAFTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "min-p at temperature 0": {"min_p": 0.3},
    "no bias": {"logit_bias": {}},
    "logprobs": {"logprobs": 4},
    "no logprobs but the token's": {"logprobs": 0},
    "all logprobs": {"logprobs": -1},
    "flat logprobs": {"logprobs": 3, "flat_logprobs": True},
    "prompt logprobs": {"prompt_logprobs": 3, "logprobs": 2},
    "penalties": PENALTIES,
    "bad words": BAD,
    "allowed ids": ALLOWED,
    "penalties, bad words, allowed ids": {**PENALTIES, **BAD, **ALLOWED, "logprobs": 2},
    "min tokens": LATE,
    "min tokens, bad words": {**LATE, **BAD},
    "grammar": GRAMMAR,
    "grammar, penalties": {**GRAMMAR, **PENALTIES, "min_tokens": 12},
    "stop string": {"stop": ["t20", "t30"], "detokenize": True},
    "repetition": {
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    },
}
"""Accepted beside a draft. Above temperature 0 the distribution is the same, not the tokens."""
if KEEPS_TOKENS_BEHIND_STOP_STRINGS:
    del DRAFTED["stop string"]
TOGETHER = {
    name: given
    for name, given in UNDRAFTED.items()
    if not (MIXES_LOGPROBS and "logprob_token_ids" in given)
}
"""What disturbs no other request, by vLLM's own doing."""

BESIDE = [("nothing", 1), ("logprobs", 2), ("prompt logprobs", 3), ("penalties", 4)]
EVERYTHING = [(name, i % 24) for i, name in enumerate([*TOGETHER, *DRAFTED])]
"""Name of a request, and number of its prompt."""


@dataclass
class Answer:
    """Of one request: what each sample holds."""

    tokens: list[list[int]]
    reasons: list[tuple[str, Any]]
    texts: list[str]
    logprobs: list[Any]
    prompt_logprobs: Any
    num_draft_tokens: int = 0


@dataclass
class Bare:
    """The engine without speculation, and what it answers to each request alone."""

    engine: Engine
    num_tokens: int = 40
    """Of an answer, where nothing else ends it."""
    known: dict[tuple[str, int], Answer] = field(default_factory=dict)

    def answer(self, name: str, i: int, prompts: list[list[int]]) -> Answer:
        if (name, i) not in self.known:
            given = {**DRAFTED, **UNDRAFTED}[name]
            (self.known[name, i],) = answers(self.engine, [prompts[i]], [given], self.num_tokens)
        return self.known[name, i]


def engine_of(pair: Pair, release: Any, **more: Any) -> Engine:
    engine = Engine(pair.target, release, k=K, **{**OPTIONS, **more})
    KEPT.append(engine)
    if release is not None:
        engine.start_hooks(CaptureConfig(top_k=16))
        core = engine.llm.llm_engine.engine_core.engine_core
        problems = [engine.rpc("osd_undrafted"), core.osd_undrafted()]
        undrafted.permit(engine.llm.llm_engine.vllm_config.speculative_config, problems)
    return engine


@pytest.fixture(scope="module")
def bare(pair: Pair, plain: Engine) -> Bare:
    return Bare(engine_of(pair, None))


@pytest.fixture(scope="module")
def odd_engine(pair: Pair, bare: Bare) -> Engine:
    undrafted.refuse_undrafted()
    return engine_of(pair, release_of(pair.draft, 1), control={"mode": "fixed"})


@pytest.fixture
def odd(odd_engine: Engine) -> Iterator[Engine]:
    yield odd_engine
    assert odd_engine.command("report")["problem"] == ""


def answers(
    engine: Engine, prompts: list[list[int]], given: list[dict[str, Any]], num_tokens: int = 40
) -> list[Answer]:
    """Of all requests in flight together."""
    scheduler, drafted = engine.scheduler, dict[str, int]()
    own = type(scheduler).schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = own(scheduler, *args, **kwargs)
        for req_id, tokens in output.scheduled_spec_decode_tokens.items():
            drafted[req_id] = drafted.get(req_id, 0) + len(tokens)
        return output

    scheduler.schedule = counting
    ids = [
        engine.add(prompt, **{"ignore_eos": True, "max_tokens": num_tokens, **sampling})
        for prompt, sampling in zip(prompts, given, strict=True)
    ]
    done: dict[str, Any] = {}
    llm = engine.llm.llm_engine
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step() if output.finished}
    llm.step()
    del scheduler.schedule
    return [answer_of(done[i], drafted, i) for i in ids]


def answer_of(output: Any, drafted: dict[str, int], req_id: str) -> Answer:
    samples = sorted(output.outputs, key=lambda sample: sample.index)
    mine = [r for r in drafted if r.split("-")[0] in (req_id, *(f"{i}_{req_id}" for i in range(9)))]
    return Answer(
        [list(sample.token_ids) for sample in samples],
        [(sample.finish_reason, sample.stop_reason) for sample in samples],
        [sample.text for sample in samples],
        [scores(sample.logprobs) for sample in samples],
        scores(output.prompt_logprobs),
        sum(drafted[r] for r in mine),
    )


def scores(logprobs: Any) -> Any:
    """Per position: token -> (log-probability, rank)."""
    if logprobs is None:
        return None
    return [
        None if at is None else {token: (each.logprob, each.rank) for token, each in at.items()}
        for at in logprobs
    ]


def difference(found: Answer, expected: Answer) -> str:
    """Where one answer is not the other; "" where they are the same."""
    for name in ("tokens", "reasons", "texts"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours != theirs:
            return f"{name} {ours} instead of {theirs}"
    for ours, theirs in zip(
        [*found.logprobs, found.prompt_logprobs],
        [*expected.logprobs, expected.prompt_logprobs],
        strict=True,
    ):
        if (ours is None) != (theirs is None) or len(ours or []) != len(theirs or []):
            return f"log-probabilities {ours} instead of {theirs}"
        for at, wanted in zip(ours or [], theirs or [], strict=True):
            if (at is None) != (wanted is None) or not is_close(at or {}, wanted or {}):
                return f"log-probabilities {at} instead of {wanted}"
    return ""


def is_close(at: dict[int, tuple[float, int]], wanted: dict[int, tuple[float, int]]) -> bool:
    """Same tokens in the same order, same ranks, log-probabilities within 1e-4."""
    ranks = [rank for _, rank in at.values()], [rank for _, rank in wanted.values()]
    values = [each for each, _ in at.values()], [each for each, _ in wanted.values()]
    return (
        list(at) == list(wanted)
        and ranks[0] == ranks[1]
        and values[0] == pytest.approx(values[1], abs=1e-4)
    )


def assert_same(
    odd: Engine, bare: Bare, prompts: list[list[int]], asked: list[tuple[str, int]]
) -> list[Answer]:
    """`asked`: name of a request and number of its prompt, all in flight together."""
    given = [{**DRAFTED, **UNDRAFTED}[name] for name, _ in asked]
    expected = [bare.answer(name, i, prompts) for name, i in asked]
    found = answers(odd, [prompts[i] for _, i in asked], given, bare.num_tokens)
    wrong = {
        at: f"drafted {ours.num_draft_tokens}: {text}"
        for at, ours, theirs in zip(asked, found, expected, strict=True)
        if (text := difference(ours, theirs))
    }
    assert wrong == {}
    for (name, _), answer in zip(asked, found, strict=True):
        if name in UNDRAFTED:
            assert answer.num_draft_tokens == 0, name
    return found


@pytest.mark.parametrize("name", UNDRAFTED)
def test_alone(odd: Engine, bare: Bare, prompts: list[list[int]], name: str) -> None:
    assert_same(odd, bare, prompts, [(name, 0)])


@pytest.mark.parametrize("name", TOGETHER)
def test_beside_drafted(odd: Engine, bare: Bare, prompts: list[list[int]], name: str) -> None:
    found = assert_same(odd, bare, prompts, [(name, 0), *BESIDE])
    assert all(answer.num_draft_tokens > 0 for answer in found[1:])


@pytest.mark.parametrize("name", DRAFTED)
def test_drafted(odd: Engine, bare: Bare, prompts: list[list[int]], name: str) -> None:
    found = assert_same(odd, bare, prompts, [(name, i) for i in range(8)])
    assert any(answer.num_draft_tokens > 0 for answer in found)


def assert_min_tokens_ends_where_it_should(
    engine: Engine, bare: Bare, prompts: list[list[int]]
) -> None:
    """Stop tokens that the target writes as soon as they are allowed, wherever a draft ends."""
    asked, given, expected = [], [], []
    for i, prompt in enumerate(prompts):
        tokens = bare.answer("nothing", i, prompts).tokens[0]
        for n in range(3, min(14, len(tokens))):
            if tokens[n] not in tokens[:n] and EOS not in tokens[:n]:
                asked.append(prompt)
                given.append({"min_tokens": n, "stop_token_ids": [tokens[n]]})
                expected.append(tokens[: n + 1])
    found = answers(engine, asked, given)
    assert [answer.tokens[0] for answer in found] == expected
    assert sum(answer.num_draft_tokens for answer in found) > 0


def test_min_tokens_end_where_they_should(
    odd: Engine, bare: Bare, prompts: list[list[int]]
) -> None:
    assert_min_tokens_ends_where_it_should(odd, bare, prompts)


def test_the_report_counts_them_by_reason(
    odd: Engine, bare: Bare, prompts: list[list[int]]
) -> None:
    before = Counter(odd.command("report")["undrafted"])
    assert_same(odd, bare, prompts, [("bias", 0), ("min-p", 1), ("bias, logprobs", 2), *BESIDE])
    assert Counter(odd.command("report")["undrafted"]) - before == {"logit_bias": 2, "min_p": 1}


@pytest.fixture(params=["auto", "off", "at k = 0", "ended"])
def standing(request: pytest.FixtureRequest, odd: Engine) -> Iterator[Engine]:
    """The engine with its control in another state."""
    scheduler = odd.scheduler
    fixed, resting_k = scheduler.osd, scheduler._osd_resting_k
    if request.param in ("auto", "off"):
        scheduler.osd = Speculation(Settings(mode=request.param, k_max=K))
    elif request.param == "at k = 0":
        odd.command("force", ("off", 0))
    else:
        scheduler._osd_guard(lambda: 1 // 0)
    yield odd
    odd.command("force", None)
    scheduler.osd, scheduler._osd_problem = fixed, ""
    assert scheduler._osd_resting_k == resting_k


def test_however_the_control_stands(standing: Engine, bare: Bare, prompts: list[list[int]]) -> None:
    assert_same(standing, bare, prompts, EVERYTHING)


def test_drafts_that_a_broken_control_leaves_are_not_verified(
    odd: Engine, bare: Bare, prompts: list[list[int]]
) -> None:
    """It ends while such requests run, and every request has drafts from then on."""
    scheduler, steps = odd.scheduler, 0
    own = scheduler._osd_plan

    def plan() -> Any:
        nonlocal steps
        steps += 1
        return own() if steps < 6 else 1 // 0

    scheduler._osd_plan = plan
    try:
        other = "min-p" if MIXES_LOGPROBS else "chosen, hot"
        found = assert_same(odd, bare, prompts, [("bias", 0), (other, 1), *BESIDE])
    finally:
        del scheduler._osd_plan
    assert "ZeroDivisionError" in odd.command("report")["problem"]
    scheduler._osd_problem = ""
    assert all(answer.num_draft_tokens > 0 for answer in found[2:])


# -- refused still -------------------------------------------------------------------------------


def test_an_engine_that_was_not_permitted_refuses_them(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """It has vLLM's own scheduler, as where the control could not be installed."""
    undrafted.refuse_undrafted()
    for given in (BIAS, MIN_P, CHOSEN):
        with pytest.raises(VLLMValidationError, match="speculative decoding"):
            engine.add(prompts[0], **given)
    assert len(engine.generate(prompts[:1], logprobs=2, ignore_eos=True)[0]) == 24
