"""What only a GPU can show, as one report: `scripts/gpu`.

    registry ─► runner: a process per check, each with its budget ─► Outcome ─► report.md, .json
                   └─ child ─► checks/NAME.py ─► Findings (a line per figure, kept if it crashes)

`--dry-run` takes the same way on the CPU engine with tiny models. Figures that only a GPU can give
are dropped there by `Findings`, so that none can be taken for a measurement.
"""
