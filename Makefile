# Each target works as the first command typed: it makes .venv if there is none.
VENV ?= .venv
BIN := $(VENV)/bin
RECIPE ?= smollm2
# Tests at a time of those that start processes, and wait for them a third of their time: one more than two cores.
TESTS ?= 3
export OMP_NUM_THREADS ?= 1

.PHONY: image setup train smollm2 test soak check e2e bench gpu ratios staleness claims docs report trackers constraints canary

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints/cpu.txt constraints/gpu.txt launch/scripts/install.sh
	sh launch/scripts/install.sh $(VENV)

train: setup            ## the main job: a pretrained language model learns to add, asynchronously, in minutes
	$(BIN)/offbeat train $(RECIPE)

smollm2: setup          ## get SmolLM2-135M-Instruct, which `make train` trains, with a hub or without one
	$(BIN)/offbeat model smollm2

test: setup             ## all tests but the end-to-end ones
	$(BIN)/python -m pytest -n 2 --dist loadfile -q tests/unit tests/oracle tests/property protocol broker envs actors learner launch
	$(BIN)/python -m pytest -n $(TESTS) --dist loadfile -q tests/integration

soak: setup             ## the property tests with fifty times as many examples, and slow tests; a quarter of an hour
	OFFBEAT_EFFORT=50 $(BIN)/python -m pytest -n 2 -q tests/property
	$(BIN)/python -m pytest -q -m soak tests

check: setup            ## format, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m tests.size_report

report: setup           ## name long files and long functions; fails on nothing
	@$(BIN)/python -m tests.size_report

trackers: build/trackers/.installed ## each tracker's own package, offline, and pandas: what was stored is read back; gets the packages
	OFFBEAT_TRACKERS=$(CURDIR)/build/trackers $(BIN)/python -m pytest -q -rs tests/integration/learner/trackers \
		tests/unit/launch/test_tokens_command.py

build/trackers/.installed: constraints/trackers.txt | setup
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-warn-conflicts --upgrade \
		-c constraints/trackers.txt --target build/trackers wandb mlflow-skinny sqlalchemy alembic swanlab trackio \
		pyarrow pandas
	@touch $@

constraints: setup      ## write constraints/: cpu.txt from what is installed, the others from what pip would install
	$(BIN)/python -m tests.constraints constraints/cpu.txt cpu dev
	$(BIN)/python -m tests.constraints constraints/gpu.txt gpu dev --resolve
	$(BIN)/python -m tests.constraints constraints/trackers.txt wandb mlflow swanlab trackio parquet --resolve

canary:                 ## the newest vLLM and transformers in an environment of their own; says what broke
	sh launch/scripts/canary.sh build/canary

e2e: setup              ## the real system learns, at reduced length
	$(BIN)/python -m pytest -n $(TESTS) --dist loadfile tests/e2e -q --durations=12

bench: setup            ## measure ratios against a peer or a limit, and fill docs/benchmarks.md; some twenty minutes
	$(BIN)/python -m benchmarks.page --measure ratios learner generation weights broker

gpu: setup              ## tests/gpu, and benchmarks/gpu beside bare loops; an hour or more on a GPU, and a word without one
	$(BIN)/python -m pytest tests/gpu -q -rs
	$(BIN)/python -m benchmarks.gpu

ratios: setup           ## codec, batching, objective: not dearer than benchmarks/ratios/baseline.json says
	$(BIN)/python -m benchmarks.ratios

staleness: setup        ## reward over exact policy lag, every recipe: what is not published yet; hours, resumable
	$(BIN)/python -m benchmarks.frontier measure
	$(BIN)/python -m benchmarks.frontier measure --stage second
	$(BIN)/python -m benchmarks.frontier results --plot build/staleness.png

claims: setup           ## what methods do for their tasks, on paired seeds; an hour, resumable
	$(BIN)/python -m benchmarks.claims --plot build/claims.png

docs: setup             ## generated pages of docs/, and the API reference in build/docs
	$(BIN)/python -m launch.reference docs
	$(BIN)/pdoc --output-directory build/docs protocol broker envs actors learner launch

# An image for Kubernetes, see docs/run/kubernetes.md. Without a registry of base images, BASE is made by debootstrap.
IMAGE ?= localhost/offbeat:latest
EXTRA ?= cpu
BASE ?= localhost/offbeat-base:latest
BUILDAH_OPTIONS ?=
image:                  ## an image with offbeat by buildah: EXTRA=cpu, gpu or nothing; needs root, buildah, debootstrap
	buildah inspect --type image $(BASE) >/dev/null 2>&1 || sh launch/scripts/base_image.sh $(BASE)
	buildah build $(BUILDAH_OPTIONS) --build-arg BASE=$(BASE) --build-arg EXTRA=$(EXTRA) --tag $(IMAGE) .
