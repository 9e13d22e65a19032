# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/core-installed
DEV := .venv/dev-installed

.PHONY: demo browser test test-all fuzz mutation lint bench docs clean

# The package with its core dependencies only.
$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $(CORE)

# The extras for development, in the same environment.
$(DEV): $(CORE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(DEV)

demo: $(CORE)
	$(BIN)/fedsieve demo

lint: $(DEV)
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python

# The report page is tested in a browser. If there is none, Debian's package is installed; if that fails, the tests say what to do.
browser:
	@test -n "$$FEDSIEVE_NO_BROWSER" || command -v chromium > /dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } > /dev/null || true

test: lint browser
	$(BIN)/python -m pytest -n 2 -m 'not long'

test-all: lint browser
	$(BIN)/python -m pytest -n 2

bench: $(DEV)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.wire

# Random bytes for every parser, one minute each.
fuzz: $(DEV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tools/fuzz.py

# Changes to the sources that the tests should notice, within an hour.
mutation: $(DEV)
	$(BIN)/python tools/mutation.py

# The generated pages, then the site, in site/index.html; a broken link is an error.
docs: $(DEV)
	$(BIN)/python tools/cli_reference.py
	$(BIN)/python tools/api_reference.py
	$(BIN)/python -m zensical build --strict -f mkdocs.yml

clean:
	rm -rf .venv site
