"""Online speculative distillation: the floor (records, config, errors) and the roof (CLI,
controller, dashboard)."""

__version__ = "0.1.0"
