# Two commands to begin with: make demo, make test.  Each does all set-up and can be repeated.
#
# TORCH_INDEX  the package index to take torch from.  pytorch.org/get-started/locally names the one with CPU
#              builds; without it pip's own index decides, which on Linux may mean a CUDA build of several GB:
#                  make demo TORCH_INDEX=<that address>
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
PACKAGES := $(wildcard packages/*/pyproject.toml)
# The nano model is small: a second thread costs more than it gives, and far more where the cores are shared.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-long check train model-card clean

demo: $(VENV)/.run
	$(VENV)/bin/trueup demo

test: $(VENV)/.dev $(VENV)/.npu check
	$(PY) -m pytest -m "not long" --durations=8

test-long: $(VENV)/.dev $(VENV)/.npu
	$(PY) -m pytest -m long

check: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# Hours of two cores; the trained checkpoint is in the repository, so nothing needs this.
NANO := packages/models/src/trueup/models/zoo/glm-4.7-flash-nano
train: $(VENV)/.dev
	$(PY) -m trueup.models.training train build/nano --model $(NANO)

model-card: $(VENV)/.dev
	$(PY) -m trueup.models.training card build/nano --model $(NANO)

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache

$(VENV)/.torch: constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	touch $@

$(VENV)/.run: $(VENV)/.torch $(PACKAGES)
	$(PIP) -c constraints.txt $(foreach p,$(PACKAGES),-e $(dir $(p)))
	touch $@

$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	$(PIP) -c constraints.txt -r requirements-dev.txt
	touch $@

# The real torch_npu, for tests/conformance.  Beside the venv's own packages, not among them: installed there
# it would make a plain `import torch` fail on a machine without the driver.
$(VENV)/.npu: $(VENV)/.dev
	$(PIP) --no-deps --target $(VENV)/torch_npu --upgrade -c constraints.txt torch_npu \
	  || echo "torch_npu has no wheel for this platform: tests/conformance will be skipped"
	touch $@
