"""What the command refuses before any engine starts, and what it says of one that ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from osd.cli import app
from osd.cli.evaluating import QUICK, _usual_requests
from osd.config.schema import Config
from osd.errors import ConfigError, OSDError
from osd.evaluate import forms
from osd.evaluate.child import since
from osd.evaluate.command import BUILT_IN_VLLM, Asked, Evaluation, Say, environment_of, run_child
from osd.evaluate.forms import Question
from osd.evaluate.models import find, fitted
from osd.evaluate.plan import Load, Models, Plan
from osd.evaluate.requests import choose, encode, stop_tokens
from osd.evaluate.runs import Counters, Request, write
from osd.models.compatibility import context_length, read_config
from tests.support.evaluations import REQUESTS, run_of, served, step
from tests.support.heads import write_head
from tests.support.pairs import Pair, build_pair, tokenizer
from tests.support.served_targets import served_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


def write_data(directory: Path, *rows: dict[str, Any]) -> Path:
    file = directory / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--data: is missing; give files of requests"),
        (("--methods", "suffix"), "suffix needs the package arctic-inference"),
        (("--methods", "draft"), "draft needs a draft model: --draft"),
        (("--batch", ""), "--batch=: must be whole numbers"),
        (("--rate", ""), "--rate=: must be numbers"),
        (("--batch", "0"), "--batch=0: must be whole numbers of at least 1"),
        (("--rate", "fast"), "--rate=fast: must be numbers of at least 0.001"),
        (("serving.vllm.async_scheduling=true",), "memory cannot be measured with serving.vllm"),
        (("--methods", "auto", "serving.vllm.async_scheduling=true"), "auto cannot be measured"),
        (("--family", "tiny"), "--family: brings its own models"),
        (("serving.vllm.dtyp=", "serving.dtype=bf16"), "serving.dtype"),
        (("--data", "{data}", "--head", "{draft}"), "is no EAGLE-3 head; give a draft model by"),
        (("--data", "{data}", "--head", "./missing"), "--head=./missing: no such directory"),
        (("--data", "{data}", "--head", "tiny-cost-shaped"), "=tiny-cost-shaped: is a target, not"),
        (("--data", "{data}", "--arrivals"), '--arrivals: the data has requests without "at"'),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    arguments: tuple[str, ...], said: str, pair: Pair, tmp_path: Path
) -> None:
    data = write_data(tmp_path, {"prompt": "t20", "at": 1.5}, {"prompt": "t21"})
    given = [one.format(draft=pair.draft, data=data) for one in arguments]
    command = ["evaluate", str(pair.target), "--out", str(tmp_path / "out"), *given]
    found = CliRunner().invoke(app, command)
    assert isinstance(found.exception, ConfigError), found.output
    assert said in str(found.exception) and "\n" not in str(found.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny", "--data", "none.jsonl"), "--data: none.jsonl: cannot be read (No such file"),
        (("--family", "tiny", "--data", "none.jsonl"), "--data: none.jsonl: cannot be read"),
        ((), "serving.target is not set"),
        (("./none",), "serving.target=./none: no such directory"),
        (("owner/model",), "--data: is missing"),
        (("tiny", "--arrivals"), '--arrivals: the data has requests without "at"'),
        (("tiny", "--data", "{data}", "--arrivals"), "--arrivals: the data has requests without"),
        (("tiny", "--methods", "draff"), "--methods: 'draff' is none of none, ngram"),
        (("tiny", "--methods", "draft"), "--methods: draft needs a draft model: --draft"),
        (("--family", "tiny", "--k", "0"), "--k=0: must be whole numbers"),
        (("--family", "tiny", "serving.dtype=bf16"), "serving.dtype"),
        (("tiny", "serving.vllm.async_scheduling=true"), "memory cannot be measured"),
        (("tiny", "--out", "{data}"), "is a file; give a directory"),
    ],
)
def test_what_is_wrong_whatever_the_models_are_is_told_before_one_is_built(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path / "cache"))
    data = write_data(tmp_path, {"prompt": "t20", "at": 1.5}, {"prompt": "t21"})
    given = [one.format(data=data) for one in arguments]
    given += [] if "--out" in given else ["--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, ["evaluate", *given])
    assert isinstance(found.exception, ConfigError), found.output
    assert said in str(found.exception) and "\n" not in str(found.exception)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "out").exists()


def test_two_heads_are_refused(pair: Pair, tmp_path: Path) -> None:
    head = str(write_head(tmp_path / "head", pair.target))
    data = str(write_data(tmp_path, {"prompt": "t20"}))
    command = ["evaluate", str(pair.target), "--draft", head, "--head", head, "--data", data]
    found = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    line = f"--draft: {head} is an EAGLE-3 head, as --head is; give one head alone"
    assert str(found.exception) == line


@pytest.mark.parametrize("option", ["--draft", "--head"])
def test_a_head_is_one_by_whichever_option(option: str, tmp_path: Path) -> None:
    """As in `osd serve`, `--draft` takes whatever drafts."""
    target = served_target(tmp_path / "target")
    head = str(write_head(tmp_path / "head", target))
    command = ["evaluate", str(target), option, head, "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, [*command, "--methods", "eagle3"])
    assert str(found.exception).startswith("--data: is missing; give files of requests")
    data = str(write_data(tmp_path, {"prompt": "t20"}))
    found = CliRunner().invoke(app, [*command, "--methods", "draft", "--data", data])
    assert str(found.exception) == "--methods: draft needs a draft model: --draft DIRECTORY"


def test_a_head_that_does_not_fit_is_named_by_its_option(pair: Pair, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", pair.target, target_hidden_size=48)
    command = ["evaluate", str(pair.target), "--data", str(write_data(tmp_path, {"prompt": "t"}))]
    for option, name in (("--head", "--head"), ("--draft", "serving.draft")):
        found = CliRunner().invoke(app, [*command, option, str(head)])
        assert isinstance(found.exception, ConfigError)
        assert str(found.exception).startswith(f"{name}={head}: ")


def test_a_draft_of_fewer_rows_is_fitted_aside(pair: Pair, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", LlamaForCausalLM.from_pretrained(pair.draft)
    draft.resize_token_embeddings(104)
    draft.save_pretrained(target)
    for _ in range(2):  # the second time it is there
        found = fitted(pair.draft, target, tmp_path / "aside")
        assert found == tmp_path / "aside" and read_config(found)["vocab_size"] == 104
        assert LlamaForCausalLM.from_pretrained(found).lm_head.weight.shape[0] == 104
    assert fitted(pair.draft, pair.target, tmp_path / "none") == pair.draft


def test_a_family_that_is_none_is_refused_with_those_that_are() -> None:
    found = CliRunner().invoke(app, ["evaluate", "--family", "verse"])
    assert "--family: 'verse' is none of tiny, natural, prose" in str(found.exception)


def settings_of(
    models: Models,
    requests: Sequence[Request] = REQUESTS,
    *,
    max_tokens: int = 8,
    traffic: dict[str, list[str]] | None = None,
    **serving: Any,
) -> dict[str, Any]:
    """What must be the same for runs to be compared."""
    asked = Asked(
        config=Config.model_validate({"serving": {"target": str(models.target)} | serving}),
        data=(),
        traffic=traffic or {},
        num_requests=4,
        max_tokens=max_tokens,
        seed=0,
        out=Path("out"),
    )
    plan = Plan(methods=("none", "draft"), lengths=(1,), loads=(Load(streams=1),))
    return Evaluation(asked, models, plan, print)._settings(requests)


def test_a_family_is_served_like_a_built_in_target(pair: Pair) -> None:
    """In a few minutes, whatever the machine: with as many requests in all, however many kinds."""
    models = Models(target=pair.target, draft=pair.draft)
    own = settings_of(models, traffic={"en": ["t20 t21"]})
    assert own["vllm"] == BUILT_IN_VLLM and own["env"]["OMP_NUM_THREADS"] == "1"
    assert settings_of(models)["vllm"] == {}
    assert [_usual_requests(QUICK, kinds) for kinds in (0, 1, 2, 4, 10)] == [4, 4, 4, 2, 1]


def test_what_is_kept_and_reported_of_the_settings_holds_no_secret(pair: Pair) -> None:
    models = Models(target=pair.target, draft=pair.draft)
    own = settings_of(
        models, vllm={"api_key": "sk-1", "max_model_len": 64}, env={"HF_TOKEN": "hf_1", "A": "b"}
    )
    assert own["vllm"] == {"api_key": "***", "max_model_len": 64}
    assert own["env"] == {"HF_TOKEN": "***", "A": "b"}


def test_a_draft_that_cannot_be_replayed_costs_no_figure_that_was_measured(
    pair: Pair, tmp_path: Path
) -> None:
    """vLLM may serve what the replay cannot read."""
    draft, warned = tmp_path / "draft", list[str]()
    shutil.copytree(pair.draft, draft)
    plan = Plan(methods=("none", "draft"), lengths=(3,), loads=(Load(streams=2),))
    asked = Asked(
        config=Config.model_validate({"serving": {"target": str(pair.target)}}), data=(),
        traffic={}, num_requests=4, max_tokens=8, seed=0, out=tmp_path / "out",
    )  # fmt: skip
    models = Models(target=pair.target, draft=draft)
    evaluation = Evaluation(asked, models, plan, warned.append)
    parts = (0.01, 0.01, 0.0, 0.0)
    steps = {
        k: tuple(step(2, 2 + 2 * k, verify=0.01, parts=parts) for _ in range(4)) for k in (0, 3)
    }
    for one in plan.runs("draft"):
        answers = [served(i, [1, 1], one.arm.k) for i in range(4)]
        run = run_of(one.arm.method, one.arm.k, answers, steps=steps[one.arm.k])
        write(evaluation.directory.file(one), run)
    whole = evaluation._found(REQUESTS)
    assert len(whole.figures) == 2 and whole.bounds and whole.successes and not warned
    (draft / "model.safetensors").write_bytes(b"rubbish")
    found = evaluation._found(REQUESTS)
    assert found.figures == whole.figures
    assert (found.bounds, found.successes) == ([], [])
    (line,) = warned
    assert str(draft) in line and "\n" not in line
    assert line.endswith(": success by k is left out, and the draft in the upper bound")


def test_runs_of_other_models_requests_or_arguments_are_never_mixed(pair: Pair) -> None:
    """Whatever is changed is named by what the directory says of its runs."""
    models = Models(target=pair.target, draft=pair.draft)
    usual = settings_of(models)
    assert settings_of(models) == usual
    others = {
        "target": settings_of(Models(target=pair.stranger, draft=pair.draft)),
        "draft": settings_of(Models(target=pair.target, draft=pair.stranger)),
        "requests": settings_of(models, REQUESTS[:3] + REQUESTS[:1]),
        "max_tokens": settings_of(models, max_tokens=16),
        "vllm": settings_of(models, vllm={"max-model-len": 64}),
        "env": settings_of(models, env={"OMP_NUM_THREADS": "2"}),
    }
    for name, other in others.items():
        assert [key for key in usual if other.get(key) != usual[key]] == [name]


def questions(data: str, num: int) -> list[Question]:
    return [
        Question(messages=({"role": "user", "content": f"t{20 + i}"},), data=data)
        for i in range(num)
    ]


def test_requests_are_drawn_in_turns_from_each_file() -> None:
    chosen = choose([questions("a", 9), questions("b", 2)], 3, seed=0)
    assert [one.data for one in chosen] == ["a", "b", "a", "b", "a"]
    assert chosen == choose([questions("a", 9), questions("b", 2)], 3, seed=0)
    others = {str(choose([questions("a", 9)], 3, seed=seed)) for seed in range(5)}
    assert len(others) > 1


def test_of_recorded_requests_the_first_are_taken_in_the_order_in_which_they_came() -> None:
    def recorded(data: str, *times: float) -> list[Question]:
        pairs = zip(questions(data, len(times)), times, strict=True)
        return [replace(one, at=at) for one, at in pairs]

    chosen = choose([recorded("a", 5.0, 7.0, 9.0), recorded("b", 4.0, 8.0, 3.0)], 2, seed=0)
    assert [(one.data, one.at) for one in chosen] == [("b", 4), ("a", 5), ("a", 7), ("b", 8)]


def test_messages_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = "{{ raise_exception('roles must alternate') }}"
    words.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as error:
        encode(questions("a", 1), tmp_path, max_tokens=8, context=64)
    assert str(error.value) == (
        "--data: the target's chat template does not take [{'role': 'user', 'content': 't20'}] of "
        "a (roles must alternate); change these messages"
    )


def test_a_prompt_is_what_the_targets_template_makes_of_it(pair: Pair) -> None:
    (request,), num_left_out = encode(questions("a", 1), pair.target, max_tokens=8, context=64)
    assert (request.prompt_ids, request.max_tokens, num_left_out) == ((20,), 8, 0)
    assert stop_tokens(pair.target) == (1,)
    with pytest.raises(ConfigError, match="no request fits the context of 8 tokens"):
        encode(questions("a", 1), pair.target, max_tokens=8, context=8)


def test_an_empty_prompt_is_left_out(tmp_path: Path) -> None:
    """An engine would end by it, and the other requests with it."""
    tokenizer().save_pretrained(tmp_path)
    empty = Question(messages=({"role": "user", "content": " "},), data="a")
    some = [empty, *questions("a", 1)]
    (request,), num_left_out = encode(some, tmp_path, max_tokens=8, context=64)
    assert (request.prompt_ids, num_left_out) == ((20,), 1)


def test_an_engine_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    job, log = tmp_path / "job.json", tmp_path / "engine.log"
    job.write_text(json.dumps({"engine": "draft"}))
    with pytest.raises(OSDError, match="the engine ended with status 1: .*engine.log") as error:
        run_child([str(job), "target"], {}, log, lambda num, text="": None)
    assert "directory" in str(error.value)  # which the job lacks


def evaluation_of(
    pair: Pair, directory: Path, warn: Say = print, vllm: dict[str, Any] | None = None
) -> Evaluation:
    """Of one request by nobody."""
    data = write_data(directory, {"prompt": "t20"})
    serving = {"target": str(pair.target), "vllm": vllm or {}}
    asked = Asked(
        config=Config.model_validate({"serving": serving}), data=(forms.read(data),),
        traffic={}, num_requests=1, max_tokens=8, seed=0, out=directory / "out",
    )  # fmt: skip
    plan = Plan(methods=("none",), lengths=(1,), loads=(Load(streams=1),))
    return Evaluation(asked, Models(target=pair.target), plan, warn)


def test_a_target_whose_tokenizer_cannot_be_loaded_is_said_in_one_line(
    pair: Pair, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(pair.target, target)
    for file in target.glob("tokenizer*"):
        file.unlink()
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            encode(questions("a", 1), target, max_tokens=8, context=64)
        line = f"serving.target={target}: its tokenizer cannot be loaded ("
        assert str(error.value).startswith(line) and "\n" not in str(error.value)
        (target / "tokenizer.json").write_text("{")  # nor is a damaged one


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "'list' object has no attribute"),
        ('{"eos_token_id": ["</s>"]}', "invalid literal for int"),
    ],
)
def test_a_target_whose_ends_of_answers_cannot_be_read_is_said_in_one_line(
    text: str, why: str, pair: Pair, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(pair.target, target)
    (target / "generation_config.json").write_text(text)
    data = str(write_data(tmp_path, {"prompt": "t20"}))
    command = ["evaluate", str(target), "--data", data, "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, command)
    assert isinstance(found.exception, ConfigError), found.output
    line = f"serving.target={target}: its generation_config.json cannot be read ({why}"
    assert str(found.exception).startswith(line) and "\n" not in str(found.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["max_model_len", "max-model-len"])
def test_the_context_is_the_one_the_engine_is_told(key: str, pair: Pair, tmp_path: Path) -> None:
    own = context_length(read_config(pair.target))
    for length, context in ((16, 16), (-1, own), ("auto", own)):
        found = evaluation_of(pair, tmp_path, vllm={key: length})
        assert found._context() == context


@pytest.mark.parametrize("key", ["max_model_len", "max-model-len"])
def test_a_draft_may_have_the_context_that_is_served(key: str, pair: Pair, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(pair.draft, draft)
    tree = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(tree | {"max_position_embeddings": 32}))
    serving = {"target": str(pair.target), "draft": str(draft), "vllm": {key: 32}}
    assert find(Config.model_validate({"serving": serving}), "").draft == draft


def test_who_stops_it_is_told_how_it_goes_on(pair: Pair, tmp_path: Path) -> None:
    warned: list[str] = []
    evaluation = evaluation_of(pair, tmp_path, warned.append)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    evaluation._measure = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        evaluation.run()
    assert warned == [f"stopped; the same command goes on with the runs in {tmp_path / 'out'}"]


def test_a_job_that_cannot_be_written_is_one_line(pair: Pair, tmp_path: Path) -> None:
    evaluation = evaluation_of(pair, tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "logs").write_text("a file")
    with pytest.raises(OSDError, match=r"^--out: .*/logs: File exists; give a directory that"):
        evaluation.run()


def test_numba_has_as_many_threads_as_openmp() -> None:
    assert environment_of({"OMP_NUM_THREADS": "3"})["NUMBA_NUM_THREADS"] == "3"
    both = environment_of({"OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "2"})
    assert both["NUMBA_NUM_THREADS"] == "2"
    assert "NUMBA_NUM_THREADS" not in environment_of({"A": "b"})
    assert environment_of({})["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_counters_are_those_of_the_run() -> None:
    before = Counters(num_drafts=4, num_draft_tokens=12, accepted_per_position=(3, 1))
    now = Counters(num_drafts=9, num_draft_tokens=22, accepted_per_position=(5, 1))
    assert since(before, now) == Counters(
        num_drafts=5, num_draft_tokens=10, accepted_per_position=(2, 0)
    )
    assert since(Counters(), now) == now
