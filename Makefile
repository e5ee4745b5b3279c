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

.PHONY: demo test test-long check train model-card train-eagle eagle-card train-indexer indexer-card clean docs docs-serve docs-test chapters-sync book

demo: $(VENV)/.run
	$(VENV)/bin/trueup demo

test: $(VENV)/.dev $(VENV)/.npu $(VENV)/.docs check
	$(PY) -m pytest -m "not long and not site" --durations=8

test-long: $(VENV)/.dev $(VENV)/.npu $(VENV)/.docs
	$(PY) -m pytest -m long

check: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# Both languages of the site, strictly, into site/; CI runs the chapters that did not change, too.
# SITE_URL: where it will be published.
BOOK := $(PY) -m tools.book
docs: $(VENV)/.docs
	$(BOOK) site $(if $(CI),--no-cache) $(if $(SITE_URL),--url $(SITE_URL))

docs-serve: docs
	@echo "http://127.0.0.1:8000/  (Ctrl-C ends it)"
	$(PY) -m http.server 8000 --bind 127.0.0.1 --directory site

# The pages in headless Chromium: looks, links, search, accessibility.
docs-test: docs $(VENV)/.chromium $(VENV)/axe.min.js
	$(PY) -m pytest -m site tests/book

# After editing chapters.  AGREED=1: what changed in one language needs no change in the other.
chapters-sync: $(VENV)/.docs
	$(BOOK) sync $(if $(AGREED),--agreed)

# The chapters as notebooks in JupyterLab.
book: $(VENV)/.run requirements-book.txt
	$(PIP) -c constraints.txt -r requirements-book.txt
	$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/tutorials/en

# Hours of two cores; the trained checkpoint is in the repository, so nothing needs this.
NANO := packages/models/src/trueup/models/zoo/glm-4.7-flash-nano
train: $(VENV)/.dev
	$(PY) -m trueup.models.training train build/nano --model $(NANO)

model-card: $(VENV)/.dev
	$(PY) -m trueup.models.training card build/nano --model $(NANO)

train-eagle: $(VENV)/.dev
	$(PY) -m trueup.models.training eagle build/eagle --model $(NANO) --head $(NANO)-eagle3

eagle-card: $(VENV)/.dev
	$(PY) -m trueup.models.training eagle-card build/eagle --model $(NANO) --head $(NANO)-eagle3

train-indexer: $(VENV)/.dev
	$(PY) -m trueup.models.training indexer build/indexer --model $(NANO)

indexer-card: $(VENV)/.dev
	$(PY) -m trueup.models.training indexer-card build/indexer --model $(NANO)

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

$(VENV)/.docs: $(VENV)/.dev requirements-docs.txt
	$(PIP) -c constraints.txt -r requirements-docs.txt
	touch $@

# What `make docs-test` needs besides Python packages.  Where it cannot be had its tests are skipped.
$(VENV)/.chromium:
	{ command -v chromium || command -v google-chrome; } && command -v chromedriver || { test "$$(id -u)" = 0 && apt-get update -q \
	  && apt-get install -q -y --no-install-recommends chromium chromium-driver fonts-noto-cjk; } \
	  || echo "no chromium, and no apt-get as root: the tests of the pages will be skipped"
	touch $@

AXE := 4.14.1
$(VENV)/axe.min.js:
	cd $(VENV) && npm pack --silent axe-core@$(AXE) && tar -xzf axe-core-$(AXE).tgz package/axe.min.js \
	  && mv package/axe.min.js . && rm -r package axe-core-$(AXE).tgz \
	  || echo "no npm: the accessibility test will be skipped"

# The real torch_npu, for tests/conformance.  Beside the venv's own packages, not among them: installed there
# it would make a plain `import torch` fail on a machine without the driver.
$(VENV)/.npu: $(VENV)/.dev
	$(PIP) --no-deps --target $(VENV)/torch_npu --upgrade -c constraints.txt torch_npu \
	  || echo "torch_npu has no wheel for this platform: tests/conformance will be skipped"
	touch $@
