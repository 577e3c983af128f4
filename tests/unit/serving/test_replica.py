"""What a replica asks of vLLM, and what it tells the ranks of its engine at the start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.config.schema import Config
from osd.errors import SwapError
from osd.records import DraftRelease, RankReport, Trace, WorkerReport, encode
from serving import engine_loop
from serving import replica as of_replica
from serving.activity import Activity
from serving.engine_loop import EngineLoop
from serving.pull import as_it_lies
from serving.replica import Replica
from serving.swap.ranks import Ranks

RELEASE = DraftRelease(version=1, parent=0, path="/v1", sha256="a", target_id="t", created_at=1.0)


class Engine:
    """An engine of several ranks, which notes what they are asked. `off`: what is off on each."""

    def __init__(self, *off: dict[str, str]) -> None:
        self.off, self.calls = off, list[tuple[str, tuple[Any, ...]]]()
        self.refused = ""
        """Why the last rank does not take the hooks."""
        self.answer = ""
        """The core's to all that it is asked."""
        self.is_asleep = False
        self.vllm_config = SimpleNamespace(speculative_config=object())
        self.engine_core = SimpleNamespace(call_utility_async=self._call_utility)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[str]:
        self.calls.append((method, args))
        if method == "osd_start":
            refused = [self.refused if rank else "" for rank in range(len(self.off))]
            return [encode(RankReport(version=1, refused=why)).decode() for why in refused]
        if method == "osd_parts_off":
            return [json.dumps(off) for off in self.off]
        if method == "osd_report":
            return [encode(WorkerReport()).decode()] * len(self.off)
        return [""] * len(self.off)

    async def is_sleeping(self) -> bool:
        return self.is_asleep

    async def _call_utility(self, method: str, *args: Any) -> str:
        return self.answer

    def asked(self, method: str) -> list[tuple[Any, ...]]:
        return [args for name, args in self.calls if name == method]


def engine_loop_of(engine: Engine, config: Config, **options: Any) -> EngineLoop:
    """Without a registry and without control, where `options` do not say otherwise."""
    usual: dict[str, Any] = {"registry": None, "is_controlled": False}
    return EngineLoop(
        engine,
        config,
        name="gpu-2-8000",
        url="",
        release=RELEASE,
        target_id="t",
        sink={},
        activity=Activity(),
        **(usual | options),
    )


def replica(engine: Engine | None = None, **serving: Any) -> Any:
    made: Any = Replica.__new__(Replica)
    made._config = Config.model_validate({"serving": {"vllm": serving}})
    made._release, made._registry, made._off, made._is_controlled = RELEASE, None, {}, False
    made._sink, made._target_id, made._target_dir, made._extension = {}, "t", "/t", "x.Y"
    made._awake_note, made.name, made._engine = "/data/replica-0.awake", "replica-0", engine
    made._activity, made._here, made._beside = Activity(), as_it_lies, None
    made._recent = None
    return made


@pytest.mark.parametrize("rank", range(2))
async def test_where_one_ranks_draft_cannot_sleep_all_are_told_to_stay_awake(rank: int) -> None:
    off: list[dict[str, str]] = [{}, {}]
    off[rank] = {"sleep": "it is gone"}
    made = replica(engine := Engine(*off))
    await made._start_beside(RELEASE)
    assert engine.asked("osd_stay_awake") == [()]
    assert made._off == {"sleep": "it is gone"}


@pytest.mark.parametrize(
    "off", [[{}, {}], [{"memory": "a name is gone"}, {}], [{}, {"memory": "?"}]]
)
async def test_ranks_ask_a_memory_of_their_own_where_all_can(off: list[dict[str, str]]) -> None:
    made = replica(engine := Engine(*off))
    await made._start_beside(RELEASE)
    assert engine.asked("osd_begin_to_ask") == ([] if any(off) else [()])


async def test_where_one_rank_refuses_the_hooks_nothing_more_is_asked() -> None:
    made = replica(engine := Engine({}, {}))
    engine.refused = "a head is not served"
    with pytest.raises(SwapError, match="^a head is not served$"):
        await made._start_beside(RELEASE)
    assert [name for name, _ in engine.calls] == ["osd_start"]


async def test_an_engine_may_begin_deaf_and_without_a_permit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = replica(engine := Engine({}))
    loop = engine_loop_of(engine, made._config, heard=(True, False))
    await loop.start(permits=False)
    (settings,) = engine.asked("osd_start")[0]
    told = json.loads(settings)
    assert (told["is_observed"], told["is_captured"]) == (True, False)
    assert engine.asked("osd_undrafted") == []
    assert await loop.go_back(RELEASE) is False, "nothing is pulled"


