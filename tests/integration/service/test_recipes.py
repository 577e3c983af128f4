"""A service that trains low-rank adapters, and one that trains in full with another loss.

One deployment, started again on the same data. The tests are one story, in this order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from osd.client.load import Answer
from osd.service.note import Running
from tests.integration.service.test_attached import texts
from tests.support import acceptance, services
from tests.support.pairs import Pair
from tests.support.processes import descendants, kill, named
from tests.support.services import Served, osd, status, wait_for_version, wait_until
from tests.support.traffic import PROMPTS, ask, prompt_texts

pytestmark = [pytest.mark.slow, pytest.mark.variants, pytest.mark.timeout(900)]

NAME = "test-recipes"
LORA = ("trainer.method=lora", "trainer.learning_rate=1.5e-2")
"""Three times the rate of the full training beside it, as in `osd bench ablation`."""
IN_FULL = ("trainer.method=full", "trainer.loss=lk_hybrid")
UNPRICED = "trainer.payback_seconds=0"
"""Rounds may take from the engine what they want."""
SHIFTED, AGAIN = prompt_texts(12, seed=2), prompt_texts(12, seed=3)


class Deployment:
    """`osd serve` on one data directory, which is started again with other settings."""

    def __init__(self, pair: Pair, directory: Path) -> None:
        self.pair, self.data = pair, directory / "data"
        self._logs = directory
        self.served: Served | None = None

    def start(self, *settings: str) -> None:
        own = services.settings(NAME, self.data, self.pair.target, self.pair.stranger)
        log = self._logs / f"serve-{len(settings)}-{time.time():.0f}.log"
        self.served = Served([*own, *settings], log)
        self.note: Running = self.served.wait_ready()

    def end(self) -> None:
        if self.served is not None:
            self.served.end()

    def ask(self, prompts: Sequence[str]) -> list[Answer]:
        answers = ask(self.note.service_url, prompts)
        assert [answer.error for answer in answers if not answer.ok] == []
        return answers

    def alpha(self, prompts: Sequence[str]) -> float:
        """What the draft that serves now is worth on these prompts."""
        return acceptance.alpha(acceptance.counts(self.ask(prompts)))

    def learns(self, prompts: Sequence[str], least: float, seconds: float = 150) -> float:
        """Serves these prompts until so much is accepted. The answers stay the same. Returns what
        was accepted at first."""
        first = newest = self.ask(prompts)
        deadline = time.monotonic() + seconds
        while (alpha := acceptance.alpha(acceptance.counts(newest))) < least:
            assert time.monotonic() < deadline, f"α is {alpha:.2f}"
            newest = self.ask(prompts)
            assert texts(newest) == texts(first)
        return acceptance.alpha(acceptance.counts(first))

    def drafts(self) -> list[dict[str, Any]]:
        return list(osd("drafts", "list", "--json", "--deployment", NAME))

    def swaps(self) -> list[str]:
        events = httpx.get(f"{self.note.control_url}/osd/events").json()
        return [event["text"] for event in events if event["kind"] in ("swapped", "swap_failed")]

    def trainer_log(self) -> str:
        (log,) = self.data.rglob("trainer.log")
        return log.read_text()

    def rounds(self) -> int:
        (latest,) = self.data.rglob("checkpoints/latest")
        return int(latest.read_text())

    def trainer(self) -> int:
        """Its process; 0 while there is none."""
        assert self.served is not None
        found = named(descendants(self.served.process.pid), "TrainerActor")
        return found[0] if found else 0


@pytest.fixture(scope="module")
def deployment(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(pair, tmp_path_factory.mktemp("recipes"))
    try:
        yield deployment
    finally:
        deployment.end()


def test_what_adapters_learn_is_served_and_outlives_their_trainer(deployment: Deployment) -> None:
    deployment.start(*LORA)
    first = deployment.learns(PROMPTS, 0.6)
    print(f"α {first:.2f} at first, {deployment.alpha(PROMPTS):.2f} in round {deployment.rounds()}")
    # The trainer is killed, and then the traffic shifts.
    rounds, trainer = deployment.rounds(), deployment.trainer()
    kill(trainer)
    wait_until(lambda: deployment.trainer() not in (0, trainer), 120, "the trainer is back")
    shifted = deployment.learns(SHIFTED, 0.55)
    kept = deployment.alpha(PROMPTS)
    print(f"after the shift α {shifted:.2f}, then {deployment.alpha(SHIFTED):.2f}", end="; ")
    print(f"on the prompts of before {kept:.2f}")
    assert max(first, shifted) < 0.3 < kept
    assert deployment.rounds() > rounds
    log = deployment.trainer_log()
    assert "trainer resumes after round" in log and "of other settings" not in log
    drafts = deployment.drafts()
    assert len(drafts) > 2 and {draft["kind"] for draft in drafts[1:]} == {"lora"}
    swaps = deployment.swaps()
    assert swaps and all("weights read back and equal" in text for text in swaps)


def test_the_draft_of_adapters_goes_on_in_full_with_another_loss(deployment: Deployment) -> None:
    """The service starts again on what LoRA released: vLLM loads it, the trainer begins with it."""
    if deployment.served is None:
        deployment.start(*LORA)
        deployment.learns(PROMPTS, 0.6)
    version = services.pause_training(deployment.note)
    before = deployment.alpha(PROMPTS)
    deployment.end()
    deployment.start(*IN_FULL, UNPRICED)
    wait_for_version(deployment.note.control_url, version)
    assert deployment.alpha(PROMPTS) == pytest.approx(before, abs=0.02)
    services.admin(deployment.note).admin("resume")
    first = deployment.learns(AGAIN, 0.55)
    services.pause_training(deployment.note)
    assert "starts from the serving draft: the checkpoint is of other" in deployment.trainer_log()
    (newest,) = (draft for draft in deployment.drafts() if draft["serving"])
    assert newest["kind"] == "full" and first < 0.3
    print(f"by lk_hybrid α {first:.2f}, then {deployment.alpha(AGAIN):.2f}")
    assert all("weights read back and equal" in text for text in deployment.swaps())


def test_rounds_replay_more_where_requests_are_few(deployment: Deployment) -> None:
    if deployment.served is None:
        deployment.start(*IN_FULL, UNPRICED)
    least = 2  # trainer.replay_batches of these services
    seen: set[int] = set()

    def is_longer() -> bool:
        deployment.ask(AGAIN)
        time.sleep(2.0)
        last = status(deployment.note.control_url)["last_round"]
        seen.update([last["replay_batches"]] if last is not None else [])
        return any(num > least for num in seen)

    services.admin(deployment.note).admin("resume")
    wait_until(is_longer, 120, "a round replays more than the least")
    services.pause_training(deployment.note)
    print(f"batches replayed for each new one: {sorted(seen)}")
    assert max(seen) <= 4 * least, "trainer.max_replay_growth"
