"""Files with words in capitals to fill in, filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping


def filled_in(text: str, words: Mapping[str, object]) -> str:
    """Each of the words, outside of comments, replaced by its value."""
    lines = []
    for line in text.splitlines():
        code, hash_sign, comment = line.partition("#")
        for word, value in words.items():
            code = re.sub(rf"(?<![\w$]){word}(?!\w)", str(value), code)
        lines.append(code + hash_sign + comment)
    return "\n".join(lines) + "\n"


def line_of(text: str, part: str, nth: int = 1) -> int:
    """The number of the nth line that has a part, from 1."""
    found = [number for number, line in enumerate(text.splitlines(), 1) if part in line]
    return found[nth - 1]
