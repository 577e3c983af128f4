"""Short business news to be summed up in two sentences that keep the figures."""

from __future__ import annotations

from random import Random

from osd.tiny.text_words import CITIES, NAMES, words

STEMS = words(
    "Nova Vertex Orion Delta Summit Harbor Falcon Granite Cedar Aurora Titan Pioneer Atlas Beacon "
    "Crown"
)
FIELDS = words(
    "Energy Motors Foods Bank Systems Pharma Steel Retail Airlines Media Insurance Robotics"
)
MONTHS = words(
    "January February March April May June July August September October November December"
)
PERIODS = ("first quarter", "second quarter", "third quarter", "fourth quarter", "full year")
REASONS = (
    "strong demand",
    "higher prices",
    "weak orders",
    "rising costs",
    "new products",
    "a softer currency",
    "lower taxes",
    "store closures",
)


def generate(rng: Random) -> tuple[str, str]:
    """A prompt that asks for a summary of a news item, and the summary."""
    company = f"{rng.choice(STEMS)} {rng.choice(FIELDS)}"
    return rng.choice((_results, _deal, _outlook, _debt))(rng, company)


def _money(rng: Random) -> str:
    return f"${rng.randint(1, 99)}.{rng.randint(1, 9)} {rng.choice(('million', 'billion'))}"


def _results(rng: Random, company: str) -> tuple[str, str]:
    revenue, percent, shares = _money(rng), rng.randint(2, 49), rng.randint(1, 19)
    period, reason, up = rng.choice(PERIODS), rng.choice(REASONS), rng.random() < 0.5
    rose, gained = ("rose", "gained") if up else ("fell", "lost")
    prompt = rng.choice(
        (
            f"Summarize: {company} said {period} revenue {rose} {percent}% to {revenue} because of "
            f"{reason}. "
            f"Its shares {gained} {shares}% in {rng.choice(CITIES)} trading.",
            f"Sum up this news. Citing {reason}, {company} posted revenue of {revenue} for the "
            f"{period}; it {rose} "
            f"{percent}% and the stock {gained} {shares}%.",
        )
    )
    return prompt, (
        f"{company} reported {period} revenue of {revenue}, {'up' if up else 'down'} {percent}% on "
        f"{reason}. "
        f"Shares {gained} {shares}% after the {'strong' if up else 'weak'} results."
    )


def _deal(rng: Random, company: str) -> tuple[str, str]:
    other, price, month = (
        f"{rng.choice(STEMS)} {rng.choice(FIELDS)}",
        _money(rng),
        rng.choice(MONTHS),
    )
    city, jobs = rng.choice(CITIES), rng.randint(2, 99) * 10
    prompt = rng.choice(
        (
            f"Summarize: {company} agreed to buy {other} of {city} for {price}. The deal should "
            f"close in {month} "
            f"and {jobs} jobs will go.",
            f"Sum up this news. {other}, based in {city}, will be sold to {company} in {month} at "
            f"a price of {price}, "
            f"with {jobs} jobs lost.",
        )
    )
    return prompt, (
        f"{company} will acquire {other} for {price}, with closing expected in {month}. "
        f"The takeover of the {city} firm costs {jobs} jobs."
    )


def _outlook(rng: Random, company: str) -> tuple[str, str]:
    chief, low, month = rng.choice(NAMES), rng.randint(2, 40), rng.choice(MONTHS)
    high, reason, profit = low + rng.randint(1, 9), rng.choice(REASONS), _money(rng)
    prompt = rng.choice(
        (
            f"Summarize: In {month}, {company} chief {chief} forecast sales growth of {low}% to "
            f"{high}% and a profit "
            f"of {profit}, pointing to {reason}.",
            f"Sum up this news. {chief}, who runs {company}, sees a profit of {profit} and growth "
            f"between {low}% and "
            f"{high}% due to {reason}, a {month} letter says.",
        )
    )
    return prompt, (
        f"{company} expects sales to grow {low}% to {high}% and profit to reach {profit}. "
        f"Chief executive {chief} cited {reason} in {month}."
    )


def _debt(rng: Random, company: str) -> tuple[str, str]:
    amount, rate, city = _money(rng), f"{rng.randint(1, 9)}.{rng.randint(1, 9)}", rng.choice(CITIES)
    month, years = rng.choice(MONTHS), rng.randint(2, 30)
    prompt = rng.choice(
        (
            f"Summarize: {company} raised {amount} in {city} by selling {years}-year bonds at "
            f"{rate}% in {month}.",
            f"Sum up this news. In {month}, investors in {city} bought bonds of {company} worth "
            f"{amount}, running "
            f"{years} years and paying {rate}%.",
        )
    )
    return prompt, (
        f"{company} sold {years}-year bonds worth {amount} to investors in {city}. "
        f"The debt issued in {month} pays interest of {rate}% a year."
    )
