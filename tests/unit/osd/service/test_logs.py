"""What the parts of a service logged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from osd.errors import OSDError
from osd.records import Place
from osd.service import logs
from osd.service.logs import BYTES_PER_LINE, PartLogs, tail

PLACES = [Place(part=part, host="gpu-2", node="5f", log=f"/{part}.log") for part in "ab"]


class Places:
    def places(self) -> list[Place]:
        return PLACES


def test_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    path.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert tail(str(path), 2) == "line 998\nline 999"
    assert tail(str(path), 5000).splitlines()[0] == "line 0"
    path.write_text("x" * 10 * BYTES_PER_LINE + "\nlast")
    assert tail(str(path), 1) == "last"
    path.write_bytes(b"\xff\n")
    assert tail(str(path), 9) == "\ufffd"


def test_a_log_is_read_where_the_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(logs.cluster, "run_on", lambda *given: asked.append(given) or "text")
    assert PartLogs(Places()).tail("b", 7) == "text"  # type: ignore[arg-type]
    assert asked == [(PLACES[1], tail, "/b.log", 7)]
    with pytest.raises(OSDError, match="^c: no part of this service; there are a, b$"):
        PartLogs(Places()).tail("c", 7)  # type: ignore[arg-type]


PART = """
from pathlib import Path
from osd.errors import ReplayBufferError
from osd.service import logs

class Registry:
    def set_place(self, place):
        print("noted", place.part, place.log)
        if {is_away}:
            raise ReplayBufferError("Redis is away")

logs.cluster.node_id = lambda: "5f"
logs.begin_log(Path("{directory}"), "trainer", Registry())
logs.logger.info("hello")
"""


@pytest.mark.parametrize("is_away", [False, True])
def test_a_part_notes_its_place_and_logs_there(tmp_path: Path, is_away: bool) -> None:
    text = PART.format(directory=tmp_path / "logs", is_away=is_away)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    path = tmp_path / "logs/trainer.log"
    said = path.read_text()
    assert f"noted trainer {path}" in said and "hello" in said
    assert ("does not know this part, for Redis is away" in said) is is_away
    assert path.stat().st_mode & 0o777 == 0o600
