# Set-up, tests, lint, demos. Needs Python 3.11 or later as `python3`, GNU make, a package registry
# that pip is set up for and, without FARCALL_NATIVE=0, a C++20 compiler and Python's headers. Everything is
# installed into .venv, here in the checkout; C++ is built in build/.

.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_MADE := $(VENV)/.made
INSTALLED := $(VENV)/.installed
DEMOS_INSTALLED := $(VENV)/.demos
COMPILES := $(VENV)/.compiles
DEMOS := demo demo-cartpole demo-rnn demo-parameter-server
# Who only wants to see a demo needs no linters.
ENVIRONMENT := $(if $(filter-out $(DEMOS),$(MAKECMDGOALS)),$(INSTALLED),$(DEMOS_INSTALLED))
TOOLS := build/tools
NATIVE := build/native/.built
READY = $(ENVIRONMENT) $(NATIVE)
NATIVE_SOURCES := CMakeLists.txt $(wildcard cmake/*.cmake native/*.cpp native/*.hpp native/*/*.cpp native/*/*.hpp)
CONFIGURE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
MODULE := -DFARCALL_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
NO_MODULE := -DFARCALL_PYTHON=OFF
# For checks that compile everything: the files of a target become one, so that headers are read once.
# Not for `make native` and wheels: there a change compiles one file, and each file has all its headers.
AT_ONCE := -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0
NEEDS_CLANG = command -v $(CLANG) >/dev/null || { \
  echo "$(CLANG) is not installed. Debian and Ubuntu: apt-get install clang. Or say CLANG=..."; exit 1; }

DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
FIELD_ARGS ?=
MATRIX_ARGS ?=
MINUTES ?= 10
CALLS ?= 10000000
REFERENCES ?= $$(($(CALLS) / 10))
PASSES ?= $$(($(CALLS) / 100))
SCHEDULES ?= 10000
PROGRAMS ?= 1000
WORKERS ?= 300
SEED ?= 0
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
SECONDS ?= 3600
CLANG ?= clang++
SANITIZER ?= address
FACTOR ?= 8
# AddressSanitizer and UndefinedBehaviorSanitizer can watch the same program.
SANITIZE_address := address,undefined
SANITIZE_thread := thread
RUNTIME_address := libasan.so
RUNTIME_thread := libtsan.so

.PHONY: help $(DEMOS) test test-slow conformance lint check format tidy pictures recording docs sim field chaos soak bench bench-keep bench-all clean
.PHONY: native native-test native-clang sanitize sanitize-python fuzz lock wheel matrix audit

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Done again only when what is to be installed changes. Every file that pip takes has a hash in
# requirements/$(1).txt, but torch's: see requirements/torch.in. No build of ours is isolated, since pip
# would install what it needs without looking at hashes. The C++ part is built below, not by pip.
# Compiling all that pip installs takes a minute of a core. Each module is compiled when it is first
# imported instead, so this has to be allowed: images of containers forbid it.
PIP := -m pip install --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
define install
$(BIN)/python $(PIP) --no-deps --require-hashes -r requirements/$(1).txt
$(BIN)/python $(PIP) -c constraints.txt torch
$(BIN)/python $(PIP) --no-deps --no-build-isolation -Ccmake.define.FARCALL_PYTHON=OFF -e .
endef

$(VENV_MADE):
	$(PYTHON) -m venv $(VENV)
	@touch $@

# For tests and everything else that developers do. The demos are in it.
$(INSTALLED): pyproject.toml constraints.txt requirements/dev.txt | $(COMPILES)
	$(call install,dev)
	@touch $@ $(DEMOS_INSTALLED)

# For the demos: what users install, and what the C++ part is built with.
$(DEMOS_INSTALLED): pyproject.toml constraints.txt requirements/demos.txt | $(COMPILES)
	$(call install,demos)
	@touch $@

# What compiles the C++ part comes first: one core compiles while pip installs the rest on the other.
$(COMPILES): requirements/build.txt | $(VENV_MADE)
	$(BIN)/python $(PIP) --no-deps --require-hashes -r requirements/build.txt
	@touch $@

# Two jobs at once, but not of several goals, whose order the user gives. Nor are they for other programs
# to find in MAKEFLAGS: Ninja would try to share them.
ifeq ($(words $(MAKECMDGOALS)),1)
MAKEFLAGS += -j2
endif
unexport MAKEFLAGS

# The Python module, beside the Python files. FARCALL_NATIVE=0 leaves it out.
$(NATIVE): $(COMPILES) $(NATIVE_SOURCES)
ifeq ($(shell uname -s),Linux)
	@if [ "$$FARCALL_NATIVE" = 0 ]; then \
	  echo "FARCALL_NATIVE=0: farcall will use the socket transport (docs/native.md)."; \
	else \
	  $(BIN)/python packaging/build_backend.py && \
	  $(CONFIGURE) -B build/native $(MODULE) -DFARCALL_IN_PLACE=ON && \
	  $(BIN)/cmake --build build/native && touch $@; \
	fi
endif

native: $(READY) ## Build the C++ part again if its sources changed. What needs it does so, too.

demo: demo-cartpole ## Run the main demo; output under demo-out/. Options: DEMO_ARGS="--seed 3"

demo-cartpole: $(READY) ## Balance a pole: one agent learns, observers play.
	$(BIN)/farcall demo cartpole --out demo-out/cartpole $(DEMO_ARGS)

demo-rnn: $(READY) ## Learn to predict words: a model on two workers.
	$(BIN)/farcall demo rnn --out demo-out/rnn $(DEMO_ARGS)

demo-parameter-server: $(READY) ## Tell digits apart: trainers around one parameter server.
	$(BIN)/farcall demo parameter-server --out demo-out/parameter-server $(DEMO_ARGS)

# Tests wait now and then, for processes most of all: both halves run at once, and have more processes
# than there are cores. The output of tests/attacks and tests/process comes at the end; tests/attacks,
# which waits longest, begins. A test that stops its process with the GIL
# held is out of reach of its own timeout, 600 seconds or up to 920 in tests/process: somewhat later the
# process ends with the stacks of its threads, and the run soon after. No other process takes its place:
# with loadfile, xdist's runs may then never end.
# Files with many tests come first, but for tests/process: there a single test may take minutes.
IN_PARALLEL = tests/unit tests/behaviour tests/transport tests/typing
OF_PROCESSES = tests/attacks tests/process
TESTS = $(BIN)/python -m pytest --dist loadfile --max-worker-restart=0 -o faulthandler_exit_on_timeout=true
test: $(READY) ## Run the tests. Options: TEST_ARGS="tests/unit -k wire"
ifeq ($(TEST_ARGS),)
	@failed=; output=$$(mktemp); trap 'rm -f "$$output"' EXIT; \
	$(TESTS) -n 4 --no-loadscope-reorder -o faulthandler_timeout=1000 $(OF_PROCESSES) >"$$output" 2>&1 & \
	$(TESTS) -n $$(($(JOBS) + 1)) -o faulthandler_timeout=700 $(IN_PARALLEL) || failed="$$failed $(IN_PARALLEL)"; \
	wait $$! || failed="$$failed $(OF_PROCESSES)"; \
	cat "$$output"; \
	if [ -n "$$failed" ]; then echo "Failed:$$failed"; exit 1; fi; \
	echo "All tests passed: $(IN_PARALLEL) $(OF_PROCESSES)"
else
	$(BIN)/python -m pytest $(TEST_ARGS)
endif

# For each change of limits of time. Where a test waits for a limit to pass, it waits less, too.
FAST_CLOCK = build/fast_clock.so
test-slow: $(READY) ## Run tests as on a machine that is 8 times slower. Options: FACTOR=20 TEST_ARGS="tests/process"
	$${CC:-cc} -O2 -shared -fPIC -o $(FAST_CLOCK) tests/fast_clock.c -ldl
	FAST_CLOCK=$(FACTOR) LD_PRELOAD=$(CURDIR)/$(FAST_CLOCK) $(TESTS) --timeout=0 -n auto $(or $(TEST_ARGS),$(IN_PARALLEL))

conformance: $(READY) ## Run PyTorch's own RPC tests on farcall. Options: CONFORMANCE_ARGS="--list extended"
	$(BIN)/python tests/conformance/run_conformance.py --impl farcall --impl-path src --list core,scripted \
	  --start forkserver --strict -j $(JOBS) --json conformance-out/results.json --logs conformance-out/logs \
	  $(CONFORMANCE_ARGS)

CPP := $(filter native/%,$(NATIVE_SOURCES))
lint: $(INSTALLED) ## Check style, spelling and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/codespell
	$(BIN)/mypy -n auto

# What one change is tried with again and again: under 30 seconds on two cores.
check: $(READY) lint ## Lint, and run the fast tests.
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m fast tests/unit

format: $(INSTALLED) ## Reformat, and fix what a tool can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

tidy: $(INSTALLED) ## Let clang-tidy look through the C++ part. Takes minutes.
	$(CONFIGURE) -B build/tidy $(MODULE)
	$(BIN)/clang-tidy -p build/tidy --quiet native/*.cpp native/core/*.cpp native/plain/*.cpp

pictures: $(VENV_MADE) ## Draw the layers, the modules and the machines of protocol/ again, into the pages.
	$(BIN)/python tests/pictures.py

recording: $(READY) ## Record a demo in a terminal, as the README's moving picture. Takes half a minute.
	$(BIN)/python docs/recording.py

docs: $(INSTALLED) ## Build the site, strictly, into build/site.
	$(BIN)/python -m mkdocs build --strict

sim: $(READY) ## Simulate protocols and workers, run random programs. Options: SCHEDULES=100000 WORKERS=1000 PROGRAMS=10000 SEED=0 JOBS=2
	for protocol in calls backward connecting termination directory supervision; do \
	    PYTHONPATH=tests $(BIN)/python -m simulator.sim --protocol $$protocol --schedules 3000 --coverage && \
	    PYTHONPATH=tests $(BIN)/python -m simulator.sim --protocol $$protocol --schedules $(SCHEDULES) --seed $(SEED) --jobs $(JOBS) \
	    || exit 1; \
	done
	PYTHONPATH=tests $(BIN)/python -m simulator.sim --protocol agents --schedules $(WORKERS) --seed $(SEED) --jobs $(JOBS)
	PYTHONPATH=tests $(BIN)/python -m simulator.gradients --programs $(PROGRAMS) --seed $(SEED) --jobs $(JOBS)

field: $(READY) ## Try with real processes what the simulator promises. Options: FIELD_ARGS="--trials stands,many"
	$(BIN)/python tests/field/run.py $(FIELD_ARGS)

chaos: $(READY) ## Kill or stop one of six workers every second. Options: MINUTES=10 SEED=0
	$(BIN)/python tests/field/run.py --trials chaos --minutes $(MINUTES) --seed $(SEED)

soak: $(READY) ## Look for growth of memory over many calls. Options: CALLS=100000 (REFERENCES a tenth, PASSES a hundredth) SEED=0
	$(BIN)/python tests/field/run.py --trials soak --calls $(CALLS) --references $(REFERENCES) --passes $(PASSES) --seed $(SEED)

bench: $(READY) ## Measure against torch.distributed.rpc; output under bench-out/. Options: BENCH_ARGS="--rounds 5"
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

bench-keep: $(INSTALLED) ## Keep the run of `make bench` in benchmarks/history/, and draw the README's chart of it.
	$(BIN)/python benchmarks/keep.py

$(VENV)/.bench: requirements/bench.txt | $(INSTALLED)
	$(call install,bench)
	@touch $@

bench-all: $(READY) $(VENV)/.bench ## Measure against Ray, RPyC and gRPC, too.
	$(BIN)/python benchmarks/run.py --implementations farcall,torch,ray,rpyc,grpc $(BENCH_ARGS)

# $(1): the folder under build/. $(2): options of CMakeLists.txt.
define check_native
$(CONFIGURE) -B build/$(1) -DFARCALL_TESTS=ON -DFARCALL_WERROR=ON $(AT_ONCE) $(2)
$(BIN)/cmake --build build/$(1)
$(BIN)/ctest --test-dir build/$(1) --output-on-failure --no-tests=error -j $(JOBS)
endef

native-test: $(INSTALLED) ## Build the C++ part with warnings as errors, and run its tests.
	$(call check_native,test,$(MODULE))

native-clang: $(INSTALLED) ## The same with Clang. Options: CLANG=clang++-19
	@$(NEEDS_CLANG)
	CXX=$(CLANG) $(call check_native,clang,$(MODULE))

SANITIZED := sanitize-address sanitize-thread
.PHONY: $(SANITIZED)
sanitize: $(SANITIZED) ## Run the C++ tests under each sanitizer.

ifeq ($(MAKECMDGOALS),sanitize)
sanitize-thread: | sanitize-address
endif

$(SANITIZED): sanitize-%: $(INSTALLED)
	$(call check_native,$*,$(NO_MODULE) -DFARCALL_SANITIZE=$(SANITIZE_$*))

# The package again, as links, with a module that is checked. Leaks of Python are not looked for.
CHECKED = build/$(SANITIZER)/python

sanitize-python: $(INSTALLED) ## Run the tests of the native transport with a sanitizer. Options: SANITIZER=thread TEST_ARGS="tests/process"
	$(CONFIGURE) -B build/$(SANITIZER) $(MODULE) $(AT_ONCE) -DFARCALL_WERROR=ON -DFARCALL_SANITIZE=$(or \
	  $(SANITIZE_$(SANITIZER)),$(error SANITIZER is address or thread, not $(SANITIZER)))
	$(BIN)/cmake --build build/$(SANITIZER) --target _native
	rm -rf $(CHECKED)
	mkdir $(CHECKED)
	cp -rs $(CURDIR)/src/farcall $(CHECKED)/
	rm -f $(CHECKED)/farcall/_native.*.so
	cp build/$(SANITIZER)/_native.*.so $(CHECKED)/farcall/
	library() { "$${CXX:-c++}" -print-file-name=$$1; }; \
	LD_PRELOAD="$$(library $(RUNTIME_$(SANITIZER))) $$(library libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(CURDIR)/$(CHECKED) \
	  $(BIN)/python -m pytest -n auto --dist loadfile \
	  $(or $(TEST_ARGS),-k "native or shm or plain" tests/transport tests/unit/test_serde_plain.py)

# With libFuzzer where Clang has it (Debian's clang may come without), else with a driver of ours
# (native/fuzz/driver.cpp).
FUZZ_TARGET = extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }
FUZZ_COMPILER = $(shell echo '$(FUZZ_TARGET)' | $(CLANG) -x c++ -fsanitize=fuzzer,$(SANITIZE_address) - -o /dev/null \
  2>/dev/null && echo $(CLANG) || echo "$${CXX:-c++}")
fuzz: $(READY) ## Fuzz what reads a peer's bytes. Options: SECONDS=86400 (for all targets; default: an hour)
	CXX=$(FUZZ_COMPILER) $(CONFIGURE) -B build/fuzz $(NO_MODULE) $(AT_ONCE) -DFARCALL_FUZZ=ON -DFARCALL_WERROR=ON \
	  -DFARCALL_SANITIZE=address,undefined
	$(BIN)/cmake --build build/fuzz
	$(BIN)/python tests/fuzz/run.py --native build/fuzz --seconds $(SECONDS) --jobs $(JOBS)

# What makes requirements/ and looks through it, in an environment of its own.
$(TOOLS)/.made: requirements/lock.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python $(PIP) --no-deps --require-hashes -r requirements/lock.txt
	@touch $@

LOCK = $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
  -c constraints.txt --overrides requirements/without-torch.txt pyproject.toml
lock: $(TOOLS)/.made ## Write requirements/*.txt anew, from pyproject.toml and constraints.txt.
	$(LOCK) --extra build -o requirements/build.txt
	$(LOCK) requirements/torch.in --extra demos --extra build -o requirements/demos.txt
	$(LOCK) requirements/torch.in --extra dev -o requirements/dev.txt
	$(LOCK) requirements/torch.in --extra dev --extra bench -o requirements/bench.txt
	$(LOCK) --extra lock -o requirements/lock.txt
	$(LOCK) --extra wheel -o requirements/wheel.txt

# A plain wheel for this Python. Where it is built decides which Linux it runs on: auditwheel looks, says so in
# its name, and brings in libraries that need not be there. `.github/workflows/release.yml` builds the others.
WHEEL_TOOLS := build/wheel-tools
$(WHEEL_TOOLS)/.made: requirements/wheel.txt
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python $(PIP) --no-deps --require-hashes -r requirements/wheel.txt
	@touch $@

wheel: $(INSTALLED) $(WHEEL_TOOLS)/.made ## Build the wheel for this Python and this machine, into dist/. Option: FARCALL_NATIVE=0
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	@mkdir -p dist
	@case "$$(ls build/wheel)" in \
	  *-linux_*) PATH=$(CURDIR)/$(WHEEL_TOOLS)/bin:$$PATH $(WHEEL_TOOLS)/bin/auditwheel repair -w dist build/wheel/*.whl ;; \
	  *) cp build/wheel/*.whl dist/ ;; \
	esac

matrix: ## Install into fresh environments of each Python and torch. Options: MATRIX_ARGS="--short --without-cuda"
	$(PYTHON) tests/matrix.py $(MATRIX_ARGS)

audit: $(TOOLS)/.made ## Ask a database of vulnerabilities about requirements/*.txt. Needs the network.
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/bench.txt -r requirements/lock.txt -r requirements/wheel.txt

clean: ## Delete .venv, demo-out, what was built and all caches.
	rm -rf $(VENV) build dist src/farcall/_native.*.so demo-out bench-out conformance-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
