"""Word problems in the manner of GSM8K. The answers work out two or three steps."""

from __future__ import annotations

from random import Random

from osd.tiny.text_words import NAMES, two, words

ITEMS = words(
    "apples stamps marbles pencils books coins cookies shells stickers tickets flowers cards "
    "candles bottles eggs "
    "oranges buttons beads stones postcards"
)
PLACES = words("market fair library garden museum shop school beach")
BOXES = words("box bag basket crate jar tray")
WORKERS = words("baker farmer teacher gardener painter nurse driver potter")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def generate(rng: Random) -> tuple[str, str]:
    """A word problem and its worked answer."""
    return rng.choice((_buy_and_give, _pack, _earn, _share, _days, _save))(rng)


def _buy_and_give(rng: Random) -> tuple[str, str]:
    (name, friend), item, place = two(rng, NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    have, more, gift = rng.randint(11, 49), rng.randint(2, 9), rng.randint(2, 9)
    prompt = rng.choice(
        (
            f"{name} has {have} {item}. At the {place}, {name} buys {more} more and then gives "
            f"{gift} to {friend}. "
            f"How many {item} are left?",
            f"How many {item} does {name} keep after starting with {have}, buying {more} at the "
            f"{place} "
            f"and giving {gift} of them to {friend}?",
        )
    )
    total = have + more
    return prompt, (
        f"{name} starts with {have} {item}. After the {place} there are {have} + {more} = {total}. "
        f"Giving {gift} to {friend} leaves {total} - {gift} = {total - gift}. The answer is "
        f"{total - gift}."
    )


def _pack(rng: Random) -> tuple[str, str]:
    worker, item, box, day = (
        rng.choice(WORKERS),
        rng.choice(ITEMS),
        rng.choice(BOXES),
        rng.choice(DAYS),
    )
    each, boxes, spare = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    prompt = rng.choice(
        (
            f"On {day} a {worker} fills {boxes} times a {box} with {each} {item} and finds {spare} "
            "more. "
            f"How many {item} is that?",
            f"A {worker} puts {each} {item} in each {box}. On {day} there is room for {boxes} of "
            f"them, and {spare} "
            f"{item} stay outside. How many {item} are there?",
        )
    )
    packed = each * boxes
    return prompt, (
        f"Each {box} holds {each} {item}, so the {worker} packs {each} * {boxes} = {packed}. "
        f"With {spare} more that makes {packed} + {spare} = {packed + spare}. The answer is "
        f"{packed + spare}."
    )


def _earn(rng: Random) -> tuple[str, str]:
    name, worker, day, item = (
        rng.choice(NAMES),
        rng.choice(WORKERS),
        rng.choice(DAYS),
        rng.choice(ITEMS),
    )
    wage, hours, price = rng.randint(4, 9), rng.randint(4, 9), rng.randint(2, 9)
    prompt = rng.choice(
        (
            f"{name} works as a {worker} for {wage} dollars an hour. On {day} {name} works {hours} "
            "hours and spends "
            f"{price} dollars on {item}. How much money is left?",
            f"A {worker} called {name} is paid {wage} dollars per hour. After {hours} hours on "
            f"{day}, {price} dollars "
            f"go to {item}. How many dollars remain?",
        )
    )
    pay = wage * hours
    return prompt, (
        f"On {day} {name} earns {wage} * {hours} = {pay} dollars. After paying {price} dollars for "
        f"{item}, "
        f"{name} has {pay} - {price} = {pay - price} dollars. The answer is {pay - price}."
    )


def _share(rng: Random) -> tuple[str, str]:
    (name, friend), item, place = two(rng, NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    first, second, extra = rng.randint(11, 49), rng.randint(2, 9), rng.randint(2, 9)
    prompt = rng.choice(
        (
            f"{name} found {first} {item} in the {place} and {friend} found {second}. They lost "
            f"{extra} on the way. "
            f"How many {item} do they have together?",
            f"In the {place}, {name} collected {first} {item} while {friend} collected {second}. "
            f"If {extra} got lost, "
            f"how many {item} remain?",
        )
    )
    total = first + second
    return prompt, (
        f"Together {name} and {friend} had {first} + {second} = {total} {item}. They lost {extra}, "
        f"so {total} - {extra} = {total - extra} remain from the {place}. The answer is "
        f"{total - extra}."
    )


def _days(rng: Random) -> tuple[str, str]:
    name, item, (day, later), place = (
        rng.choice(NAMES),
        rng.choice(ITEMS),
        two(rng, DAYS),
        rng.choice(PLACES),
    )
    first, more, left = rng.randint(11, 49), rng.randint(2, 9), rng.randint(2, 9)
    prompt = rng.choice(
        (
            f"{name} sold {first} {item} at the {place} on {day} and {more} more than that on "
            f"{later}. "
            f"Of the latter, {left} came back. How many {item} were sold on {later}?",
            f"On {day} {name} sold {first} {item} at the {place}. On {later} it was {more} more, "
            "but buyers returned "
            f"{left}. How many {item} is that for {later}?",
        )
    )
    second = first + more
    return prompt, (
        f"On {later} {name} sold {first} + {more} = {second} {item} at the {place}. As {left} came "
        "back, "
        f"{second} - {left} = {second - left} remain. The answer is {second - left}."
    )


def _save(rng: Random) -> tuple[str, str]:
    (name, friend), day, item = two(rng, NAMES), rng.choice(DAYS), rng.choice(ITEMS)
    weekly, weeks, gift = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    prompt = rng.choice(
        (
            f"Every {day} {name} saves {weekly} dollars for {item}. After {weeks} weeks {friend} "
            f"adds {gift} dollars. "
            f"How many dollars are there?",
            f"{name} puts aside {weekly} dollars each {day} to buy {item}, and {friend} gives "
            f"{gift} dollars. "
            f"How much is there after {weeks} weeks?",
        )
    )
    saved = weekly * weeks
    return prompt, (
        f"In {weeks} weeks {name} saves {weekly} * {weeks} = {saved} dollars. The gift of {friend} "
        "makes it "
        f"{saved} + {gift} = {saved + gift} dollars for {item}. The answer is {saved + gift}."
    )
