# Everything runs in .venv, made on first use. PYTHON chooses the interpreter: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
LAB_FLAGS := $(if $(filter 0,$(shell id -u)),--allow-root) $(if $(DISPLAY)$(WAYLAND_DISPLAY)$(filter Darwin,$(shell uname)),,--no-browser)

# Two processes share the tests, a file at a time, as listed: the browser, which takes longest, first.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
# They share two cores, too: a thread that waits must not spin.
test coverage: export OMP_WAIT_POLICY := PASSIVE

.PHONY: help lab test nightly coverage demo site refresh figures pins clean
help:             ## this list
	@sed -n 's/^\([a-z]*\):.*## */make \1\t/p' Makefile

lab: .venv/ready  ## JupyterLab at the map notebook; ARGS="--port 9999" passes flags on
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_map.ipynb $(LAB_FLAGS) $(ARGS)

test: .venv/ready ## lint, types, unit tests, real ranks, every notebook, hygiene; ARGS="-n 0" in one process
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

nightly: .venv/ready ## what takes long: thousands of random cases, the longer notebooks twice in one kernel
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m "sweep or nightly" $(ARGS)

coverage: .venv/ready ## lines of refimpl that the tests run, in processes and ranks that they start too; at least 95 %
	$(BIN)/coverage erase
	PYTHONPATH=$(CURDIR) $(BIN)/coverage run -m pytest tests $(SHARED) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

demo: .venv/ready ## the bug and its fix in the terminal, on four real ranks
	$(BIN)/python -m refimpl

site: .venv/ready ## the notebooks as web pages, in build/site, with the outputs they hold
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c notebooks -d build/doctrees . build/site

refresh: .venv/ready ## run the notebooks and store their outputs; ARGS=--check only says which are stale
	$(BIN)/python tests/refresh.py $(ARGS)

figures: .venv/ready ## draw figures/*.svg
	$(BIN)/python figures/draw.py

pins: .venv/ready ## write what is installed to pins.txt and environment.yml
	$(BIN)/pip freeze --exclude-editable | sed "s/+cpu$$//; s/^triton==.*/&; platform_system == 'Linux'/" > pins.txt
	{ sed '/- pip:$$/q' environment.yml; sed 's/^/      - /' pins.txt; echo '      - -e .'; } > environment.new
	mv environment.new environment.yml

clean:            ## remove .venv and caches
	rm -rf .venv build .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info

.venv/ready: pins.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r pins.txt
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@
