"""Small programming tasks answered with a Python function: signature, docstring, body."""

from __future__ import annotations

from random import Random

from osd.tiny.text_words import words

VERBS = words("get find pick collect select gather filter extract take build make compute")
KINDS = words("new good valid large small daily final main recent local total fresh")
NOUNS = words(
    "values items numbers scores prices points sizes weights counts ages rates marks steps totals"
)
COMPARISONS = (
    ("greater than", ">"),
    ("less than", "<"),
    ("at least", ">="),
    ("at most", "<="),
    ("equal to", "=="),
    ("different from", "!="),
)
CHANGES = (("plus", "+"), ("minus", "-"), ("times", "*"), ("divided by", "/"), ("modulo", "%"))


def generate(rng: Random) -> tuple[str, str]:
    """A task and a function that does it."""
    name = f"{rng.choice(VERBS)}_{rng.choice(KINDS)}_{rng.choice(NOUNS)}"
    return rng.choice((_select, _change, _count, _total, _first))(rng, name, rng.choice(NOUNS))


def _select(rng: Random, name: str, arg: str) -> tuple[str, str]:
    (words, sign), n = rng.choice(COMPARISONS), rng.randint(2, 99)
    prompt = rng.choice(
        (
            f"Write a Python function {name} that returns the {arg} {words} {n} as a list.",
            f"Please implement {name}({arg}), which keeps only what is {words} {n}.",
        )
    )
    return prompt, (
        f'def {name}({arg}):\n    """Return the {arg} {words} {n}."""\n    result = []\n    for x '
        f"in {arg}:\n"
        f"        if x {sign} {n}:\n            result.append(x)\n    return result"
    )


def _change(rng: Random, name: str, arg: str) -> tuple[str, str]:
    (words, sign), n = rng.choice(CHANGES), rng.randint(2, 99)
    prompt = rng.choice(
        (
            f"Write a Python function {name} that returns a list of all {arg} {words} {n}.",
            f"Please implement {name}({arg}): each of them {words} {n}, as a list comprehension.",
        )
    )
    return prompt, (
        f'def {name}({arg}):\n    """Return each of the {arg} {words} {n}."""\n    return [x '
        f"{sign} {n} for x in {arg}]"
    )


def _count(rng: Random, name: str, arg: str) -> tuple[str, str]:
    (words, sign), n = rng.choice(COMPARISONS), rng.randint(2, 99)
    prompt = rng.choice(
        (
            f"Write a Python function {name} that counts how many {arg} are {words} {n}.",
            f"How would {name}({arg}) look in Python if it counts what is {words} {n}?",
        )
    )
    return prompt, (
        f'def {name}({arg}):\n    """Count the {arg} {words} {n}."""\n    count = 0\n    for x in '
        f"{arg}:\n"
        f"        if x {sign} {n}:\n            count += 1\n    return count"
    )


def _total(rng: Random, name: str, arg: str) -> tuple[str, str]:
    (words, sign), n = rng.choice(CHANGES), rng.randint(2, 99)
    prompt = rng.choice(
        (
            f"Write a Python function {name} that adds up all {arg}, each {words} {n}.",
            f"In Python, how do I write {name}({arg}) to sum them, each {words} {n}?",
        )
    )
    return prompt, (
        f'def {name}({arg}):\n    """Add up the {arg}, each {words} {n}."""\n    total = 0\n    '
        f"for x in {arg}:\n"
        f"        total += x {sign} {n}\n    return total"
    )


def _first(rng: Random, name: str, arg: str) -> tuple[str, str]:
    (words, sign), n = rng.choice(COMPARISONS), rng.randint(2, 99)
    prompt = rng.choice(
        (
            f"Write a Python function {name} that returns the first of the {arg} that is {words} "
            f"{n}, or None.",
            f"I need {name}({arg}) in Python: the index of the first entry {words} {n}.",
        )
    )
    by_index = "index" in prompt
    loop = f"for i, x in enumerate({arg}):" if by_index else f"for x in {arg}:"
    what = "index of the first" if by_index else "first"
    return prompt, (
        f'def {name}({arg}):\n    """Return the {what} of the {arg} {words} {n}."""\n    {loop}\n'
        f"        if x {sign} {n}:\n            return {'i' if by_index else 'x'}\n    return None"
    )
