# Everything that is made here. Each target sets up what it needs: on a fresh machine `make demo` is all it takes.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
READY  := .venv/ready
PEERS  := .venv/peers
ZOO    := .venv/zoo
OUTSIDE := .venv/outside
JOBS   ?= 3  # tests at a time: many wait for processes and deadlines, so one more than two cores
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= manifest values datafile part url dcp megatron olmo deepspeed torchsnapshot torch_checkpointing composer hfai \
	huggingface full

SOAK_MINUTES ?= 60
SOAK_SEED    ?=  # drawn and printed if it is empty

# Told to compile nothing, a recent pip needs half the time of a distribution's. Python compiles what it imports.
PIP := python -m pip install --no-compile --disable-pip-version-check --quiet

# Tests start hundreds of processes. Without bytecode each of them compiles the package, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-torch test-all zoo outside soak fuzz lint docs docs-serve bench bench-quick evidence gpu gpu-wheels gpu-page clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  \1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' $$name "$$text"; done

demo: $(READY)  ## train on 4 ranks, kill ranks in the middle of saves, go on with 2 and with 1: under two minutes
	$(BIN)/python examples/demo.py

FAST := -m "not slow and not timed" --hypothesis-profile=quick -n $(JOBS) --dist worksteal --durations=25 --durations-min=2
test: lint  ## lint and all tests that take seconds, some at a time: none of them depends on how long anything takes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FAST)

test-torch: $(READY)  ## the fast tests on another torch, in an environment of its own: make test-torch TORCH=torch==2.10.0
	test "$(TORCH)" != "torch==2.13.0" || (echo "say which: make test-torch TORCH=torch==2.10.0"; exit 2)
	$(PYTHON) -m venv --clear .venv/$(TORCH)
	.venv/$(TORCH)/bin/$(PIP) --upgrade pip || echo "the pip that is here stays"
	.venv/$(TORCH)/bin/$(PIP) "$(TORCH)"
	.venv/$(TORCH)/bin/$(PIP) -e ".[dev]"
	OMP_NUM_THREADS=1 .venv/$(TORCH)/bin/python -m pytest $(FAST)

test-all: lint  ## lint and all tests: some at a time, then those that are about time, one at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not timed" -n $(JOBS) --dist worksteal --durations=25 --durations-min=2; \
	first=$$?; OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m timed && exit $$first

zoo: $(ZOO)/ready  ## hundreds of optimizers, modules and loaders of 30 libraries, beside torch's own load; ONLY=adam for a part
	PYTHONPATH=. OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 $(ZOO)/bin/python -m zoo $(if $(ONLY),--only $(ONLY),--page zoo/results.md)

outside: $(OUTSIDE)/ready  ## other projects' own checkpoint tests, on holdfast: make outside SRC=folder (tests/outside/__init__.py)
	test -n "$(SRC)" || (echo "say where the checkouts are: make outside SRC=folder; see tests/outside/__init__.py"; exit 2)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(OUTSIDE)/bin/python -m tests.outside "$(SRC)"

soak: $(READY)  ## random runs with random faults for SOAK_MINUTES, checked against a model; SOAK_SEED=n repeats one
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

fuzz: $(READY)  ## hostile files, FUZZ_SECONDS=600 for each target; guided by coverage if atheris is installed
	failed=0; for target in $(FUZZ_TARGETS); do \
		OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run $$target $(FUZZ_SECONDS) --found fuzz-found || failed=1; \
	done; exit $$failed

lint: $(READY)  ## ruff, mypy, and the rooms of docs/architecture.md
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)  ## the site of the documentation, into site/; every link in it is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html, or make docs-serve"

docs-serve: $(READY)  ## the same at http://127.0.0.1:8000, anew whenever a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

bench: $(READY) $(PEERS)/ready  ## all benchmarks, at full size
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.stall
	$(BIN)/python -m benchmarks.unshard
	$(BIN)/python -m benchmarks.live_export
	$(BIN)/python -m benchmarks.merging
	$(BIN)/python -m benchmarks.remap
	$(BIN)/python -m benchmarks.share
	$(BIN)/python -m benchmarks.incremental
	$(BIN)/python -m benchmarks.replicas
	$(BIN)/python -m benchmarks.many
	$(BIN)/python -m benchmarks.values
	$(BIN)/python -m benchmarks.verify
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.compression
	$(PEERS)/bin/python -m benchmarks.cloud

