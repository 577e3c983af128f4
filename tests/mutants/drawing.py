"""Which mutants are tried: one at each of the places that a fixed seed draws from the files."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec

MODULES = tuple(
    f"{folder}/{name}.py"
    for folder, names in {
        "osd/control": "policy rollback drift loops replica_watch trainer_link controller "
        "release_manager",
        "osd/releases": "store directory",
        "osd/exchange": "registry",
        "osd/observe": "slots series history",
        "osd/observe/dashboard": "guard admin",
        "serving": "headers pull",
        "serving/capture": "capture pick rows assemble running skips windows",
        "serving/speculation": "scheduler control requests trials sweep goodput estimates probes",
        "serving/swap": "swap proof",
        "buffers": "codec cursor redis_stream redis_writer memory",
        "trainer": "batch loss evaluate replay guard classes loop checkpoint",
    }.items()
    for name in names.split()
)
"""The files whose code keeps the project's promises."""


class MissingModules(Exception):
    """Files that mutants are wanted of are not there. The text names them."""


def check(modules: Iterable[str], checkout: Path) -> None:
    """Raises `MissingModules` unless each of these files is in the checkout."""
    missing = [module for module in modules if not (checkout / module).is_file()]
    if missing:
        raise MissingModules(
            f"not in the checkout: {', '.join(missing)}; "
            "MODULES in tests/mutants/drawing.py lists the files"
        )


def mutants_of(modules: Iterable[str], session: Path) -> list[MutationSpec]:
    """Every mutant that cosmic-ray can make of these files. It keeps them in the file `session`."""
    database = WorkDB(str(session), WorkDB.Mode.create)
    init([Path(module) for module in modules], database, {})
    return [mutation for item in database.work_items for mutation in item.mutations]


def draw(
    mutants: Iterable[MutationSpec], num_lines: Mapping[str, int], num: int, seed: int
) -> list[MutationSpec]:
    """`num` mutants, of each file in proportion to its lines, and at most one at each place.

    A place is an operator, number or condition with all its mutants of one kind. Drawing places
    keeps a `+`, which has eleven mutants, from being drawn eleven times as often."""
    places: dict[str, dict[tuple[object, ...], list[MutationSpec]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for mutant in mutants:
        kind = mutant.operator_name.partition("_")[0]
        places[str(mutant.module_path)][(*mutant.start_pos, kind)].append(mutant)
    random_of_run = random.Random(seed)
    drawn = []
    for module, quota in shares(num_lines, num).items():
        shuffled = random_of_run.sample(sorted(places[module], key=str), len(places[module]))
        candidates = (random_of_run.choice(places[module][place]) for place in shuffled)
        drawn += islice(filter(can_be_made, candidates), quota)
    return drawn


def can_be_made(mutant: MutationSpec) -> bool:
    """False for dotted names in `except (...)`: cosmic-ray counts them, but cannot replace them."""
    operator = get_operator(mutant.operator_name)(**mutant.operator_args)
    try:
        return mutate_code(mutant.module_path.read_text(), operator, mutant.occurrence) is not None
    except AttributeError:
        return False


def shares(sizes: Mapping[str, int], num: int) -> dict[str, int]:
    """`num` in parts proportional to the sizes. The largest remainders are rounded up."""
    exact = {name: num * size / sum(sizes.values()) for name, size in sizes.items()}
    parts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(sizes, key=lambda name: parts[name] - exact[name])
    for name in by_remainder[: num - sum(parts.values())]:
        parts[name] += 1
    return parts
