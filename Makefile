# Two commands are all that is needed: `make demo` and `make test`. Both build .venv on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STEPS ?= 120
SECONDS ?= 600
CYCLES ?= 100
SEED ?=

# Long runs: all cases of a subject, or of a part of it, which takes at most 20 minutes; `make test-all` is all of them.
SUBJECTS := $(shell $(PYTHON) tests/subjects.py)

.PHONY: install demo docs .types test test-ranks test-unit test-all test-on-device test-optimized test-wheel soak lint format bench clean $(SUBJECTS:%=test-%)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,test,dev]"
	touch $(STAMP)

# Trains to the middle, ends, starts again from the checkpoint, and draws the loss.
demo: $(STAMP)
	$(BIN)/booster demo --steps $(STEPS)

# The site, in build/site: pages open from the disk. Links are checked, and warnings are errors.
docs: $(STAMP) .types
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The default run: at most six minutes on two cores. Ranks wait for each other, so tests of one process and of commands,
# which wait for what they start, run beside them.
COMMAND_TESTS := $(wildcard $(addprefix tests/multi/test_,launch_*.py run_*.py check_communication.py docs.py demo_command.py))
test: $(STAMP)
	@echo 'two runs side by side: what each one wrote follows when it has ended, the first in some three minutes'
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target test-ranks test-unit

# Of the CPU, where there is a GPU, too: benchmarks/gpu_suite.py has the tests that need one.
test-ranks test-unit $(SUBJECTS:%=test-%): export CUDA_VISIBLE_DEVICES =
test-ranks test-unit: export TORCH_DISTRIBUTED_DEBUG = OFF
# Tests start a hundred processes; empty, this lets Python keep the compiled modules for the next one.
test-ranks test-unit: export PYTHONDONTWRITEBYTECODE =
test-ranks: $(STAMP)
	$(BIN)/pytest -m "not slow and not gpu" --durations=20 -o cache_dir=.pytest_cache/ranks $(COMMAND_TESTS:%=--ignore=%) tests/multi tests/faults tests/ports

test-unit: $(STAMP)
	$(BIN)/pytest -m "not slow and not gpu" --durations=20 -o cache_dir=.pytest_cache/unit tests/unit tests/surface $(COMMAND_TESTS)

test-all: $(STAMP)
	$(BIN)/pytest -m "not gpu" --durations=20

$(SUBJECTS:%=test-%): test-%: $(STAMP)
	TORCH_DISTRIBUTED_DEBUG=OFF $(BIN)/pytest -m "not gpu" --durations=20 $$($(PYTHON) tests/subjects.py $*)

# Tests with their ranks on the simulated CUDA device, tests/simulated_cuda: all of parity, and one case of each of the others
# that are marked on_device. The subject `device` is about the device itself.
DEVICE_TESTS = $(shell grep -lE "assert_(parallel|hybrid|pipeline)_equals_serial|mark.on_device" tests/multi/test_*.py tests/faults/test_*.py)
test-on-device: $(STAMP)
	TORCH_DISTRIBUTED_DEBUG=OFF $(BIN)/pytest --device simulated_cuda -m "not gpu and not (slow and on_device)" --durations=20 $(DEVICE_TESTS)

# A chain of kills and starts on other numbers of ranks with other plugins, for at most so many seconds, compared with a run
# of one process. Without a SEED a new one is drawn, and printed.
soak: $(STAMP)
	$(BIN)/python tests/faults/soak.py --seconds $(SECONDS) --cycles $(CYCLES) $(if $(SEED),--seed $(SEED))

# Where Python leaves out assert statements; those of tests are kept by pytest, also on the ranks.
test-optimized: $(STAMP)
	TORCH_DISTRIBUTED_DEBUG=OFF $(BIN)/python -O -m pytest -W "ignore:assertions not in test modules:pytest.PytestConfigWarning" -m "not slow and not gpu" tests/faults tests/multi tests/ports tests/unit

# The wheel, not the checkout: a subpackage that pyproject.toml forgets works in one and is missing from the other.
# test_doctests.py imports every module; the others train, save, load and run commands.
WHEEL_TESTS := surface/test_doctests.py unit/test_facade.py unit/test_cli.py unit/test_adam_kernel.py unit/test_lr_scheduler_curves.py
test-wheel: $(STAMP)
	rm -rf build dist .wheel-venv
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null  # the sdist, and the wheel from the sdist
	$(PYTHON) -m venv --without-pip .wheel-venv
	$(BIN)/python tests/wheel_environment.py .wheel-venv
	$(BIN)/python -m pip --python .wheel-venv/bin/python install --quiet --no-deps dist/*.whl
	mkdir .wheel-venv/elsewhere
	cd .wheel-venv/elsewhere && $(CURDIR)/.wheel-venv/bin/python -m pytest -q -p no:cacheprovider -m "not slow and not gpu" $(WHEEL_TESTS:%=$(CURDIR)/tests/%)
	rm -rf build dist .wheel-venv

# Links that show the four folders as the package they install as, for tools that follow one folder per package.
.types:
	rm -rf .types && mkdir -p .types/booster
	ln -s $(CURDIR)/booster/* .types/booster/
	ln -s $(CURDIR)/plugins $(CURDIR)/kernels $(CURDIR)/checkpoint_io .types/booster/

lint: $(STAMP) .types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell .
	cd .types && MYPYPATH=$(CURDIR)/.types $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p booster

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/facade/run.py
	$(BIN)/python benchmarks/zero/run.py --size 10m

clean:
	rm -rf $(VENV) .types build dist .wheel-venv runs *.egg-info
