# Everything a developer or operator types; each target sets up what it needs in .venv, and for a Python
# that is named (`make test PYTHON=python3.12`) in .venv-3.12.
PYTHON ?= python3
EXECUTABLE := -c 'import os, sys; print(os.path.realpath(sys.executable))'
VERSION_OF := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(shell $(PYTHON) $(VERSION_OF)))
BIN := $(VENV)/bin
SERVE_DEPS := $(VENV)/.serve
DEV_DEPS := $(VENV)/.dev
BENCH_DEPS := $(VENV)/.bench
FUZZ_DEPS := $(VENV)/.fuzz
INTEROP_DEPS := $(VENV)/.interop
SITE_DEPS := $(VENV)/.site
RAY_DEPS := $(VENV)/.ray
# Who is told to keep no bytecode (PYTHONDONTWRITEBYTECODE) would compile all of it in each process.
BYTECODE := $(VENV)/.bytecode

# The two distributions of this tree: no index need have the client's, which the server's depends on.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL_TREE := $(INSTALL) -e ./client -e
DISTRIBUTIONS := pyproject.toml client/pyproject.toml

# The Pythons that `make test-pythons` tries: those of these that this machine has.
PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,$(firstword $(wildcard \
	$(shell python$(version) -c 'import sys; print(sys.executable)' 2>/dev/null) \
	$(HOME)/.pyenv/versions/$(version).*/bin/python)))

# What pip installs for test-torch. The default build of torch brings CUDA, several GB of it: name a
# wheel, or an index of builds for the CPU, as in `make test-torch TORCH=./torch-2.13.0+cpu-….whl`.
TORCH ?= torch
TORCH_DEPS := $(VENV)/.torch

# Clients in environments of their own: too large for .venv, or not of Python.
KSERVE := .venv-kserve
NODE := .node
NODE_PACKAGES := @grpc/grpc-js@1.14 @grpc/proto-loader@0.8 grpc-reflection-js@0.3

# A GPU host without network: `make wheels PYTHON_VERSION=3.12` somewhere else fills wheels/ for it.
# With that folder, test-gpu and bench-gpu run under the host's own PYTHON, which has CuPy, numpy
# and torch, and what it lacks of the rest is put beside it; without, in .venv.
PYTHON_VERSION ?= 3.12
MACHINE ?= x86_64
PLATFORMS := $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1,\
	--platform $(tag)_$(MACHINE))
