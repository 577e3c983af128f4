"""Which draft serves after any sequence of events.

A model of the rules is compared with the real store and registry.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from osd.common.clock import Clock
from osd.config.schema import Config
from osd.control.release_manager import ReleaseManager
from osd.errors import ReleaseError
from osd.records import ClassReport, EarlierReport, EvalReport, RoundOutcome
from osd.releases.store import ReleaseStore
from tests.unit.osd.control.test_controller import TARGET, MemoryRegistry, make_outcome

VERSIONS = st.integers(1, 12)


class ReleaseManagerMachine(RuleBasedStateMachine):
    """Rounds, rollbacks, changes by hand, restarts and Redis away, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="osd-machine-"))
        self.candidate = self.directory / "candidate"
        self.candidate.mkdir()
        (self.candidate / "config.json").write_text("{}")
        (self.candidate / "model.safetensors").write_bytes(b"weights")
        self.registry = MemoryRegistry()
        self.bad: set[int] = set()
        self.kept: set[int] = set()
        self.newest = 0

    def teardown(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    @initialize()
    def begin(self) -> None:
        self.restart()
        self.newest = self.store.publish(self.candidate, parent=0, target_id=TARGET).version

    @rule()
    def restart(self) -> None:
        """What is known then is what is on disk."""
        self.store = ReleaseStore(self.directory / "releases")
        config = Config.model_validate({"data_dir": str(self.directory), "releases": {"keep": 3}})

        async def tell(*records: Any) -> None:
            self.registry.feed += records

        self.drafts = ReleaseManager(config, self.registry, self.store, TARGET, tell, Clock())  # type: ignore[arg-type]

    def do(self, work: Any) -> Any:
        return asyncio.run(work)

    def serving(self) -> int:
        release = self.store.current(TARGET)
        assert release is not None, "something always serves"
        return release.version

    @rule(
        gain=st.floats(-0.5, 0.5),
        lost=st.booleans(),
        is_paused=st.booleans(),
        is_stale=st.booleans(),
    )
    def round_ends(self, gain: float, lost: bool, is_paused: bool, is_stale: bool) -> None:
        before, pinned = self.serving(), self.store.pinned()
        base = before + 1 if is_stale else before
        self.drafts.is_paused = is_paused
        self.do(self.drafts.conclude(outcome(self.candidate, base, gain, lost), {before}))
        may = gain > 0 and not lost and not is_paused and not is_stale and pinned is None
        assert (self.serving() != before) == may
        if may:
            assert self.serving() > self.newest, "version numbers are never given twice"
            self.newest = self.serving()

    @rule()
    def disappoints(self) -> None:
        current, pinned = self.store.current(TARGET), self.store.pinned()
        assert current is not None
        ancestors = self.offered() - {current.version}
        done = self.do(self.drafts.take_back(current, "α 0.1, 0.8 was measured"))
        assert done == (pinned is None and any(v < current.version for v in ancestors))
        if done:
            self.bad.add(current.version)
            assert self.serving() < current.version

    @rule(version=VERSIONS)
    def recall(self, version: int) -> None:
        current, pinned = self.store.current(TARGET), self.store.pinned()
        assert current is not None
        found = EarlierReport(
            version=version, num_traces=16, alpha_base=0.1, alpha=0.9, diff_low=0.7, since=1.0
        )
        if self.tried(self.drafts.recall(current, found)):
            may = pinned is None and not self.drafts.is_paused
            assert self.serving() == (version if may else current.version)

    @rule(version=VERSIONS)
    def promote(self, version: int) -> None:
        pinned = self.store.pinned()
        if self.tried(self.drafts.promote(version)):
            assert self.serving() == version and pinned in (None, version)

    @rule()
    def roll_back(self) -> None:
        before = self.serving()
        if self.tried(self.drafts.rollback()):
            assert self.serving() < before

    @rule(version=VERSIONS)
    def pin(self, version: int) -> None:
        if self.tried(self.drafts.pin(version)):
            assert self.serving() == version == self.store.pinned()

    @rule()
    def unpin(self) -> None:
        self.tried(self.drafts.unpin())
        assert self.store.pinned() is None

    @rule(version=VERSIONS)
    def keep(self, version: int) -> None:
        if self.tried(self.drafts.keep(version)):
            self.kept.add(version)

    @rule()
    def redis_goes(self) -> None:
        self.registry.is_away = True

    @precondition(lambda self: self.registry.is_away)
    @rule()
    def redis_comes_back_empty(self) -> None:
        self.registry.is_away = False
        self.registry.wishes.clear()
        self.do(self.drafts.restore_wanted())

    def tried(self, work: Any) -> bool:
        """Whether it was done; a refusal changes nothing and is one line."""
        before = self.serving()
        try:
            self.do(work)
        except ReleaseError as error:
            assert "\n" not in str(error)
            assert self.serving() == before
            return False
        return True

    def offered(self) -> set[int]:
        return {release.version for release in self.store.list(TARGET)} - self.bad

    @invariant()
    def a_bad_draft_never_serves(self) -> None:
        if self.newest:
            assert self.serving() not in self.bad
            assert self.bad == {v for v in self.store.bad() if v in self.bad}

    @invariant()
    def the_pinned_draft_serves(self) -> None:
        if self.newest and (pinned := self.store.pinned()) is not None:
            assert self.serving() == pinned

    @invariant()
    def replicas_want_what_the_disk_says(self) -> None:
        if (
            self.newest
            and not self.registry.is_away
            and (wanted := self.registry.wishes.get("default"))
        ):
            assert wanted.version == self.serving()

    @invariant()
    def what_is_kept_is_there(self) -> None:
        if self.newest:
            assert self.kept <= {release.version for release in self.store.list(TARGET)}


def outcome(candidate: Path, base: int, gain: float, lost: bool) -> RoundOutcome:
    made = make_outcome(str(candidate), base)
    report = made.eval
    assert isinstance(report, EvalReport)
    chat = {
        "num_traces": 20,
        "alpha_base": 0.8,
        "alpha_candidate": 0.5 if lost else 0.8,
        "diff_high": -0.1,
    }
    return replace(made, eval=replace(report, diff_low=gain, classes={"chat": ClassReport(**chat)}))  # type: ignore[arg-type]


ReleaseManagerMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestReleaseManager = ReleaseManagerMachine.TestCase
