# `make` lists the targets. Each one does its own set-up: nothing to do by hand before.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# A throw-away PostgreSQL and Redis (or DATABASE_URL and REDIS_URL), for the command behind --.
WITH_SERVERS := $(RUN) -m bench.servers
# How many processes test at once, each with databases of its own.
PROCESSES ?= 2
PYTEST := $(RUN) -m pytest -n $(PROCESSES)

.DEFAULT_GOAL := help
.PHONY: help demo test check lint fmt bench isolation serve lock clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s%s\n", $$1, $$2}'

demo: $(READY) ## a tenant moves while agents talk (ONCE=1: exit after it; STACK=full: PostgreSQL, Redis)
	@$(RUN) -m bench.demo $(if $(ONCE),--once) $(if $(STACK),--stack $(STACK))

test: $(READY) ## everything, against real PostgreSQL, Redis, google-adk and Chromium
	@$(WITH_SERVERS) -- $(PYTEST) $(ARGS)

check: lint ## lint, then all tests but those of the browser and of traffic: before each commit
	@$(WITH_SERVERS) --no-browser -- $(PYTEST) -m "not browser and not traffic" $(ARGS)

lint: $(READY) ## format, style, types, import contracts, settings, schema: nothing is changed
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@SWITCHYARD_HTTPS=1 $(RUN) manage.py check --deploy --fail-level WARNING
	@$(RUN) manage.py makemigrations --check --dry-run

fmt: $(READY) ## put code into the form that lint wants
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench: $(READY) ## measure against the bars (NAME=copy: only that one)
	@$(WITH_SERVERS) --no-browser --durable -- $(RUN) -m bench $(NAME) $(ARGS)

isolation: $(READY) ## what one tenant can do to another, tried on real agent processes
	@$(RUN) -W ignore -m bench.isolation $(ARGS)

serve: $(READY) ## the embedded default: pages, workers and beat on this machine (PORT=8000)
	@$(RUN) manage.py serve $(if $(PORT),--port $(PORT))

lock: $(READY) ## pyproject.toml -> requirements.lock
	@$(VENV)/bin/uv pip compile pyproject.toml --extra adk --group dev \
	  --universal --python-version 3.11 --generate-hashes --upgrade --quiet \
	  --no-config \
	  --custom-compile-command "make lock" --output-file requirements.lock

clean: ## remove the virtualenv and everything that ran here
	@rm -rf $(VENV) var .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Made anew when the lock changes; the stamp comes last, so an interrupted install is repeated.
$(READY): requirements.lock
	@test -n "$(PYTHON)" || { echo "Install Python 3.11 or later, with its venv module."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: Python 3.11 or later is needed (make PYTHON=...)."; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (some two minutes)..."
	@$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@
