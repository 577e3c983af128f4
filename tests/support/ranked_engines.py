"""Real vLLM on two ranks: tensor parallelism with a process each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from buffers.codec import decode_trace, encode_trace
from osd.config.schema import CaptureConfig
from osd.records import Trace, WorkerReport, decode
from serving.speculation.memory.ranks import RankMemory
from serving.swap import proof
from serving.worker import WorkerExtension
from tests.support.engines import Engine, settle
from tests.support.remembered import proposed_by
from tests.support.ways import SETTLED, WAYS

if name := os.environ.get(SETTLED):  # a rank's process, which an engine starts
    settle(next(way for way in WAYS if way.name == name))

PLAIN = (bool, int, float, str, type(None))
NUM_RANKS = 2


class RankWorker(WorkerExtension):
    """Traces go into files named after the rank that wrote them. Parts of it can be made to
    fail."""

    def osd_open_sink(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[Sequence[Trace]], int], Callable[[], dict[str, int]]]:
        self.osd_num_put = 0

        def put(traces: Sequence[Trace]) -> int:
            for trace in traces:
                path = Path(settings["path"]) / f"{self.osd_num_put:06}-rank-{self.rank}"
                path.write_bytes(encode_trace(trace))
                self.osd_num_put += 1
            return len(traces)

        return put, dict

    def osd_look(self, path: list[str]) -> tuple[bool, Any]:
        """What lies at a path of attributes of the first rank, and whether it can be sent."""
        if self.rank != 0:
            return True, None
        found: Any = self
        for name in path:
            found = getattr(found, name)
        if isinstance(found, dict) and all(isinstance(v, PLAIN) for v in found.values()):
            return True, found
        return isinstance(found, PLAIN), found if isinstance(found, PLAIN) else None

    def osd_proposed(self, prompt: list[int], answer: list[int], scope: str) -> list[int]:
        """What the first rank's memory proposes to a request that has begun like this."""
        return proposed_by(self.osd_ask._memory, prompt, answer, scope) if self.rank == 0 else []

    def osd_break_memory(self) -> None:
        """Of the first rank, where that has one."""
        if isinstance(self.osd_ask, RankMemory) and self.rank == 0:
            self.osd_ask._memory.propose = lambda *_, **__: 1 / 0  # type: ignore[union-attr]

    def osd_mend_memory(self) -> None:
        if isinstance(self.osd_ask, RankMemory) and self.rank == 0:
            vars(self.osd_ask._memory).pop("propose", None)
            self.osd_ask.problem = ""

    def osd_set_capture(self, changes: dict[str, Any]) -> None:
        if self.rank == 0:
            capture = self.osd_capture
            capture._config = capture._config.model_copy(update=changes)
            capture.assembler._config = capture._config

    def osd_set_budget(self, bytes_per_second: int) -> None:
        if self.rank == 0:
            assembler = self.osd_capture.assembler
            assembler._budget = type(assembler._budget)(bytes_per_second)

    def osd_break_hook(self, name: str) -> None:
        if self.rank == 0:
            setattr(self.osd_capture, name, lambda *_: 1 / 0)

    def osd_mend_hook(self, name: str) -> None:
        if self.rank == 0 and self.osd_hook is not None:
            delattr(self.osd_capture, name)
            self.osd_hook.is_listening = True

    def osd_break(self, rank: int, steps: list[str]) -> None:
        """On one rank, the named steps of its draft fail, each as often as it is named."""
        if self.rank == rank:
            self.osd_swapper._draft = Breaking(self, steps)  # type: ignore[assignment]

    def osd_break_sleep(self, rank: int) -> None:
        """On one rank, the next step of the sleeping draft fails."""
        if self.rank == rank and self.osd_lazy_draft is not None:
            self.osd_lazy_draft._before = lambda *_: {}["block"]  # type: ignore[attr-defined]

    def osd_touch_target(self, rank: int, factor: float) -> None:
        """Change one value of the target's last norm on one rank."""
        if self.rank == rank:
            parameters = self.model_runner.get_model().named_parameters()  # type: ignore[attr-defined]
            norm = next(value for name, value in parameters if name.endswith("norm.weight"))
            norm.data[3] *= factor

    def osd_count_passes(self) -> None:
        """From now on count the draft's forward passes, until `osd_passes(True)`."""
        self.osd_num_passes = 0

        def count(*_: Any) -> None:
            self.osd_num_passes += 1

        draft = self.get_draft_model()  # type: ignore[attr-defined]
        self.osd_counting = draft.register_forward_pre_hook(count)

    def osd_passes(self, is_last: bool) -> int:
        """Passes since the last call."""
        num, self.osd_num_passes = self.osd_num_passes, 0
        if is_last:
            self.osd_counting.remove()
        return num

    def osd_stands(self) -> dict[str, Any]:
        """What this rank says it serves, and what it holds."""
        swapper = self.osd_swapper
        held, version = swapper.first_report().held, swapper.version
        return {"version": version, "held": held, "is_whole": swapper.is_whole}


