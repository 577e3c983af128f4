"""A frame: as many lines as fit the terminal; the least important are left out first."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from rich.text import Text

from osd.observe.top import parts
from osd.observe.top.curve import ASCII, BRAILLE, chart
from osd.observe.top.parts import Line
from osd.observe.top.reading import Answers

NAME_WIDTH = 9
LEAST_OF_A_PHRASE = 26
"""Columns, the space before it among them; longer than any that is a number."""
NUM_FIGURES, NUM_STAGES = 2, 7
LEAST_CURVE, MOST_CURVE = 6, 18
"""Lines, its title and marks among them."""
FEW_EVENTS = 4
"""Lines, the title among them."""
FEW_OTHERS = 2
HEALTH_LINES = 3
CHAIN = "requests ─► rows ─► buffer ─► trainer ─► gate ─► release ─► replicas"
PLAIN = str.maketrans("─►┤┊◆…", "->|:^~")
"""One ASCII character for each of ours."""


@dataclass(frozen=True, slots=True)
class View:
    """What a frame shows.

    Example:
        View(answers, window="5m", away="away for 4 s: http://127.0.0.1:8001: no answer",
             is_live=True, is_plain=False)
    """

    answers: Answers
    window: str
    """As the user gave it."""
    away: str = ""
    """Why there are no newer answers."""
    is_live: bool = False
    """Whether keys are heard."""
    is_plain: bool = False
    """Whether there is nothing but ASCII."""


def frame(view: View, width: int, height: int) -> list[Text]:
    """At most `height` lines, each of at most `width` columns."""
    head = _health(view, width, height)
    events, others = parts.events(view.answers), parts.others(view.answers)
    rooms = share(height - len(head), num_others=len(others), num_events=len(events))
    lines = [
        *head,
        *(_fit(line, width) for line in others[: rooms["others"]]),
        *(_fit(line, width) for line in parts.figures(view.answers)[: rooms["figures"]]),
        *_curve(view, width, rooms["curve"]),
        *_titled(
            CHAIN if len(CHAIN) + 3 <= width else "loop",
            _most_important(parts.loop(view.answers), rooms["loop"] - 1),
            width,
            rooms["loop"],
        ),
        *_titled("events", events, width, rooms["events"]),
        *([_fit(parts.foot(view.answers, view.is_live), width)] if rooms["foot"] else []),
    ]
    return [_plain(line) for line in lines] if view.is_plain else lines


def share(height: int, *, num_others: int, num_events: int) -> dict[str, int]:
    """Lines for each part: first each at its least, in the order of importance, then what is left
    over."""
    all_events = 1 + num_events if num_events else 0
    rooms = dict.fromkeys(("figures", "curve", "loop", "others", "events", "foot"), 0)
    for name, least, most in (
        ("figures", 1, NUM_FIGURES),
        ("curve", LEAST_CURVE, LEAST_CURVE),
        ("loop", 2, 1 + NUM_STAGES),
        ("others", 1, min(FEW_OTHERS, num_others)),
        ("events", 2, min(FEW_EVENTS, all_events)),
        ("foot", 1, 1),
    ):
        if height >= least:
            rooms[name] = min(most, height)
            height -= rooms[name]
    for name, most in (("curve", MOST_CURVE), ("others", num_others), ("events", all_events)):
        more = min(most - rooms[name], height) if rooms[name] else 0
        rooms[name] += more
        height -= more
    return rooms


def _health(view: View, width: int, height: int) -> list[Text]:
    """The worst problem, folded, since its remedy stands at the end."""
    text, style = parts.health(view.answers, view.away)
    num_lines = 1 if view.away else max(1, min(HEALTH_LINES, height // 8))
    folded = textwrap.wrap(text, width) or [""]
    rows = (
        [*folded[: num_lines - 1], " ".join(folded[num_lines - 1 :])]
        if len(folded) > num_lines
        else folded
    )
    return [_cut(Text(row, style), width) for row in rows]


def _curve(view: View, width: int, height: int) -> list[Text]:
    if not height:
        return []
    dots = ASCII if view.is_plain else BRAILLE
    rows = chart(view.answers.history, view.window, width, height - 1, dots)
    return [
        _title(f"alpha over the last {view.window}, ◆ a new draft", width),
        *(_cut(row, width) for row in rows),
    ]


def _most_important(lines: list[Line], num: int) -> list[Line]:
    kept = sorted(line.importance for line in lines)[: max(0, num)]
    return [line for line in lines if line.importance in kept]


def _titled(title: str, lines: list[Line], width: int, height: int) -> list[Text]:
    if not height:
        return []
    return [_title(title, width), *(_fit(line, width) for line in lines[: height - 1])]


def _title(text: str, width: int) -> Text:
    return _cut(Text(f"─ {text} ".ljust(width, "─"), "dim"), width)


def _fit(line: Line, width: int) -> Text:
    """The line with as many phrases as fit; the last is cut if enough of it stays readable."""
    phrases = list(line.phrases)
    while len(phrases) > 1 and _joined(line.name, phrases).cell_len > width:
        if _joined(line.name, phrases[:-1]).cell_len + LEAST_OF_A_PHRASE <= width:
            break
        phrases.pop()
    return _cut(_joined(line.name, phrases), width)


def _joined(name: str, phrases: list[parts.Phrase]) -> Text:
    text = Text(f"{name:<{NAME_WIDTH}} " if name else "", "")
    text.stylize("dim")
    for number, (phrase, style) in enumerate(phrases):
        text.append("  " if number else "")
        text.append(phrase, style or None)
    return text


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def _plain(text: Text) -> Text:
    """One character for each, so that styles stay where they are."""
    text.plain = text.plain.translate(PLAIN).encode("ascii", "replace").decode()
    return text
