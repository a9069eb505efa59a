# Two commands for a stranger: `make demo` and `make test`. Both need Python 3.11+ and pip, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
# What `make demo` shows: each package as it comes, with a bar on a terminal.
TELLING_PIP = $(BIN)/pip install --disable-pip-version-check
USER = $(VENV)/.installed
DEV = $(VENV)/.installed-dev

.PHONY: demo test test-slow test-avx2 test-arm test-lowest test-newest docs lock clean

demo: $(USER)
	@echo "demo: decoding a story with a draft, then without one; the first run compiles the decoder (up to a minute)"
	$(BIN)/specdec generate "Once upon a time, there was a little rabbit who" --draft-quantize int8 -k 5 -n 160 --compare
	@echo "To use specdec in this shell: . $(BIN)/activate"

test: $(DEV)
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

# scripts/real_models.py fetches the files (843 MB) without which the tests of real models are skipped.
test-slow: $(DEV)
	$(BIN)/python -m pytest -m slow --timeout 3600

# What rounds otherwise on another processor, as on one without AVX-512: torch's kernels, oneDNN's and our own.
test-avx2: $(DEV)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		tests/test_exact*.py tests/lm tests/drafters tests/engine tests/sampling tests/measure/audit tests/cli/test_cli_bench_endpoint_doubts.py

# Our own decoder on 64-bit ARM, emulated: needs g++-aarch64-linux-gnu and qemu-user-static, as Debian and Ubuntu call them.
test-arm: $(DEV)
	command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static
	$(BIN)/python -m pytest -m slow --numprocesses 2 tests/lm/llama/test_lm_llama_arm.py

# The site in `site/`. `docs/` is readable as it is, too.
docs: $(DEV)
	$(PIP) --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python scripts/docs_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# With the oldest versions that pyproject.toml admits, in an environment of its own; torch stays as it is tested. What an
# old package does not know of a newer one that it uses itself is not ours to mend.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	VIRTUAL_ENV=.venv-lowest .venv-lowest/bin/uv pip install --resolution lowest-direct "$$(grep '^torch==' constraints.txt)" --editable ".[dev]"
	PATH="$(abspath .venv-lowest/bin):$$PATH" .venv-lowest/bin/python -m pytest -W ignore::DeprecationWarning

# With the newest versions that pyproject.toml admits, which it prints; torch stays as it is tested.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade "$$(grep '^torch==' constraints.txt)" --editable ".[dev]"
	.venv-newest/bin/pip list --disable-pip-version-check
	PATH="$(abspath .venv-newest/bin):$$PATH" .venv-newest/bin/python -m pytest

# The versions that were tested, as constraints.txt: what pip resolves today, torch as it stands there.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	.venv-lock/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" ".[dev,train,docs]"
	(sed -n '/^#/p' constraints.txt; .venv-lock/bin/pip list --format freeze --exclude specdec-cli --exclude pip --exclude setuptools) > .venv-lock/new
	mv .venv-lock/new constraints.txt
	rm -rf .venv-lock

# The pinned torch goes first, so that no other package chooses its version. Where pip's index has CPU builds of it that is
# a small one; the usual index gives Linux the one with CUDA, several GB.
$(USER): pyproject.toml constraints.txt
	@echo "1 of 3: making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 3: installing torch, which takes one to six minutes"
	@$(TELLING_PIP) --constraint constraints.txt torch
	@echo "3 of 3: installing specdec and what else it needs"
	@$(TELLING_PIP) --constraint constraints.txt --editable ".[serve,plots]"
	@touch $(USER)

$(DEV): $(USER)
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	touch $(DEV)

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest .venv-lock dist site
