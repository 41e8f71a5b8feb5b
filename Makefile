# Two commands matter: `make run` and `make test`. Both make .venv first; a second call does not install again.
.DEFAULT_GOAL := help
.PHONY: help run frontier test ci-tools notebooks export clean
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: errors only.
PIP := $(BIN)/python -m pip -qq
METADATA := settings.ini setup.py pyproject.toml MANIFEST.in constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# Where torch comes from. Empty means whatever pip finds: a machine with its own CPU build, or with an NVIDIA device.
# Else PyTorch's CPU index, so that a laptop does not fetch CUDA packages. Override: `make run TORCH_INDEX=<url or nothing>`.
no_gpu = [ "$$(uname)" = Linux ] && [ ! -e /dev/nvidia0 ] && ! command -v nvidia-smi > /dev/null
offers_cpu_build = $(PIP) install --dry-run --no-deps torch==$(TORCH)+cpu > /dev/null 2>&1
TORCH_INDEX ?= $(shell if $(no_gpu) && ! $(offers_cpu_build); then echo https://download.pytorch.org/whl/cpu; fi)

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

run: $(VENV)/.run ## train and measure the lab model by every method, print the table, draw the figure
	@$(BIN)/python -m mixsd_nb.train
	@$(BIN)/python -m mixsd_nb.figures epochs=20 batch=20 n=100

frontier: $(VENV)/.run ## the same at three learning rates, as in README's picture
	@$(BIN)/python -m mixsd_nb.train 3e-4 1e-3 3e-3
	@$(BIN)/python -m mixsd_nb.figures epochs=20 batch=20 n=100

test: $(VENV)/.dev ## check export, clean state and README; run the notebooks' tests, then pytest
	@$(BIN)/python .ci/check.py
	@$(BIN)/nbdev_test --n_workers 2
	@$(BIN)/python -m pytest -q tests

export: $(VENV)/.dev ## notebooks -> mixsd_nb/ and README.md, outputs cleaned
	@$(BIN)/nbdev_clean
	@find mixsd_nb -name '*.py' -delete
	@$(BIN)/nbdev_export
	@$(BIN)/python .ci/readme.py

# The cube of all runs is read by the last three.
LAST := nbs/explore.ipynb nbs/figures.ipynb nbs/index.ipynb
NOTEBOOKS = $(sort $(wildcard nbs/*/*.ipynb)) $(filter-out $(LAST),$(sort $(wildcard nbs/*.ipynb))) $(wildcard $(LAST))
notebooks: $(VENV)/.dev ## run every notebook in place, slow cells too, then export
	@for nb in $(NOTEBOOKS); do \
	  echo $$nb; TQDM_DISABLE=1 HF_HUB_OFFLINE=1 $(BIN)/jupyter nbconvert --log-level ERROR --to notebook --execute --inplace $$nb || exit 1; \
	done
	@$(BIN)/python .ci/tidy.py
	@$(MAKE) --no-print-directory export

# Debian packages that the tests need.
CI_TOOLS :=
ci-tools: ## install the Debian packages that the tests need
	@$(if $(CI_TOOLS),apt-get update -qq && apt-get install -y -qq --no-install-recommends $(CI_TOOLS),\
	  echo "ci-tools: the tests need no Debian packages")

clean: ## remove .venv and caches; runs are kept
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/pip:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: what follows then finds it installed and does not choose another build.
$(VENV)/.torch: constraints.txt | $(BIN)/pip
	@echo "installing torch $(TORCH) into $(VENV)"
	@$(PIP) install --no-deps torch==$(TORCH) $(addprefix --index-url ,$(TORCH_INDEX))
	@touch $@

$(VENV)/.run: $(METADATA) | $(VENV)/.torch
	@echo "installing mixsd_nb into $(VENV) (about a minute)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(METADATA) | $(VENV)/.torch
	@echo "installing mixsd_nb and its development tools into $(VENV) (about a minute)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.run $@
