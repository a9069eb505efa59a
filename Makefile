# Two commands for a stranger: `make demo` and `make test`. Both need Python 3.11+ and pip, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SETUP = $(VENV)/.installed

.PHONY: demo test clean

demo: $(SETUP)
	$(BIN)/specdec generate "Once upon a time, there was a little rabbit who" --draft-quantize int8 -k 5 -n 160 --compare

test: $(SETUP)
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

# The pinned torch goes first, so that no other package chooses its version. Where pip's index has CPU builds of it that is
# a small one; the usual index gives Linux the one with CUDA, several GB.
$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(SETUP)

clean:
	rm -rf $(VENV)
