# Each target is the only command needed on a fresh machine: set-up comes first, and takes seconds when nothing is to do.
.PHONY: demo test check setup docs mutants

demo: setup
	@.venv/bin/osd demo $(DEMO)

test: setup
	@scripts/test

check: setup
	@scripts/check

setup:
	@scripts/setup.sh

# Hundreds of small faults put into the code, one at a time: does a test notice? About an hour.
mutants: setup
	@.venv/bin/python -m tests.mutants $(MUTANTS)

docs: setup
	@.venv/bin/python scripts/make_configuration_docs.py
