# What a newcomer runs. Needs Python 3.11 to 3.13 and make; everything else is installed into $(VENV).
#   make demo          the danger and the cure, side by side, on a real mongod
#   make test          everything that CI runs: lint, types, layers, packages, tests, documentation
#   make proof         the proof of guarantee "transaction" at full length, about 15 minutes
#   make campaign      random handlers and random faults: SEED=7 [RECORDS=300] [FIRST=0], a violation names what replays it
#   make campaign-long 10,000 observed faults on three servers: MONGODS=dir as below
#   make mutants       saferetry with one rule taken out at a time: the campaign must see each
#   make proof-kafka   the proof with a Kafka cluster at full length, and its control
#   make soak          20,000 writes, 15 MB, 1,000 tasks, 200 threads, 2,000,000 records: hours
#   make bench         what the guarantees cost, as ratios
#   make matrix        the tests with older drivers, on older servers and another Python, hours; ALL=1: every combination
#   make driver-suite  the driver's own tests with our clients, long: FILES="bulk test/test_cursor.py" MODE=record
#   make test-servers  the tests on other servers: MONGODS=dir with bin/mongod-VERSION and lib/; PYMONGO=x.y.z for another driver
PYTHON ?= python3
VENV ?= .venv
OUT ?= .out
PYTEST_ARGS ?=
WORKERS ?= 4
# Servers, proxies and killed processes on a busy machine: what fails is run once more, and pytest's last line counts the reruns.
RERUNS ?= 1
LAB_ARGS ?=
BENCH_ARGS ?=
MATRIX_ARGS ?=
ALL ?=
FILES ?=
MODE ?=
JOBS ?= 2
SUITE_ARGS ?=
SEED ?= 1
RECORDS ?= 300
FIRST ?= 0
FAULTS ?= 3400
CAMPAIGN_VERSIONS ?= 4.4.2 5.0.4 6.0.27
MONGODS ?=
VERSIONS ?= 4.4.2 5.0.4
PYMONGO ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test proof campaign soak campaign-long mutants bench matrix lint format packages pytest docs docs-check test-servers driver-suite proof-kafka clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# Stamps: a step runs again only when what it depends on has changed.
$(VENV)/.pip:
	$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit(f"Python 3.11 to 3.13 is needed, not {sys.version}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	touch $@

$(VENV)/.lab: pyproject.toml $(VENV)/.pip
	$(PIP_INSTALL) --editable '.[lab]'
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.pip
	$(PIP_INSTALL) --editable '.[kafka,aiokafka,kafka-python,faststream,lab]' --group dev --group ecosystem
	touch $@ $(VENV)/.lab

demo: $(VENV)/.lab
	$(BIN)/saferetry lab $(LAB_ARGS)

# pytest comes last, so that its closing line is the last thing seen.
test: lint packages
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --reruns $(RERUNS) $(PYTEST_ARGS)

# One after another: it measures, and some of it needs the machine for itself.
proof: $(VENV)/.dev
	PROOF_LONG=1 $(BIN)/pytest tests/proof -o faulthandler_timeout=0 $(PYTEST_ARGS)

# The driver's suite is downloaded with pip into $(OUT), and never changed.
driver-suite: $(VENV)/.dev
	$(BIN)/python -m tests.driver_suite --out $(OUT)/driver-suite --jobs $(JOBS) $(MODE:%=--mode %) $(SUITE_ARGS) $(FILES)

campaign: $(VENV)/.dev
	$(BIN)/python -m tests.campaign --seed $(SEED) --records $(RECORDS) --first $(FIRST)

# At least $(FAULTS) observed faults on each server; MONGODS=dir with bin/mongod-VERSION and lib/, else the server of the lab alone.
campaign-long: $(VENV)/.dev
	for binary in $(if $(MONGODS),$(foreach version,$(CAMPAIGN_VERSIONS),$(abspath $(MONGODS))/bin/mongod-$(version)),""); do \
		LAB_MONGOD="$$binary" $(BIN)/python -m tests.campaign --seed $(SEED) --records $(RECORDS) --faults $(FAULTS) || exit 1; \
	done

# saferetry with one rule taken out at a time, and plain PyMongo: each must be seen.
mutants: $(VENV)/.dev
	for binary in $(if $(MONGODS),$(foreach version,$(CAMPAIGN_VERSIONS),$(abspath $(MONGODS))/bin/mongod-$(version)),""); do \
		LAB_MONGOD="$$binary" $(BIN)/python -m tests.campaign.controls || exit 1; \
	done

# Hours: much and large, at full length.
soak: $(VENV)/.dev
	SOAK_LONG=1 $(BIN)/pytest tests/soak -o faulthandler_timeout=0 $(PYTEST_ARGS)

# Consumers killed and stopped; with the control, about 15 minutes.
proof-kafka: $(VENV)/.dev
	PROOF_KAFKA=1 $(BIN)/pytest tests/proof/test_kafka.py -o faulthandler_timeout=0 $(PYTEST_ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Drivers, servers and the other Python are downloaded into .versions/; `make matrix MATRIX_ARGS=--help` says what can be chosen.
matrix: $(VENV)/.dev
	$(BIN)/python -m versions --workers $(WORKERS) --reruns $(RERUNS) $(if $(ALL),--all) $(MATRIX_ARGS)

pytest: $(VENV)/.dev
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --reruns $(RERUNS) $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The sdist and the wheel, each installed into an empty venv and imported away from the sources.
packages: $(VENV)/.dev
	rm -rf $(OUT)/dist
	$(BIN)/python -m build --quiet --outdir $(OUT)/dist .
	for archive in $(OUT)/dist/*.tar.gz $(OUT)/dist/*.whl; do \
		rm -rf $(OUT)/venv \
		&& $(BIN)/python -m venv $(OUT)/venv \
		&& $(OUT)/venv/bin/python -m pip install --quiet --disable-pip-version-check "$$archive" \
		&& $(OUT)/venv/bin/python -I -c 'import importlib.resources as r, saferetry; assert r.files("saferetry").joinpath("py.typed").is_file(); print("imported", saferetry.__file__)' \
		|| exit 1; \
	done
	rm -rf $(OUT)/venv

# The examples of README.md and docs/, executed on a real mongod; links; the table of settings against the code.
docs-check: $(VENV)/.dev
	$(BIN)/pytest tests/test_docs.py tests/test_package.py $(PYTEST_ARGS)

# Writes the table of settings anew from the code.
docs: $(VENV)/.dev
	UPDATE_DOCS=1 $(BIN)/pytest tests/test_docs.py -k settings_table

test-servers: $(VENV)/.dev
	@test -n "$(MONGODS)" || { echo 'usage: make test-servers MONGODS=dir [VERSIONS="4.4.2 5.0.4"] [PYMONGO=4.13.2]; dir holds bin/mongod-VERSION and, where needed, lib/'; exit 2; }
	test -z "$(PYMONGO)" || $(PIP_INSTALL) --upgrade --target $(OUT)/pymongo-$(PYMONGO) pymongo==$(PYMONGO)
	for version in $(VERSIONS); do \
		echo "mongod $$version" \
		&& mkdir -p $(OUT)/mongod-$$version \
		&& ln -sf "$(abspath $(MONGODS))/bin/mongod-$$version" $(OUT)/mongod-$$version/mongod \
		&& PYTHONPATH="$(if $(PYMONGO),$(abspath $(OUT))/pymongo-$(PYMONGO))" PATH="$(abspath $(OUT))/mongod-$$version:$$PATH" LD_LIBRARY_PATH="$(abspath $(MONGODS))/lib" $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --reruns $(RERUNS) $(PYTEST_ARGS) \
		|| exit 1; \
	done

clean:
	rm -rf $(VENV) $(OUT) .versions dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
