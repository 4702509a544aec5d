# Everything needs only Python 3.11 or newer with venv; each target sets up what it lacks.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
TYPESCRIPT = 7.0.2
PICTURES = $(VENV)/pictures
export PENSTOCK_HOME ?= $(HOME)/.penstock
STARTER = SmolLM2-135M-Instruct
MODEL = $(PENSTOCK_HOME)/models/$(STARTER)/config.json
# Tests compare with transformers, which computes with numbers.
WEIGHTS = $(PENSTOCK_HOME)/models/$(STARTER)/model.safetensors

# Two tests at a time, each on one thread: two threads beside another test wait for each other most
# of the time. tests/conftest.py says which of them stay together, and which need the machine alone.
PYTEST_2 = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope
# In CI, whose machine is shared, what fails is run once more, alone; what fails again is a failure.
OR_AGAIN = $(if $(CI),|| $(BIN)/python -m pytest --last-failed --last-failed-no-failures none)

.PHONY: serve unit test check check-page proof bench screenshots model clean

serve: $(VENV)/.serve $(MODEL)
	$(BIN)/penstock serve --model $(STARTER) $(ARGS)

unit: $(VENV)/.dev
	$(PYTEST_2) tests/unit $(ARGS)

test: $(VENV)/.dev $(WEIGHTS)
	$(PYTEST_2) -m "not proof and not serial" $(ARGS) $(OR_AGAIN)
	$(BIN)/python -m pytest -m "serial and not proof" $(ARGS) $(OR_AGAIN)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(shell command -v npm),$(MAKE) --no-print-directory check-page,@echo "No npm: the page's scripts are not checked.")

# Types of the page's scripts, by their JSDoc. The scripts themselves need no node.
check-page: $(VENV)/typescript/node_modules/.bin/tsc
	$< --project src/penstock/server/web/static

# The long forms of the proofs, one at a time on a machine that does nothing else: minutes to an
# hour. Hypothesis tries twenty times as many examples, and attacks are judged by strict times. Results
# are recorded in benchmarks/results/.
proof: export PENSTOCK_HYPOTHESIS = long
proof: export PENSTOCK_STRICT_TIMES = 1
proof: $(VENV)/.dev $(WEIGHTS)
	$(BIN)/python -m pytest -m "proof or hypothesis" $(ARGS)
	$(BIN)/python -m pytest tests/hostile $(ARGS)

bench: $(VENV)/.dev $(WEIGHTS)
	$(BIN)/python -m benchmarks.engine $(ARGS)
	$(BIN)/python -m benchmarks.serving $(ARGS)

# The pictures of the page in docs/images, made by the tests from five minutes of work; needs chromium.
screenshots: $(VENV)/.dev $(WEIGHTS)
	rm -rf $(PICTURES)
	PENSTOCK_PICTURES=$(PICTURES) PENSTOCK_PICTURES_WARM_S=300 $(BIN)/python -m pytest tests/browser/test_pictures.py $(ARGS)
	$(BIN)/python -m penstock.testing.screenshots $(PICTURES) docs/images

model: $(WEIGHTS)

$(MODEL): | $(VENV)/.serve
	$(BIN)/penstock pull smollm2

$(WEIGHTS): | $(VENV)/.serve
	$(BIN)/penstock pull smollm2 --convert float32

$(VENV)/typescript/node_modules/.bin/tsc:
	npm install --silent --no-fund --no-audit --prefix $(VENV)/typescript typescript@$(TYPESCRIPT)

$(VENV)/.serve: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
