# Every target creates the environment .venv first.
#
# make demo           compare four methods on the digits
# make test           run the test suite
# make check          check format, lint and types, and build the documentation
# make docs           build the documentation in build/site
# make bench          run the micro-benchmarks
# make evidence       repeat the experiments of benchmarks/papers
# make asynchrony     repeat the experiments of benchmarks/asynchrony
# make release        build the source distribution and the wheels in dist
# make soak           run the test suite with more examples for each property
# make sanitize       run the kernel tests with the address and undefined-behaviour sanitizers
# make screens        save screenshots of five pages of the documentation in build/screens
#
# The following tests take minutes. Some of them create further environments.
#
# make test-packages  install the released packages in empty environments, and test them
# make test-flower    start processes of Flower in a separate network namespace (Linux only)
# make test-hosts     run the recipes for FLGo, APPFL and NVFlare
# make test-peft      average adapters of PEFT
# make test-diloco    run the outer optimiser with torchft
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-flower test-hosts test-packages test-peft test-diloco check docs release sanitize screens soak bench clean

demo: .venv/.installed
	$(BIN)/manifoldagg compare --data digits --clients 30 --updates 200 --seeds 3

test: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test-flower: .venv/.installed
	$(BIN)/python tests/network/flower.py

test-hosts: .venv/.installed
	$(BIN)/python benchmarks/peers/hosts.py

test-packages: .venv/.installed
	$(BIN)/python tests/packages.py

test-peft: .venv/.installed
	$(BIN)/python benchmarks/peers/peft_tests.py

# The environment of torchft also imports the packages of .venv.
test-diloco: .venv/.installed
	$(PYTHON) -m venv build/torchft
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$$(build/torchft/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/beside.pth"
	build/torchft/bin/python -m pip install --quiet --disable-pip-version-check opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	build/torchft/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchft-nightly
	PYTHONPATH=. build/torchft/bin/python tests/network/diloco.py

check: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) docs

docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

# The experiments of benchmarks/papers/README.md take hours. An interrupted command resumes when it is called again. The
# folder DATA contains the data sets. Each table and each script has its own target:
# make -j2 evidence DATA=folder; make evidence-digits DATA=folder
TABLES := $(shell sed -n 's/^\[\([a-z].*\)\]$$/\1/p' benchmarks/papers/evidence.toml | grep -v defaults)
SCRIPTS := corrections curved routing adapters
EVIDENCE := benchmarks/results/papers
# The tables of benchmarks/asynchrony/README.md.
ASYNCHRONY := $(shell sed -n 's/^\[\([a-z].*\)\]$$/\1/p' benchmarks/asynchrony/runs.toml | grep -v defaults)

.PHONY: evidence asynchrony $(TABLES:%=evidence-%) $(SCRIPTS:%=evidence-%) $(ASYNCHRONY:%=evidence-%)
asynchrony: $(ASYNCHRONY:%=evidence-%)

evidence: $(TABLES:%=evidence-%) $(SCRIPTS:%=evidence-%)
	$(BIN)/python benchmarks/papers/tables.py

build/data:
	@[ -d "$(DATA)" ] || { echo "DATA: expected the folder of the data sets: make evidence DATA=folder"; exit 2; }
	mkdir -p build && ln -s "$$(realpath "$(DATA)")" $@

$(SCRIPTS:%=evidence-%): evidence-%: .venv/.installed | build/data
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/papers/$*.py

$(TABLES:%=evidence-%): evidence-%: .venv/.installed | build/data
	OMP_NUM_THREADS=1 $(BIN)/manifoldagg compare --config benchmarks/papers/evidence.toml --only $* --out $(EVIDENCE) --resume

$(ASYNCHRONY:%=evidence-%): evidence-%: .venv/.installed | build/data
	OMP_NUM_THREADS=1 $(BIN)/manifoldagg compare --config benchmarks/asynchrony/runs.toml --only $* --out benchmarks/results/asynchrony --resume

# The source distribution, a wheel for all platforms, and a wheel for Linux on x86-64 with compiled kernels.
release: .venv/.installed
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	HATCH_BUILD_HOOKS_ENABLE=true $(BIN)/uv build --wheel --build-constraints constraints.txt --out-dir dist .

screens: .venv/.installed
	$(BIN)/pytest tests/test_site.py --basetemp=build/screens

soak: .venv/.installed
	HYPOTHESIS_PROFILE=soak OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "soak or not soak"

SANITIZERS = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libubsan.so)
sanitize: .venv/.installed
	MANIFOLDAGG_COMPILER_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined" OMP_NUM_THREADS=1 \
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(SANITIZERS)" $(BIN)/python -m pytest -q tests/kernels/test_fused.py \
	tests/kernels/test_gram_combine.py tests/kernels/test_tensor_list.py tests/kernels/backends/test_cpu.py \
	tests/kernels/backends/test_tensor_reader.py

bench: .venv/.installed
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/manifolds.py
	$(BIN)/python benchmarks/curve_step.py
	$(BIN)/python benchmarks/server_step.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/adapters.py
	$(BIN)/python benchmarks/aggregate.py
	$(BIN)/python benchmarks/step_calls.py
	$(BIN)/python benchmarks/outer.py
	$(BIN)/python benchmarks/server_load.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/clock.py
	$(BIN)/python benchmarks/routing.py
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/flower.py

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "manifoldagg needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cli,experiments,flower,triton,wire,dev]'
	touch $@

clean:
	rm -rf .venv build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
