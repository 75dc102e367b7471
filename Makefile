# make demo: the main job.  make test: the whole test suite.  Both make .venv first.
# make test-packages: what is released, in empty environments; minutes.
# make test-peft: adapters of the real PEFT, in an environment of its own.
# make test-flower: real processes of Flower on a loopback of their own; Linux, minutes.
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

# torchft in an environment of its own, beside the packages of .venv.
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

# What each method is worth (benchmarks/papers/README.md), by what is in the folder DATA: hours, and it goes on where it
# was stopped. A part for each table and script: make -j2 evidence DATA=...; make evidence-digits.
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
	@[ -d "$(DATA)" ] || { echo "where are the data? make evidence DATA=folder"; exit 2; }
	mkdir -p build && ln -s "$$(realpath "$(DATA)")" $@

$(SCRIPTS:%=evidence-%): evidence-%: .venv/.installed | build/data
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/papers/$*.py

$(TABLES:%=evidence-%): evidence-%: .venv/.installed | build/data
	OMP_NUM_THREADS=1 $(BIN)/manifoldagg compare --config benchmarks/papers/evidence.toml --only $* --out $(EVIDENCE) --resume

$(ASYNCHRONY:%=evidence-%): evidence-%: .venv/.installed | build/data
	OMP_NUM_THREADS=1 $(BIN)/manifoldagg compare --config benchmarks/asynchrony/runs.toml --only $* --out benchmarks/results/asynchrony --resume

# What is uploaded, in dist/: the source, a wheel for anywhere, and one for Linux on x86-64 with the compiled kernels in it.
release: .venv/.installed
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	HATCH_BUILD_HOOKS_ENABLE=true $(BIN)/uv build --wheel --build-constraints constraints.txt --out-dir dist .

# Five pages as a browser shows them, in build/screens/.
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
