"""The checks of `scripts/gpu`: each module has a `measure(run)`, listed in
`benchmarks/gpu/registry.py`."""