ifneq ($(wildcard wheels/*.whl),)
GPU_DEPS := gpu-site
GPU_PYTHON := PYTHONPATH=$(CURDIR)/.gpu-site:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
else
GPU_DEPS := $(VENV)/.gpu
GPU_PYTHON := $(BIN)/python
endif
# Where there is no GPU, gpu-day need not have several GB installed to say so.
GPU_DAY_DEPS := $(if $(wildcard wheels/*.whl /dev/nvidiactl),$(GPU_DEPS),$(DEV_DEPS))
GPU_TESTS ?= tests/cuda tests/torch

# The real CuPy over the stand-in for CUDA (tests/cuda_runtime): CUDA's versions it is built for, each in
# a folder of its own (.cupy12) with the kernels it has compiled. Needs g++.
CUPY_BUILDS ?= 12 13
CUPY_VERSION ?= 14.2.0
PYTEST_GPU ?=
PYTEST_CUPY ?=
BENCH_GPU ?=
INTEROP ?=
GPU_DAY ?=
CALLS := -n $(JOBS) --dist loadfile --ignore tests/cuda/test_gpu_day.py tests/cuda

# What of tests/needs.py `make test` may count on: a test that wants more is not run where it is
# missing, one that wants some of this fails.
REQUIRE ?=
# Files or folders, if not all of tests/.
TESTS ?=
# Test files that run side by side. Half of the time tests wait: for deadlines, deaths, restarts.
JOBS ?= 3
# In the order of the folders: xdist would run files with few tests last, and the longest drills are such.
PYTEST := -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --require='$(REQUIRE)'
# What `make coverage` measures, child processes included. Not everything: a process that is traced takes
# twice as long, and there are thousands.
COVERAGE_TESTS ?= tests/unit

# How long the campaigns go on: inputs of each parser (and seconds of this run, if it is to stop before:
# the next one goes on from there), and seconds.
FUZZ_INPUTS ?= 10000000
FUZZ_SECONDS ?= inf
CHAOS_SECONDS ?= 3600
SOAK_SECONDS ?= 3600
CLUSTER_SECONDS ?= 600

# Where `make install` puts the systemd units, and what they run: an environment of APP with shmserve in it.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
APP ?= /opt/shmserve
UNIT_DIR = $(DESTDIR)$(PREFIX)/lib/systemd/system
CONFIG_DIR = $(DESTDIR)$(SYSCONFDIR)/shmserve

# Where `make client-c` builds libshmserve: with CMake, or with the compiler alone.
CLIENT_C ?= build/client-c
CMAKE ?= $(shell command -v cmake)
CFLAGS_C := -std=c11 -O2 -g -Wall -Wextra -Werror -Wconversion -fPIC -fvisibility=hidden -pthread

.PHONY: client-c fuzz-c install wheel serve test coverage coverage-ends test-pythons test-torch test-kserve test-node interop test-gpu test-cupy lint proto proto-check docs site bench bench-gpu gpu-day gpu-day-standin cuda-calls cuda-mistakes wheels gpu-site fuzz \
	chaos reload-drill fault-matrix restart-drill balance-drill cluster-drill soak rounds scale clean

serve: $(SERVE_DEPS) $(BYTECODE)  ## set up and run the server with the shipped workers
	$(BIN)/gunicorn -c gunicorn.conf.py shmserve.app

test: $(DEV_DEPS) $(BYTECODE)  ## set up and pass the tests; REQUIRE=browser,curl: none may be left out for want of one
	$(BIN)/python $(PYTEST) $(TESTS)

coverage: $(DEV_DEPS)  ## run COVERAGE_TESTS; fail if they run less of shmserve than pyproject.toml says
	rm -rf .coverage
	$(BIN)/coverage run $(PYTEST) -q $(COVERAGE_TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

test-pythons:  ## the unit part on each of PYTHONS, in environments of their own
	set -e; for python in $(PYTHONS); do $(MAKE) --no-print-directory test PYTHON=$$python TESTS=tests/unit; done

coverage-ends:  ## coverage, on the oldest and the newest of PYTHONS instead, where there are others than PYTHON
	set -e; for python in $(or $(sort $(filter-out $(shell $(PYTHON) $(EXECUTABLE)),\
			$(firstword $(PYTHONS)) $(lastword $(PYTHONS)))),$(PYTHON)); do \
		$(MAKE) --no-print-directory coverage PYTHON=$$python; \
	done

test-torch: $(TORCH_DEPS)  ## set up torch for the CPU and pass the tests of the pytorch backend
	$(BIN)/python -m pytest -m 'torch and not gpu' tests/torch

test-kserve: $(DEV_DEPS) $(KSERVE)/.kserve  ## set up KServe's Python client, try it, and hold deploy/kserve against it
	$(BIN)/python -m pytest --require=kserve -k kserve tests/e2e/test_public.py tests/unit/test_kserve_files.py

test-node: $(DEV_DEPS) $(NODE)/.grpc-js  ## set up grpc-js, with npm, and try it
	$(BIN)/python -m pytest --require=grpc-js -k grpc_js tests/e2e/test_public.py

interop: $(INTEROP_DEPS) $(NODE)/.grpc-js  ## gRPC clients of seven libraries, and three proxies, against a real server, into interop.md
	$(BIN)/python -m tests.interop $(INTEROP)

test-gpu: $(GPU_DEPS)  ## pass the tests of CUDA on the machine's GPU; PYTEST_GPU="--session-timeout=540"
	@# Warnings and plugins of whatever versions the host has are not what is tested. A driver that
	@# hangs lets no test time out: where it does is printed meanwhile.
	$(GPU_PYTHON) -m shmserve doctor || true
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_PYTHON) -u -m pytest -p pytest_timeout --real-cuda -v \
		-W default -o faulthandler_timeout=120 --durations=10 -m 'gpu or not torch' \
		$(PYTEST_GPU) $(GPU_TESTS)

test-cupy: $(DEV_DEPS) $(CUPY_BUILDS:%=.cupy%/.installed)  ## pass the tests of CUDA with the real CuPy, without a GPU: CUPY_BUILDS="12 13"
	@command -v g++ >/dev/null || { echo "test-cupy: g++ compiles what NVRTC would" >&2; exit 1; }
	set -e; for build in $(CUPY_BUILDS); do \
		$(BIN)/python -m tests.cuda.standin --cupy .cupy$$build $(BIN)/python $(PYTEST) -W default \
			--disable-warnings -m 'not torch' $(PYTEST_CUPY) tests/cuda; \
	done

lint: $(DEV_DEPS)  ## ruff, mypy strict (and the tests' bodies), import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples/polynomial
	$(BIN)/lint-imports

proto: $(DEV_DEPS)  ## generate shmserve/_generated from proto/
	$(BIN)/python proto/generate.py

docs: $(SERVE_DEPS)  ## write what of docs/ comes from the code: settings.md, drawings
	$(BIN)/python -m shmserve settings --markdown > docs/settings.md
	$(BIN)/python docs/draw.py

site: $(SITE_DEPS)  ## the documents as a site, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

proto-check: $(DEV_DEPS)  ## fail if shmserve/_generated is stale
	$(BIN)/python proto/generate.py --check

bench: $(BENCH_DEPS)  ## measure, into bench/results
	$(BIN)/python -m bench --quick

bench-gpu: $(GPU_DEPS)  ## measure the machine's GPU; BENCH_GPU="--quick --output FILE", for example
	$(GPU_PYTHON) -m bench.gpu $(BENCH_GPU)

gpu-day: $(GPU_DAY_DEPS)  ## all that waits for a GPU, in ten minutes, and one report; status 3: some was not run
	$(GPU_PYTHON) -m bench.gpu_day $(GPU_DAY)

gpu-day-standin: $(DEV_DEPS) .cupy12/.installed  ## the same over the stand-in for CUDA: it comes to its end, nothing is timed
	$(BIN)/python -m tests.cuda.standin --cupy .cupy12 $(BIN)/python -m bench.gpu_day $(GPU_DAY)

cuda-mistakes: $(DEV_DEPS) .cupy12/.installed  ## make mistakes in a copy of the tree; fail if nothing catches one
	$(BIN)/python -m tests.cuda_mistakes
	$(BIN)/python -m tests.cuda_mistakes --cupy .cupy12

cuda-calls: $(DEV_DEPS) .cupy12/.installed  ## measure which of the product's uses of CUDA the tests run, and write the table of them
	$(BIN)/python -m tests.cuda_calls run fake -q $(CALLS)
	$(BIN)/python -m tests.cuda.standin --cupy .cupy12 $(BIN)/python -m tests.cuda_calls run stand-in -q \
		-W default --disable-warnings -m 'not torch' $(CALLS)
	$(BIN)/python -m tests.cuda_calls table

wheels:  ## fetch what a GPU host without network lacks, for its PYTHON_VERSION (and MACHINE)
	rm -rf wheels
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
		--implementation cp --python-version $(PYTHON_VERSION) $(PLATFORMS) \
		-r tests/gpu-requirements.txt -d wheels
	du -sh wheels

fuzz: $(FUZZ_DEPS)  ## guided inputs for every parser: FUZZ_INPUTS of each, FUZZ_SECONDS of this run
	$(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS) --seconds $(FUZZ_SECONDS)

chaos: $(DEV_DEPS)  ## CHAOS_SECONDS of load, while all kinds of things befall every process
	$(BIN)/python -m tests.crash.chaos --seconds $(CHAOS_SECONDS)

reload-drill: $(DEV_DEPS)  ## 500 loads, reloads and unloads under load, looking for lost requests and growth
	$(BIN)/python -m tests.crash.reload --cycles 500

fault-matrix: $(DEV_DEPS)  ## every fault of every process in every stage, and the costs; FAULT_MATRIX="--only REGEX --results FILE"
	$(BIN)/python -m tests.crash.matrix $(FAULT_MATRIX)

restart-drill: $(DEV_DEPS)  ## 10 restarts and 10 reloads under load, as systemd would do them, looking for lost requests
	$(BIN)/python -m tests.crash.restart --restarts 10 --reloads 10

balance-drill: $(DEV_DEPS)  ## HAProxy before three services while things befall them; as root, needs haproxy and iproute2
	$(BIN)/python -m tests.balance.drill

soak: $(DEV_DEPS)  ## SOAK_SECONDS of load, looking for growth; writes and draws it: soak.csv, soak.svg
	$(BIN)/python -m tests.crash.soak --seconds $(SOAK_SECONDS)

cluster-drill: $(RAY_DEPS)  ## CLUSTER_SECONDS of load on a cluster of Ray, whose nodes are killed and come again
	$(BIN)/python -m tests.crash.cluster --seconds $(CLUSTER_SECONDS)

scale: $(BENCH_DEPS)  ## what docs/scale.md says of many hosts: simulated, and drawn into docs/scale
	$(BIN)/python -m bench.scale --plots docs/scale

rounds: $(DEV_DEPS)  ## 50,000 rounds of registering, using and removing memory, over HTTP and gRPC
	$(BIN)/python -m tests.crash.rounds

install:  ## the systemd units, below DESTDIR and PREFIX, for an environment in APP (python -m venv; pip install)
	install -d $(UNIT_DIR) $(DESTDIR)$(PREFIX)/lib/sysusers.d $(CONFIG_DIR)
	for unit in shmserve.service shmserve.socket shmserve-grpc.socket; do \
		sed 's|/opt/shmserve|$(APP)|g; s|/etc/shmserve|$(SYSCONFDIR)/shmserve|g' deploy/systemd/$$unit \
			> $(UNIT_DIR)/$$unit && chmod 644 $(UNIT_DIR)/$$unit || exit 1; \
	done
	install -m 644 deploy/systemd/shmserve.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/shmserve.conf
	@# What somebody has written there stays.
	test -e $(CONFIG_DIR)/shmserve.toml || install -m 644 deploy/systemd/shmserve.toml $(CONFIG_DIR)

client-c:  ## libshmserve, shared and static, in CLIENT_C; install it with `cmake --install`
ifneq ($(CMAKE),)
	$(CMAKE) -S client/c -B $(CLIENT_C) -DCMAKE_C_FLAGS=-Werror
	$(CMAKE) --build $(CLIENT_C)
else
	mkdir -p $(CLIENT_C)
	$(CC) $(CFLAGS_C) -c -o $(CLIENT_C)/shmserve.o client/c/shmserve.c
	$(AR) rcs $(CLIENT_C)/libshmserve.a $(CLIENT_C)/shmserve.o
	$(CC) -shared -pthread -Wl,-soname,libshmserve.so.0 -Wl,--version-script=client/c/shmserve.map \
		-o $(CLIENT_C)/libshmserve.so.0 $(CLIENT_C)/shmserve.o
	ln -sf libshmserve.so.0 $(CLIENT_C)/libshmserve.so
endif

fuzz-c:  ## FUZZ_INPUTS inputs for libshmserve's decoder, under the sanitizers of the compiler
	mkdir -p $(CLIENT_C)
	$(CC) -std=c11 -O2 -g -fsanitize=address,undefined -fno-sanitize-recover=all -pthread \
		-o $(CLIENT_C)/fuzz_decoder client/c/tests/fuzz_decoder.c
	$(CLIENT_C)/fuzz_decoder $(FUZZ_INPUTS)

wheel: $(VENV)/bin/python  ## dist/: wheels of client and server, and archives of their sources
	$(INSTALL) build
	$(BIN)/python -m build --outdir dist client
	$(BIN)/python -m build --outdir dist .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(SERVE_DEPS): $(VENV)/bin/python $(DISTRIBUTIONS)
	$(INSTALL_TREE) '.[onnx]'
	@touch $@

$(BYTECODE): $(shell find shmserve -name '*.py') | $(VENV)/bin/python
	$(BIN)/python -m compileall -q shmserve
	@touch $@

$(DEV_DEPS): $(VENV)/bin/python $(DISTRIBUTIONS)
	$(INSTALL_TREE) '.[onnx,dev]'
	@touch $(SERVE_DEPS) $@

$(TORCH_DEPS): $(DEV_DEPS)
	$(INSTALL) $(TORCH)
	@touch $@

.cupy%/.installed: | $(VENV)/bin/python
	$(INSTALL) --target .cupy$* --no-deps cupy-cuda$*x==$(CUPY_VERSION) 'cuda-pathfinder>=1.3.4,<2'
	@touch $@

$(FUZZ_DEPS): $(DEV_DEPS)
	$(INSTALL_TREE) '.[fuzz]'
	@touch $@

$(INTEROP_DEPS): $(DEV_DEPS)
	$(INSTALL_TREE) '.[interop]'
	@touch $@

$(BENCH_DEPS): $(DEV_DEPS)
	$(INSTALL_TREE) '.[bench]'
	@touch $@

$(SITE_DEPS): $(SERVE_DEPS)
	$(INSTALL_TREE) '.[docs]'
	@touch $@

$(RAY_DEPS): $(DEV_DEPS)
	$(INSTALL_TREE) '.[ray]'
	@touch $@

$(KSERVE)/.kserve:
	$(PYTHON) -m venv $(KSERVE)
	$(KSERVE)/bin/python -m pip install --quiet --disable-pip-version-check kserve==0.21.0
	@touch $@

$(NODE)/.grpc-js:
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(NODE) $(NODE_PACKAGES)
	@touch $@

gpu-site:
	$(PYTHON) tests/gpu_site.py wheels .gpu-site
	@# As BYTECODE.
	$(PYTHON) -m compileall -qq -j 0 shmserve .gpu-site || true

$(VENV)/.gpu: $(DEV_DEPS) $(TORCH_DEPS)
	$(INSTALL_TREE) '.[onnx,dev,gpu]'
	@touch $@

clean:  ## remove what the targets above have made
	rm -rf .venv .venv-* .cupy* $(NODE) site .coverage .gpu-site wheels bench/build .fuzz .interop interop.md soak.csv soak.svg .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
