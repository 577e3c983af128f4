"""The paragraphs of a manual page, from the man(7) macros: no tables, examples or headings."""

from __future__ import annotations

import re

FONTS = {"B": " ", "I": " ", "SM": " ", "SB": " "}
"""Macro -> what stands between its arguments."""
ALTERNATING = frozenset({"BR", "IR", "RB", "RI", "BI", "IB"})
HEADINGS = frozenset({"SH", "SS"})
BREAKS = frozenset({"PP", "P", "LP", "TP", "TQ", "IP", "HP", "RS", "RE", "sp", "br", "TH"})
SKIPPED = {"nf": "fi", "EX": "EE", "TS": "TE", "SY": "YS", "de": "."}
"""Macro that begins what is no prose -> the one that ends it."""
TRANSLATORS = ("ÜBERSETZUNG", "TRADUCTION", "TRADUCCIÓN", "ПЕРЕВОД")
"""Headings under which every page says the same."""
MDOC = ".Dd"
"""Begins a page in other macros, which are not read."""

_NAMED = {
    "aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "em": "—", "en": "–",
    "bu": "•", "co": "©", "rs": "\\", "ti": "~", "ha": "^", "mc": "µ", "->": "→", "Fo": "«",
    "Fc": "»", "bq": "„", "+-": "±",
}  # fmt: skip
_ESCAPE = re.compile(
    r"\\(?:f(?:\[[^]]*\]|\(..|.)|s[+-]?\d|\*(?:\[[^]]*\]|\(..|.)|\[(?P<long>[^]]*)\]|\((?P<two>..)"
    r"|(?P<one>.)|$)"
)
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def paragraphs_of_manual(text: str) -> list[str]:
    """What a reader sees as running text, each paragraph with single blanks."""
    if any(line.startswith(MDOC) for line in text.splitlines()):
        return []
    found: list[str] = []
    words: list[str] = []
    until, is_left_out = "", False

    def end() -> None:
        if words and not is_left_out:
            found.append(" ".join(" ".join(words).split()))
        words.clear()

    for line in text.splitlines():
        name, _, rest = line[1:].lstrip().partition(" ") if line[:1] in (".", "'") else ("", "", "")
        if until:
            until = "" if name == until else until
        elif not name:
            if line[:1] in (".", "'") or not line.strip():
                end()
            elif not line.startswith(('.\\"', "'\\\"")):
                words.append(plain(line))
        elif name.startswith('\\"'):
            continue
        elif name in SKIPPED:
            end()
            until = SKIPPED[name]
        elif name in HEADINGS:
            end()
            if name == "SH":
                is_left_out = rest.strip(' "').upper().startswith(TRANSLATORS)
        elif name in BREAKS:
            end()
        elif name in FONTS or name in ALTERNATING:
            words.append(FONTS.get(name, "").join(map(plain, arguments(rest))))
    end()
    return found


def arguments(text: str) -> list[str]:
    """The arguments of a macro: words, or several between quotation marks."""
    return [
        match[2] if match[1] is None else match[1].replace('""', '"')
        for match in _ARGUMENT.finditer(text)
    ]


def plain(text: str) -> str:
    """A line without roff's escapes."""
    return _ESCAPE.sub(_replaced, text)


def _replaced(match: re.Match[str]) -> str:
    if (name := match["long"] or match["two"]) is not None:
        if re.fullmatch(r"u[0-9A-F]{4,6}", name):
            return chr(int(name[1:], 16))
        return _NAMED.get(name, "")
    return {"-": "-", "e": "\\", " ": " ", "~": " ", "0": " ", "'": "´", "`": "`"}.get(
        match["one"] or "", ""
    )
