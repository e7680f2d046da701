# make demo | make test | make check | make docs; the virtual environment is made on first use (VENV=folder to put it elsewhere).
VENV ?= .venv
PYTHON ?= python3
INSTALLED := $(VENV)/.installed
RUNS := $(VENV)/.runs

.PHONY: venv demo test check docs

venv: $(INSTALLED)

# What trains needs torch, numpy and little else; tests and pages need more.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(INSTALLED): $(RUNS)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,dev]'
	@touch $@

# The demo starts from nothing each time: a run folder that holds a run is never written over.
demo: $(RUNS)
	rm -rf runs/demo
	$(VENV)/bin/cuboid train examples/demo.toml
	$(VENV)/bin/cuboid report runs/demo --probe -o runs/demo/report.html
	$(VENV)/bin/cuboid verify --layout "dp=2,tp=2,pp=2"

# Three files at a time, in the order of tests/conftest.py: many tests wait for processes to start or to die. The bytecode
# of hundreds of short processes is kept, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE =
test: venv
	$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict cuboid

# A link that leads nowhere is an error, and so is everything else that Sphinx warns of.
docs: venv
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo docs/_build/html/index.html
