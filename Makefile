# Everything needs only Python 3.11 or newer with venv; each target sets up what it lacks.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
export PENSTOCK_HOME ?= $(HOME)/.penstock
STARTER = SmolLM2-135M-Instruct
WEIGHTS = $(PENSTOCK_HOME)/models/$(STARTER)/model.safetensors

# Shorter than in the workers: with the default, tests beside anything else take many times as long.
test proof: export GOMP_SPINCOUNT = 5000

.PHONY: serve test check proof bench model clean

serve: $(VENV)/.serve $(WEIGHTS)
	$(BIN)/penstock serve --model $(STARTER) $(ARGS)

test: $(VENV)/.dev $(WEIGHTS)
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The long forms of the proofs: minutes to an hour. Results are recorded in docs/proof.md.
proof: $(VENV)/.dev $(WEIGHTS)
	$(BIN)/python -m pytest -m proof $(ARGS)

bench: $(VENV)/.dev $(WEIGHTS)
	$(BIN)/python -m benchmarks.engine $(ARGS)
	$(BIN)/python -m benchmarks.serving $(ARGS)

model: $(WEIGHTS)

$(WEIGHTS): | $(VENV)/.serve
	$(BIN)/penstock pull smollm2

$(VENV)/.serve: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