bench-quick: $(READY) $(PEERS)/ready  ## the same in small
	$(BIN)/python -m benchmarks.bench --quick
	$(BIN)/python -m benchmarks.stall --quick
	$(BIN)/python -m benchmarks.unshard --quick
	$(BIN)/python -m benchmarks.live_export --quick
	$(BIN)/python -m benchmarks.merging --quick
	$(BIN)/python -m benchmarks.remap --quick
	$(BIN)/python -m benchmarks.share --quick
	$(BIN)/python -m benchmarks.incremental --quick
	$(BIN)/python -m benchmarks.replicas --quick
	$(BIN)/python -m benchmarks.many --quick
	$(BIN)/python -m benchmarks.values --quick
	$(BIN)/python -m benchmarks.verify --quick
	$(BIN)/python -m benchmarks.scale --quick
	$(BIN)/python -m benchmarks.compression --quick
	$(PEERS)/bin/python -m benchmarks.cloud --quick

# A run of evidence/runs.py sets up what it needs; `cloud` needs what `make bench` installs.
evidence: $(READY) $(if $(filter cloud,$(RUN)),$(PEERS)/ready)  ## what of the long runs holds for this code; RUN="soak share" runs these first
	$(if $(strip $(RUN)),$(BIN)/python -m evidence run $(RUN))
	$(BIN)/python -m evidence

# What one GPU can tell, on a machine that is lent without a network: nothing is installed there, what its Python lacks
# comes as wheels. In small (SMALL=1) all of it runs on the CPU.
GPU_PYTHON ?= $(if $(SMALL),$(BIN)/python,$(PYTHON))
WHEELS ?= .gpu/wheels
ONLY   ?=
SMALL  ?=
FOR    ?= 3.12
LACKED := msgspec

gpu: $(if $(SMALL),$(READY))  ## tests and benchmark on one CUDA device, nine minutes at the most; ONLY="steps loads" runs parts
	$(GPU_PYTHON) -m benchmarks.gpu --wheels "$(WHEELS)" --only "$(ONLY)" $(if $(SMALL),--small)

PLATFORMS := $(foreach glibc,2_17 2_27 2_28 2_34,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64
gpu-wheels:  ## the wheels for make gpu on a machine without a network, for Python FOR=3.12, into WHEELS=.gpu/wheels
	$(PYTHON) -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: --implementation cp \
		--python-version $(FOR) $(PLATFORMS) --dest "$(WHEELS)" $(LACKED)

gpu-page: $(READY)  ## docs/gpu.md from docs/gpu.json, which make gpu has written
	$(BIN)/python -m benchmarks.gpu.page docs/gpu.json > docs/gpu.md

clean:  ## remove what the other targets made, but for the environment in .venv
	rm -rf demo-run fuzz-found bench-out gpu-out .gpu build dist site *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The environment, made once and looked at again when pyproject.toml changes. torch comes first and by itself: what
# is installed after it finds a torch that is new enough and leaves it alone. A torch that is there already (of
# another version, or built for a GPU) stays.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("holdfast needs Python 3.10 or newer; say which: make PYTHON=python3.11 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/$(PIP) --upgrade pip || echo "the pip that is here stays"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/$(PIP) "$(TORCH)"
	$(BIN)/$(PIP) -e ".[dev]"
	touch $@

# The environment above and, in one of their own so that it stays as it is, the peers of `benchmarks.cloud`. pip finds
# its torch there too, and leaves it alone. A peer that cannot be had here is left out, and the bench says so.
$(PEERS)/ready: $(READY) benchmarks/peers.txt
	test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/environment.pth"
	while read -r peer; do $(PEERS)/bin/$(PIP) "$$peer" \
		|| echo "left out: $$peer"; done < benchmarks/peers.txt
	touch $@

# The environment above and, in one of their own as well, the libraries of the zoo, none of which may bring a torch.
$(ZOO)/ready: $(READY) zoo/requirements.txt
	test -x $(ZOO)/bin/python || $(BIN)/python -m venv $(ZOO)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(ZOO)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/environment.pth"
	while read -r name; do $(ZOO)/bin/$(PIP) --no-deps "$$name" \
		|| echo "left out: $$name"; done < zoo/requirements.txt
	touch $@

# The environment above and, in one of their own, what other projects' tests import. None may bring a torch.
$(OUTSIDE)/ready: $(READY) tests/outside/requirements.txt
	test -x $(OUTSIDE)/bin/python || $(BIN)/python -m venv $(OUTSIDE)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(OUTSIDE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/environment.pth"
	while read -r name; do $(OUTSIDE)/bin/$(PIP) --no-deps "$$name" \
		|| echo "left out: $$name"; done < tests/outside/requirements.txt
	touch $@
