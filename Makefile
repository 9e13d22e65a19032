# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo browser test test-all fuzz lint bench docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fedsieve train

lint: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/ruff check src tests benchmarks tools

# The report page is tested in a browser; where there is none, Debian's package brings one. Where that fails the tests say what to do.
browser:
	@test -n "$$FEDSIEVE_NO_BROWSER" || command -v chromium > /dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } > /dev/null || true

test: lint browser
	$(BIN)/python -m pytest -n 2 -m 'not long'

test-all: lint browser
	$(BIN)/python -m pytest -n 2

bench: $(STAMP)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.wire

# Bytes nobody meant, at everything that reads, a minute each.
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tools/fuzz.py

# The pages that are generated, then the site, in site/index.html; a link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/python tools/cli_reference.py
	$(BIN)/python tools/api_reference.py
	$(BIN)/python -m zensical build --strict -f mkdocs.yml

clean:
	rm -rf .venv site