class Breaking:
    """A live draft of which the named steps fail. `half` puts in half of the weights and says
    nothing; `norm` and `embedding` put in one wrong value."""

    def __init__(self, worker: Any, steps: list[str]) -> None:
        self._worker, self._live, self._steps = worker, worker.osd_swapper._draft, steps
        if isinstance(self._live, Breaking):
            self._live = self._live._live

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._live, name)

        def broken(*arguments: Any) -> Any:
            if name in self._steps:
                self._steps.remove(name)
                raise MemoryError(f"no room to {name}")
            return act(*arguments)

        return broken

    def put(self, weights: Any) -> None:
        if self._asked("half"):
            kept = len(weights.values) // 2
            weights = type(weights)(dict(list(weights.values.items())[:kept]), {})
        self._live.put(weights)
        if self._asked("norm"):
            self._value("model.norm.weight")[3] += 0.5
        if self._asked("embedding"):
            self._spoil_embedding()
        if self._asked("put"):
            raise MemoryError("no room to put")

    def _asked(self, step: str) -> bool:
        if step not in self._steps:
            return False
        self._steps.remove(step)
        return True

    def _value(self, name: str) -> Any:
        return dict(self._worker.get_draft_model().named_parameters())[name].data

    def _spoil_embedding(self) -> None:
        table = self._worker.get_draft_model().model.embed_tokens
        indices = table.shard_indices
        first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        row = next(int(i) for i in proof.rows(table.org_vocab_size) if first <= i < end)
        table.weight.data[row - first, 5] += 0.5


class Far:
    """What lies at a path of attributes in the first rank's process: plain values are fetched, and
    nothing can be set."""

    def __init__(self, look: Callable[[list[str]], tuple[bool, Any]], path: list[str]) -> None:
        vars(self).update(_look=look, _path=path)

    def __getattr__(self, name: str) -> Any:
        path = [*self._path, name]
        is_plain, found = self._look(path)
        return found if is_plain else Far(self._look, path)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"{name} lies in another process")


class RankedEngine(Engine):
    """An engine of two ranks. What lies in its workers' processes is asked for by name."""

    WORKER = "tests.support.ranked_engines.RankWorker"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._directory = TemporaryDirectory()
        self.awake_note = ""
        """To be set before the hooks are started, as a replica sets it."""
        two = {"tensor_parallel_size": NUM_RANKS, "distributed_executor_backend": "mp"}
        super().__init__(*arguments, **{**two, **options})

    def _settings(self, capture: CaptureConfig, target_id: str) -> str:
        settings = json.loads(super()._settings(capture, target_id))
        more = {"sink": {"path": self._directory.name}, "awake_note": self.awake_note}
        return json.dumps(settings | more)

    def start_hooks(self, capture: CaptureConfig, target_id: str = "target") -> None:
        super().start_hooks(capture, target_id)
        self.rpc("osd_begin_to_ask")

    @property
    def worker(self) -> Any:
        """Of the first rank, to look at."""
        return Far(lambda path: self.rpc("osd_look", path), [])

    def set_capture(self, **changes: Any) -> None:
        self.rpc("osd_set_capture", changes)

    def traces(self) -> list[Trace]:
        """Those since the last call, in the order in which they were put: all are the first
        rank's."""
        found = self.traces_by_rank()
        assert found.keys() <= {0}, "other ranks see the same tokens: each trace would be twice"
        return found.get(0, [])

    def traces_by_rank(self) -> dict[int, list[Trace]]:
        """Rank -> its traces since the last call."""
        self.llm.llm_engine.step()
        self.rpc("osd_drain")
        found: dict[int, list[Trace]] = {}
        for path in sorted(Path(self._directory.name).iterdir()):
            found.setdefault(int(path.name[-1]), []).append(decode_trace(path.read_bytes()))
            path.unlink()
        return found

    def reports(self) -> list[WorkerReport]:
        """What each rank counted since the last call."""
        answers = self.llm.collective_rpc("osd_report", args=("test", "default"))
        return [decode(answer, WorkerReport) for answer in answers]

    def break_rank(self, rank: int, *steps: str) -> None:
        """These steps of a swap fail on one rank, each as often as it is named."""
        self.llm.collective_rpc("osd_break", args=(rank, list(steps)))

    def break_memory(self) -> None:
        """Whichever proposes."""
        if self.scheduler.has_memory_elsewhere:
            self.rpc("osd_break_memory")
        else:
            self.scheduler.osd.memory.propose = lambda *_, **__: 1 / 0

    def mend_memory(self) -> None:
        self.rpc("osd_mend_memory")
        vars(self.scheduler.osd.memory).pop("propose", None)

    def stands(self) -> list[Mapping[str, Any]]:
        """What each rank says it serves, and what it holds."""
        return list(self.llm.collective_rpc("osd_stands"))


class RankedPasses:
    """How often the draft ran, step by step, which all ranks must agree upon."""

    def __init__(self, engine: Engine) -> None:
        self.per_step: list[int] = []
        self._llm = engine.llm
        self._llm.collective_rpc("osd_count_passes")

    def next_step(self, _step: int) -> None:
        self.per_step.append(self._take(False))

    def close(self) -> None:
        self._take(True)

    def _take(self, is_last: bool) -> int:
        counts = set(self._llm.collective_rpc("osd_passes", args=(is_last,)))
        assert len(counts) == 1, f"ranks made different numbers of passes: {counts}"
        return int(counts.pop())