async def test_no_draft_is_put_into_an_engine_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked by the engine loop itself."""
    engine = Engine({})
    seen = list[Ranks]()

    class Noted(Ranks):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            seen.append(self)

    monkeypatch.setattr(engine_loop, "Ranks", Noted)
    loop = engine_loop_of(engine, Config())
    await loop.start(permits=False)
    (ranks,) = seen
    assert await ranks.can_swap()
    engine.is_asleep = True
    assert not await ranks.can_swap()


@pytest.mark.parametrize(
    "has_recent, is_captured, is_controlled, is_warmed",
    [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
async def test_a_memory_is_filled_where_requests_are_captured_and_speculation_is_controlled(
    has_recent: bool,
    is_captured: bool,
    is_controlled: bool,
    is_warmed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine({})
    config = Config.model_validate({"speculation": {"mode": "fixed"}})
    monkeypatch.setattr(engine_loop, "profile_path", lambda *_: Path("/nowhere"))
    asked: list[int] = []

    def recent(num_tokens: int) -> Iterator[list[Trace]]:
        asked.append(num_tokens)
        return iter(())

    engine.answer = "0"
    loop = engine_loop_of(
        engine,
        config,
        registry=SimpleNamespace(num_purges=lambda: 0),
        is_controlled=is_controlled,
        heard=(True, is_captured),
        recent=recent if has_recent else None,
    )
    await loop.start(permits=False)
    assert bool(asked) == is_warmed


async def test_where_all_can_none_is_told() -> None:
    made = replica(engine := Engine({}, {}))
    await made._start_beside(RELEASE)
    assert engine.asked("osd_stay_awake") == [] and made._off == {}


async def test_ranks_are_told_where_the_note_is() -> None:
    made = replica(engine := Engine({}, {}))
    await made._start_beside(RELEASE)
    (settings,) = engine.asked("osd_start")[0]
    assert json.loads(settings)["awake_note"] == "/data/replica-0.awake"


async def asked_of_vllm(monkeypatch: pytest.MonkeyPatch, made: Any) -> dict[str, Any]:
    """The arguments that a replica gives its engine."""
    found: dict[str, Any] = {}

    async def build(args: Any) -> tuple[Any, Any]:
        return None, None

    monkeypatch.setattr(of_replica.parts, "problem_with", lambda part: "")
    monkeypatch.setattr(of_replica.fixes, "problem_with_sampling", lambda: "")
    monkeypatch.setattr(of_replica, "refuse_undrafted", lambda: None)
    monkeypatch.setattr(of_replica, "engine_arguments", lambda model, extra: found.update(extra))
    monkeypatch.setattr(of_replica, "build_engine_and_app", build)
    monkeypatch.setattr(of_replica, "method_for", lambda draft: {"/v1": "eagle3"}[str(draft)])
    await made._build()
    return found


async def test_vllm_drafts_by_the_method_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (await asked_of_vllm(monkeypatch, replica()))["speculative_config"]
    assert (asked["method"], asked["model"]) == ("eagle3", "/v1")


@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
async def test_vllm_picks_draft_tokens_as_the_gate_judges_them(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    made = replica()
    speculation = made._config.speculation.model_copy(update={"draft_sample_method": how})
    made._config = made._config.model_copy(update={"speculation": speculation})
    asked = (await asked_of_vllm(monkeypatch, made))["speculative_config"]
    assert asked.get("draft_sample_method", "greedy") == how


@pytest.mark.parametrize(("num_ranks", "executor"), [(1, None), (2, "mp")])
async def test_ranks_are_processes_of_vllms_own(
    num_ranks: int, executor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a placement group of Ray, vLLM would ask Ray for them."""
    found = await asked_of_vllm(monkeypatch, replica(tensor_parallel_size=num_ranks))
    assert found.get("distributed_executor_backend") == executor


@pytest.mark.parametrize("runner", ["0", "1"])
@pytest.mark.parametrize("is_controlled", [True, False])
async def test_graphs_of_every_k_are_asked_for_where_the_control_may_choose_it(
    runner: str, is_controlled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    made = replica()
    if not is_controlled:
        monkeypatch.setattr(made, "_control_arguments", dict)
    asked = (await asked_of_vllm(monkeypatch, made))["speculative_config"]
    table = asked.get("num_speculative_tokens_per_batch_size")
    assert (table is not None) == (runner == "1" and is_controlled)
    assert table is None or [k for _, _, k in table] == [8, *range(9)], "the memory's, too"


@pytest.mark.parametrize(
    ("host", "vllm", "url"),
    [
        ("::1", {}, "http://[::1]:8000"),
        ("127.0.0.1", {"ssl_certfile": "/cert"}, "https://127.0.0.1:8000"),
        ("gpu-2", {"ssl-certfile": "/cert"}, "https://gpu-2:8000"),
    ],
)
def test_it_says_where_it_is(host: str, vllm: dict[str, str], url: str) -> None:
    made: Any = Replica.__new__(Replica)
    made._config = Config.model_validate({"serving": {"host": host, "vllm": vllm}})
    assert made.url == url
