"""`osd top`: frames from what a control port answers, and the command in a terminal of its own."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from rich.console import Console

from osd.errors import ConfigError, OSDError
from osd.observe.dashboard import build_app
from osd.observe.history import History
from osd.observe.top.curve import ASCII, BRAILLE, Dots, chart, draw, resample
from osd.observe.top.layout import View, frame, share
from osd.observe.top.reading import Answers, Readings, read, window_seconds
from osd.observe.top.run import can_show_braille
from osd.records import Event, SwapReport
from tests.support.dashboards import TOKEN, Scene, served, window
from tests.support.paths import ROOT

REMEDY = (
    "Redis is away, so nothing is learnt and no draft is swapped: start it again, or repair "
    "buffer.redis_url; "
    "answers go on"
)


class Port:
    """The control port over a scene, asked without a network."""

    url = "http://127.0.0.1:8001"

    def __init__(self, scene: Scene) -> None:
        self._client = TestClient(build_app(scene, scene.history, TOKEN), base_url=self.url)
        self.is_away = False

    def get(self, path: str, **params: Any) -> Any:
        if self.is_away:
            raise OSDError(f"{self.url}: no answer; is the service running?")
        return self._client.get(path, params=params).json()


@pytest.fixture
def scene() -> Scene:
    """Five minutes in which α rises from 0.2 to 0.8, and v3 takes over from v2 in the middle."""
    history, now = History(), time.time()
    for number in range(600):
        history.add(window(now - 300 + number / 2, 0.2 + 0.6 * number / 600))
    history.add(swap(now - 150, 3))
    text = "v3: held-out alpha 0.41 -> 0.72 on 40 requests"
    history.add(Event(at=now - 151, kind="published", text=text, version=3))
    return Scene(history)


def swap(at: float, version: int) -> SwapReport:
    return SwapReport(
        at=at,
        replica="replica-0",
        version=version,
        previous=version - 1,
        ok=True,
        stage_s=0.1,
        pause_s=0.006,
    )


def answers_of(scene: Scene, window_s: float = 300.0) -> Answers:
    return read(Port(scene), window_s)


def shown(answers: Answers, width: int = 80, height: int = 24, **fields: Any) -> list[str]:
    return [line.plain.rstrip() for line in frame(View(answers, "5m", **fields), width, height)]


def line_of(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(f"{name} "))


# What stands in a frame


def test_a_small_terminal_shows_all_of_it(scene: Scene) -> None:
    lines = shown(answers_of(scene), is_live=True)
    assert lines[0] == "all is well"
    assert re.fullmatch(
        r"now       alpha (7[89]|80)\.\d %  length 3\.\d\d  \d+ tokens/s  k 2\.0 of 5", lines[1]
    )
    assert lines[2] == "speed-up  net 1.31x (1.22 to 1.41) measured in 12 windows  auto: draft 3"
    requests = line_of(lines, "requests")
    found = re.fullmatch(
        r"requests  \d\.\d/s  6 running  tokens: target (\d+) %, draft (\d+) %, memory (\d+) %",
        requests,
    )
    assert found and 99 <= sum(map(int, found.groups())) <= 101
    for line in (
        "rows      30,800 captured  dropped none  skipped opted_out 24, not_sampled 6",
        "buffer    812 traces  115 held out  8.9 MiB  oldest 15 min old",
        "gate      published 2 min ago  v3: held-out alpha 0.41 -> 0.72 on 40 requests",
    ):
        assert line_of(lines, line.split()[0]) == line
    for start in (
        "trainer   idle: it has 9 of 32 new traces  loss 2.10 to 0.62",
        "release   v3  alpha 72.0 % predicted  71.5 % served  4 swaps, 1 rollb",
    ):
        assert line_of(lines, start.split()[0]).startswith(start)
    assert line_of(lines, "replicas") == "replicas  replica-0 v3 in step  replica-1 v3 in step"
    assert [line for line in lines if "swapped: replica-0: v2 -> v3, engine paused 6.0 ms" in line]
    assert lines[-1].startswith("q leaves  default at http://127.0.0.1:8001  up 2 h 30 min")
    assert len(lines) == 24


def test_a_service_that_has_done_nothing(scene: Scene) -> None:
    scene.history, scene.is_empty = History(), True
    lines = shown(answers_of(scene))
    assert lines[0].startswith("no replica is alive, so no request can be answered")
    assert line_of(lines, "now") == "now       no traffic in the last minute  k at most 5"
    assert line_of(lines, "speed-up") == "speed-up  net, not measured yet"
    assert line_of(lines, "rows") == "rows      0 captured  dropped none  skipped none"
    assert line_of(lines, "buffer") == "buffer    not read yet"
    assert line_of(lines, "trainer").endswith("no round yet")
    assert line_of(lines, "gate") == "gate      nothing judged yet"
    assert line_of(lines, "replicas") == "replicas  none alive"


def test_the_worst_problem_stands_first_with_all_of_its_remedy(scene: Scene) -> None:
    scene.changes = {"redis": "away", "paused": True}
    lines = shown(answers_of(scene))
    assert " ".join(lines[:2]) == REMEDY
    why = "training is paused, so the draft does not learn: `osd resume` ends it"
    assert lines[2] == f"also      {why}"
    assert line_of(lines, "buffer").startswith("buffer    Redis is away")


def test_a_replica_that_lags_stands_before_those_in_step(scene: Scene) -> None:
    one, other = scene.status().replicas
    scene.changes = {"replicas": (one, replace(other, lagging=True, version=2))}
    lines = shown(answers_of(scene), width=45)
    assert line_of(lines, "replicas") == "replicas  replica-1 v2 lagging, wanted v3"


@pytest.mark.parametrize(
    ("net", "said"),
    [
        ((None, None, None), "net, not measured yet"),
        ((1.2, None, None), "net 1.20x measured in 6 windows, too few for an interval"),
        ((0.9, 0.85, 0.95), "net 0.90x (0.85 to 0.95) measured in 6 windows"),
    ],
)
def test_a_speed_up_says_whether_it_was_measured(
    scene: Scene, net: tuple[float | None, ...], said: str
) -> None:
    one = scene.status().replicas[0]
    assert one.speculation_figures is not None
    measured = dict(zip(("net_ratio", "net_low", "net_high"), net, strict=True))
    figures = replace(one.speculation_figures, **measured)  # type: ignore[arg-type]
    scene.changes = {"replicas": (replace(one, speculation_figures=figures),)}
    assert line_of(shown(answers_of(scene)), "speed-up").startswith(f"speed-up  {said}")


# The curve


def heights(rows: list[str], dots: Dots) -> list[float | None]:
    """What a drawn curve says at each column of dots: the middle of its dots, as a share of the
    height."""
    down, found = len(dots.bits[0]), []
    codes = {dots.character(bits): bits for bits in range(1 << (8 if dots is BRAILLE else 3))}
    for cells in zip(*rows, strict=True):
        for column in dots.bits:
            lit = [
                down * row + y
                for row, c in enumerate(cells)
                for y in range(down)
                if codes[c] & column[y]
            ]
            found.append(1 - sum(lit) / len(lit) / (down * len(rows) - 1) if lit else None)
    return found


@pytest.mark.parametrize("dots", [BRAILLE, ASCII], ids=["braille", "ascii"])
def test_a_curve_says_what_the_history_says(scene: Scene, dots: Dots) -> None:
    values = resample(answers_of(scene).history, 60 * len(dots.bits))
    rows = draw(values, 8, dots)
    assert [len(row) for row in rows] == [60] * 8
    dot = 1 / (8 * len(dots.bits[0]) - 1)
    drawn = heights(rows, dots)
    assert sum(value is not None for value in drawn) > 0.95 * len(drawn)
    for number, (said, value) in enumerate(zip(drawn, values, strict=True)):
        if said is not None and value is not None:
            assert abs(said - value) <= 1.5 * dot
            assert abs(said - (0.2 + 0.6 * number / len(values))) < 0.06


def test_points_are_weighed_by_their_tokens_and_nothing_is_made_up_between_them() -> None:
    series = {
        "at": [0.0, 10.0, 20.0, 30.0],
        "alpha": [0.5, 0.8, None, 0.1],
        "tested": [30, 10, None, 0],
    }
    history = {"series": series, "since": 0.0, "bucket": 10.0, "now": 40.0, "marks": []}
    assert resample(history, 4) == [0.5, 0.8, None, None]
    assert resample(history, 2) == [pytest.approx((15 + 8) / 40), None]
    assert resample(history, 8) == [0.5, 0.5, 0.8, 0.8, None, None, None, None]
    blank = draw([1.0, None, None, 0.0], 2, ASCII)
    assert blank == ["'   ", "   ."]


def test_a_mark_stands_where_the_draft_began_to_serve(scene: Scene) -> None:
    plot = [line.plain for line in chart(answers_of(scene).history, "5m", 109, 9, BRAILLE)]
    assert abs(plot[-1].index("◆v3") - (9 + 50)) <= 1
    assert plot[-1].startswith("    -5m")
    assert "┊" in plot[0] and plot[0].index("┊") == plot[-1].index("◆v3")


def test_of_marks_that_would_touch_the_newest_keep_their_names(scene: Scene) -> None:
    now = time.time()
    for version in range(4, 30):
        scene.history.add(swap(now - 60 + 2 * version, version))
    names = chart(answers_of(scene).history, "5m", 80, 9, BRAILLE)[-1].plain
    assert len(names) <= 80
    assert names.rstrip().endswith("v29◆")
    assert all(
        name in {f"◆v{v}" for v in range(2, 30)} | {"◆", "v29◆"} for name in names.split()[1:]
    )


# Sizes


@pytest.mark.parametrize("is_plain", [False, True])
def test_no_frame_is_larger_than_its_terminal(scene: Scene, is_plain: bool) -> None:
    scene.changes = {"redis": "away", "paused": True, "alarm": "漢字 " * 40, "target": "模型" * 30}
    answers = answers_of(scene)
    for width in (1, 2, 9, 20, 41, 79, 80, 133, 300):
        for height in (1, 2, 3, 7, 12, 23, 24, 60):
            view = View(answers, "5m", is_live=True, is_plain=is_plain)
            lines = frame(view, width, height)
            assert 1 <= len(lines) <= height
            assert all(line.cell_len <= width and "\n" not in line.plain for line in lines), (
                width,
                height,
            )
            if is_plain:
                assert all(line.plain.isascii() for line in lines)


@pytest.mark.parametrize(
    ("height", "left"),
    [
        (2, ["figures"]),
        (8, ["figures", "curve"]),
        (16, ["figures", "curve", "loop"]),
        (17, ["figures", "curve", "loop", "others"]),
        (21, ["figures", "curve", "loop", "others", "events"]),
        (22, ["figures", "curve", "loop", "others", "events", "foot"]),
    ],
)
def test_what_matters_least_goes_first(height: int, left: list[str]) -> None:
    assert [name for name, num in share(height, num_others=1, num_events=50).items() if num] == left


def test_a_tall_terminal_is_filled_with_curve_and_events() -> None:
    rooms = share(59, num_others=1, num_events=50)
    assert sum(rooms.values()) == 59 and rooms["curve"] == 18 and rooms["events"] > 20


def test_a_narrow_terminal_keeps_the_first_figures_and_the_trainer(scene: Scene) -> None:
    answers = answers_of(scene)
    wide, narrow = shown(answers, width=160), shown(answers, width=36, height=14)
    assert "TPOT" in line_of(wide, "now") and "acceptance rate" in line_of(wide, "now")
    assert re.fullmatch(r"now       alpha \d\d\.\d %  length 3\.\d\d", line_of(narrow, "now"))
    assert [line.split()[0] for line in narrow[-5:]] == ["─", "rows", "trainer", "gate", "replicas"]


# What others wrote


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m[red]red[/red] :bomb: a\r\nb\x00\u202egnp.exe\u200b"


def test_untrusted_text_is_neither_obeyed_nor_understood(scene: Scene) -> None:
    one, other = scene.status().replicas
    assert one.speculation_figures is not None
    figures = replace(one.speculation_figures, plan=HOSTILE, problem=HOSTILE)
    hostile = replace(
        one, replica=HOSTILE, capture_skipped={HOSTILE: 3}, speculation_figures=figures
    )
    scene.changes = {
        "replicas": (hostile, other),
        "deployment": HOSTILE,
        "target": HOSTILE,
        "phase_detail": HOSTILE,
        "alarm": HOSTILE,
    }
    scene.history.add(Event(at=time.time(), kind=HOSTILE, text=f"class {HOSTILE} would pay"))
    for is_plain in (False, True):
        for away in ("", "gone"):
            output = io.StringIO()
            console = Console(
                file=output,
                force_terminal=True,
                width=400,
                color_system="standard",
                highlight=False,
            )
            for line in frame(View(answers_of(scene), "5m", away, is_plain=is_plain), 400, 60):
                console.print(line, soft_wrap=True)
            written = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())
            assert all(c.isprintable() or c == "\n" for c in written)
            assert "[red]red[/red] :bomb: a b?" in written


# A service that goes away


def test_the_last_answers_stay_while_the_service_is_away(scene: Scene) -> None:
    port, connections = Port(scene), []

    def connect() -> Port:
        connections.append(1)
        if port.is_away:
            raise ConfigError("no service of this user is running here")
        return port

    readings = Readings(connect, 300.0, pause_s=0.02)
    try:
        answers, away = readings.latest()
        assert away == "" and answers.status.version == 3
        port.is_away = True
        away = wait(lambda: readings.latest()[1])
        assert re.match(r"away for \d+ s: (.*no answer|no service of this user)", away)
        kept = readings.latest()[0]
        lines = shown(kept, away=away)
        assert lines[0] == away[:80] and line_of(lines, "release").startswith("release   v3")
        scene.version, port.is_away = 4, False
        wait(lambda: readings.latest()[0].status.version == 4)
        assert readings.latest()[1] == "" and len(connections) > 1
    finally:
        readings.close()


@pytest.mark.parametrize("answer", [None, [], {}, {"status": "ok"}, 7, "fine"])
def test_a_page_that_is_no_control_port_is_an_error_of_one_line(answer: Any) -> None:
    """It answers no JSON (None here), or JSON of something else."""

    class Page:
        url = "http://127.0.0.1:80"

        def get(self, path: str, **params: Any) -> Any:
            if answer is None:
                raise ValueError("Expecting value: line 1 column 1 (char 0)")
            return answer

    with pytest.raises(OSDError, match="no control port"):
        Readings(Page, 300.0)


def wait(found: Any) -> Any:
    deadline = time.monotonic() + 30
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


# The command


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("90min", 5400), ("24h", 86_400), ("7d", 604_800)]
)
def test_windows(text: str, seconds: float) -> None:
    assert window_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0m", "32d", "5 weeks", "-5m"])
def test_a_window_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--window="):
        window_seconds(text)


def test_braille_is_for_terminals_that_have_it() -> None:
    assert can_show_braille("utf-8", "UTF-8", "xterm-256color")
    assert not can_show_braille("utf-8", "ANSI_X3.4-1968", "xterm")
    assert not can_show_braille("iso8859-1", "UTF-8", "xterm")
    assert not can_show_braille("utf-8", "UTF-8", "linux")


def command(url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "osd", "top", "--url", url, *more]


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: v
        for name, v in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    }
    return (
        kept | {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8", "TERM": "xterm-256color"} | more
    )


def test_without_a_terminal_it_prints_one_frame_without_colour(scene: Scene) -> None:
    with served(scene) as url:
        env = environment(COLUMNS="100", LINES="31", FORCE_COLOR="1")
        done = subprocess.run(
            command(url), env=env, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "all is well" and len(lines) <= 30 and max(map(len, lines)) <= 100
    assert "\x1b" not in done.stdout
    assert re.search("[\u2801-\u28ff]", done.stdout) and "◆v3" in done.stdout
    assert "q leaves" not in done.stdout


@pytest.mark.parametrize(
    "more", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}], ids=["output", "locale"]
)
def test_where_there_is_no_braille_it_writes_ascii(scene: Scene, more: dict[str, str]) -> None:
    scene.history.add(Event(at=time.time(), kind="refused", text="class naïve would pay"))
    with served(scene) as url:
        done = subprocess.run(
            command(url, "--once"),
            env=environment(**more),
            cwd=ROOT,
            capture_output=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert b"^v3" in done.stdout and b"class na?ve would pay" in done.stdout
    assert re.search(rb"\n +\|[ :]*[.'-]{4}", done.stdout)


def test_a_wrong_window_is_said_in_one_line(scene: Scene) -> None:
    done = subprocess.run(
        command("http://127.0.0.1:9", "--window", "week"),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    remedy = "give a span of at most 31 days, like 5m, 1h, 24h, 7d"
    assert done.stderr == f"osd: --window=week: {remedy}\n"


class Terminal:
    """`osd top` in a pseudo-terminal of 80 x 24."""

    def __init__(self, url: str, **more: str) -> None:
        self.fd, self._inner = pty.openpty()
        fcntl.ioctl(self._inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes_before = self.modes()
        self.written = ""
        self.process = subprocess.Popen(
            command(url),
            env=environment(**more),
            cwd=ROOT,
            stdin=self._inner,
            stdout=self._inner,
            stderr=self._inner,
            preexec_fn=self._take,
        )

    def _take(self) -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._inner)

    def read_until(self, text: str, after: int = 0) -> int:
        """The place behind `text` in all that was written; colours do not count."""
        deadline = time.monotonic() + 60
        while (found := self.plain().find(text, after)) < 0:
            assert time.monotonic() < deadline, self.plain()[-3000:]
            if select.select([self.fd], [], [], 0.2)[0]:
                self.written += os.read(self.fd, 65536).decode(errors="replace")
        return found + len(text)

    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.written)

    def end(self) -> int:
        """Its exit status, once all that it wrote was read."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None or select.select([self.fd], [], [], 0)[0]:
            assert time.monotonic() < deadline
            if select.select([self.fd], [], [], 0.1)[0]:
                self.written += os.read(self.fd, 65536).decode(errors="replace")
        return self.process.returncode


