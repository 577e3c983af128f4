"""The paragraphs of a page of a book, without listings, titles and navigation."""

from __future__ import annotations

from html.parser import HTMLParser

BREAKS = frozenset({"ul", "ol", "dl", "li", "dt", "dd", "table", "tr", "td", "th", "h1", "h2"})
"""Elements that no paragraph goes on across."""


def paragraphs_of_html(text: str) -> list[str]:
    """What stands in `<p>` and `<div class="para">`, each with single blanks."""
    parser = _Paragraphs()
    parser.feed(text)
    parser.close()
    parser.end_paragraph()
    return parser.found


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._parts: list[str] | None = None
        """Of the paragraph that is open."""
        self._listings = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "pre":
            self.end_paragraph()
            self._listings += 1
        elif tag == "p" or (tag == "div" and given.get("class") == "para"):
            self.end_paragraph()
            is_title = "title" in (given.get("class"), given.get("id"))
            self._parts = None if is_title else []
        elif tag == "div" or tag in BREAKS:
            self.end_paragraph()

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._listings = max(0, self._listings - 1)
        elif tag in ("p", "div") or tag in BREAKS:
            self.end_paragraph()

    def handle_data(self, data: str) -> None:
        if self._parts is not None and not self._listings:
            self._parts.append(data)

    def end_paragraph(self) -> None:
        if words := "".join(self._parts or ()).split():
            self.found.append(" ".join(words))
        self._parts = None
