# Each target is the only command needed on a fresh machine. It sets the project up first, which
# takes seconds when that is done already.
.PHONY: demo test test-slow test-cluster check setup docs mutants

demo: setup
	@.venv/bin/osd demo $(DEMO)

test: setup
	@scripts/test

test-slow: setup
	@scripts/setup_tests.sh
	@scripts/test_slow $(STAGES)

# Needs root, ssh, rsync and iproute2.
test-cluster: setup
	@.venv/bin/python -m pytest tests/cluster

check: setup
	@scripts/check

setup:
	@scripts/setup.sh

# Puts hundreds of small faults into the code, one at a time, and checks that tests notice them.
# Takes about an hour.
mutants: setup
	@.venv/bin/python -m tests.mutants $(MUTANTS)

docs: setup
	@.venv/bin/python scripts/make_docs.py