@contextmanager
def terminal(url: str, **more: str) -> Iterator[Terminal]:
    opened = Terminal(url, **more)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.fd)
        os.close(opened._inner)


@pytest.mark.parametrize("way", ["q", "ctrl-c", "sigterm"])
def test_it_leaves_the_terminal_as_it_was(scene: Scene, way: str) -> None:
    with served(scene) as url, terminal(url) as top:
        top.read_until("q leaves")
        assert "\x1b[?1049h" in top.written and "\x1b[?25l" in top.written
        assert top.modes() != top.modes_before
        if way == "sigterm":
            top.process.send_signal(signal.SIGTERM)
        else:
            os.write(top.fd, {"q": b"q", "ctrl-c": b"\x03"}[way])
        assert top.end() == 0
        assert top.modes() == top.modes_before
    assert top.written.rindex("\x1b[?1049l") > top.written.rindex("\x1b[?1049h")
    assert top.written.rindex("\x1b[?25h") > top.written.rindex("\x1b[?25l")
    assert "Traceback" not in top.written


def test_a_frame_follows_the_terminals_size(scene: Scene) -> None:
    with served(scene) as url, terminal(url) as top:
        place = top.read_until("q leaves")
        fcntl.ioctl(top.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 14, 60, 0, 0))
        place = top.read_until("─ loop ".ljust(60, "─"), place)
        top.read_until("replicas", place)
        assert "q leaves" not in top.plain()[place:]


def test_colour_is_left_out_where_it_is_not_wanted(scene: Scene) -> None:
    coloured = r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m"
    with served(scene) as url:
        for more, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
            with terminal(url, **more) as top:
                top.read_until("q leaves")
                assert bool(re.search(coloured, top.written)) == is_coloured


def test_it_goes_on_when_the_service_is_back(scene: Scene) -> None:
    with served(scene) as url:
        port = int(url.rpartition(":")[2])
        top = Terminal(url)
        place = top.read_until("all is well")
    try:
        place = top.read_until("no answer", place)
        place = top.read_until("release   v3", place)
        scene.version = 7
        with served(scene, port):
            place = top.read_until("all is well", place)
            top.read_until("release   v7", place)
            os.write(top.fd, b"q")
            assert top.end() == 0
    finally:
        top.process.kill()
        top.process.wait()
        os.close(top.fd)
