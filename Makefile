# Two commands: `make demo` and `make test`. Each sets up what it needs; a second run skips the set-up.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
PROJECT_VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
export PYTHONUNBUFFERED := 1
# Without cached bytecode every program compiles torch and transformers again, which takes longer than all other
# imports.
export PYTHONDONTWRITEBYTECODE :=
export DAGSTER_HOME := $(CURDIR)

.PHONY: help setup setup-test setup-python setup-tokenizer demo test test-fast test-sglang test-cluster test-storm test-install test-deploy test-gpu test-docs test-faults test-hostile test-windows fuzz bench-env bench-settling bench-data bench-rollout bench-training bench-demo bench-learning bench-scale bench-cluster bench-viewer bench-weights check images release docs format dev mlflow constraints clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: ## Debian packages and .venv
	@scripts/setup

setup-test:
	@scripts/setup debian qemu extras python bytecode tokenizer hosts

setup-python:
	@scripts/setup python

setup-tokenizer: setup-python
	@scripts/setup tokenizer

demo: setup ## the whole pipeline on this machine, then a table of success rates
	@$(BIN)/osworld-pipeline demo

test: setup-test ## every test that can run here; JOBS=1 runs them one after the other
	@$(BIN)/pytest -n $(or $(JOBS),3) --dist loadfile --no-loadscope-reorder --durations=20 || \
	{ [ $$? -eq 1 ] && echo "Running failed tests again, one at a time. A test that passes now is unstable, which is a defect:" && \
	$(BIN)/pytest --last-failed --last-failed-no-failures none --maxfail 3; }

test-fast: setup-tokenizer ## unit tests only
	@$(BIN)/pytest tests/unit -m "not slow"

test-sglang: setup-test ## the tests against real sglang servers on a CPU; creates their environment (2.5 GB) first
	@$(BIN)/osworld-pipeline setup sglang
	@OSWORLD_SGLANG=var/sglang $(BIN)/pytest -m sglang tests/integration

test-cluster: setup-test ## hosts with their own networks on this machine take the smoke recipe through every stage; one host fails in each stage (root)
	@$(BIN)/osworld-pipeline setup sglang
	@OSWORLD_TEST_CLUSTER=1 OSWORLD_SGLANG=var/sglang $(BIN)/pytest -s tests/integration/test_cluster.py

test-storm: setup-test ## half an hour of faults on the env servers of three hosts (network namespaces) during asynchronous GSPO (root); SECONDS=...
	@OSWORLD_STORM_S=$(or $(SECONDS),1800) $(BIN)/pytest -s tests/integration/test_fleet_storm.py

test-install: setup-test ## the wheel in a fresh environment and, by Podman, on an empty Debian: init, setup, the smoke recipe, Dagster; minutes
	@OSWORLD_TEST_INSTALL=1 $(BIN)/pytest -s tests/integration/test_installation.py tests/integration/test_empty_container.py

test-deploy: setup-test images ## the images; compose.yaml by podman-compose; pods of the Kubernetes manifests by Podman, with the smoke recipe during a rolling update
	@OSWORLD_TEST_DEPLOY=1 $(BIN)/pytest -s tests/integration/test_images.py tests/integration/test_compose.py tests/integration/test_pods.py

test-gpu: setup-tokenizer ## the published 4B shape on a CUDA GPU, in about 10 minutes; the page is var/gpu.md (docs/gpu.md)
	@$(BIN)/pytest -s -m gpu tests/gpu

test-faults: setup-test ## training, a backfill and the demo with random faults of what they depend on; KILLS=40 for a long run
	@OSWORLD_CHAOS_KILLS=$(or $(KILLS),12) $(BIN)/pytest -s tests/integration/test_training_faults.py tests/integration/test_backfill_kills.py tests/integration/test_demo_kills.py \
	tests/integration/test_lost_runs.py

test-docs: setup-test ## the commands of README.md and docs/, run against a small state that is made first
	@OSWORLD_TEST_DOCS=1 $(BIN)/pytest tests/unit/docs/test_block_marks.py tests/pages

test-hostile: setup-test ## honest and hostile episodes on one env server; run it alone; MINUTES=5 DESKTOPS=32
	@OSWORLD_HOSTILE_MINUTES=$(or $(MINUTES),5) OSWORLD_HOSTILE_DESKTOPS=$(or $(DESKTOPS),32) $(BIN)/pytest -s tests/integration/test_hostile_load.py

fuzz: setup-python ## search every parser of foreign bytes for inputs that break it; SECONDS=600 for each, two at once
	@$(BIN)/uv pip install --quiet --only-binary :all: --require-hashes -r scripts/fuzz.txt
	@PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(or $(SECONDS),60)

test-windows: setup-test ## a machine started the way a Windows image is, and Windows programs in Wine (100 MB to download)
	@scripts/setup wine
	@OSWORLD_WINDOWS_GUEST=1 $(BIN)/pytest tests/integration/test_windows_state_machine.py tests/integration/test_wine_tasks.py

bench-env: setup-test ## the env server's speed, in ratios with spread; SLIME=PATH measures against Slime-OSWorld
	@$(BIN)/python -m benchmarks.bench_env $(if $(SLIME),--slime-checkout $(SLIME))

bench-settling: setup-test ## how often the adaptive pause ends too early, and what it saves, on local desktops; PAUSE=2 for another
	@$(BIN)/python -m benchmarks.bench_settling $(if $(PAUSE),--pause $(PAUSE))

bench-data: setup-python ## the union build's and the store's speed; SLIME=PATH compares with Slime-OSWorld's script, SCALE=100000 measures only a growing state
	@$(BIN)/python -m benchmarks.bench_data $(if $(SLIME),--slime-checkout $(SLIME)) $(if $(SCALE),growth --scale $(SCALE))

bench-rollout: setup ## how busy the loop keeps desktops and trainer, compared with a batch-synchronous one; where the time of an episode goes
	@$(BIN)/python -m benchmarks.bench_rollout

bench-training: setup-python ## clipping by rounding, importance forms, updates a second next to TRL's trainer
	@$(BIN)/python -m benchmarks.bench_training

bench-demo: setup ## the demo over ten seeds: its time, and the gain of reinforcement learning in each; two hours
	@$(BIN)/python -m benchmarks.bench_learning demo --folder var/bench-demo --picture var/bench-demo/demo.png

bench-learning: setup ## does it learn? three seeds of the whole pipeline on real desktops, with a picture; hours
	@$(BIN)/python -m benchmarks.bench_learning

bench-scale: setup-test ## the resources of a replica, its cost a day, and a simulation of 1,024 over 16 hosts; QUICK=1 for a short run
	@$(BIN)/python -m benchmarks.bench_scale $(if $(QUICK),--quick)

bench-cluster: setup-test ## 100,000 episodes of an evaluation on Ray actors over four nodes, with stub desktops: the share of time they are busy; EPISODES=2000
	@$(BIN)/python -m benchmarks.bench_cluster $(if $(EPISODES),--episodes $(EPISODES))

bench-viewer: setup-test ## the trajectory viewer in Chromium over 100,000 episodes: opening, filtering, stepping
	@$(BIN)/python -m benchmarks.bench_viewer

bench-weights: setup-python ## how the trainer's weights reach real sglang servers on a CPU: folder, upload or broadcast; creates their environment first
	@$(BIN)/osworld-pipeline setup sglang
	@$(BIN)/python -m benchmarks.bench_weights

check: setup-python ## format, lint, types, import layers, links, words
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports && $(BIN)/pyright && $(BIN)/python docs/check_links.py && $(BIN)/python docs/check_words.py
	@! git ls-files 'tests/test_*.py' 'tests/**/test_*.py' | sed 's:.*/::' | sort | uniq -d | sed 's/$$/: several test files have this name/' | grep .

images: ## container images env-server, pipeline, trainer and weights-receiver; QEMU=1 also env-server-qemu; BUILDER=docker, TAG=PREFIX, OPTIONS=... (docs/containers.md)
	@for target in env-server pipeline trainer weights-receiver $(if $(QEMU),"env-server-qemu --cap-add CAP_SYS_ADMIN"); do \
	  $(or $(BUILDER),podman) build $(OPTIONS) -f deploy/Containerfile --target $$target \
	    -t $(or $(TAG),localhost/osworld)/$${target%% *}:$(PROJECT_VERSION) . || exit; \
	done

release: setup-python ## VERSION=0.2.0: check, build and tag a release, and write its notes; DRY=1 only shows it
	@$(BIN)/python -m scripts.release "$(VERSION)" $(if $(DRY),--dry-run)

docs: setup-python ## docs/ as a site in var/site, by MkDocs
	@$(BIN)/uvx mkdocs build --strict -d var/site

format: setup-python ## rewrite what ruff can
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

dev: setup ## Dagster's UI on http://127.0.0.1:3000; STATE=FOLDER for another state than var, PORT=3001
	@$(BIN)/osworld-pipeline dev $(if $(STATE),--state "$(STATE)") --port $(or $(PORT),3000)

mlflow: setup-python ## MLflow's UI on http://127.0.0.1:5000; STATE=FOLDER for another state than var, PORT=5001
	@case "$(MLFLOW_TRACKING_URI)" in http://*|https://*) echo "MLFLOW_TRACKING_URI is set: MLflow's UI is $(MLFLOW_TRACKING_URI)"; exit;; esac; \
	MLFLOW_DISABLE_TELEMETRY=$${MLFLOW_DISABLE_TELEMETRY:-true} $(BIN)/mlflow ui --backend-store-uri "$(or $(MLFLOW_TRACKING_URI),sqlite:///$(or $(STATE),var)/mlflow/mlflow.db)" --port $(or $(PORT),5000)

constraints: setup-python ## resolve every list of pinned packages again
	@scripts/pin --upgrade

clean: ## remove the state of this machine: var/ and caches, not .venv
	@chmod -R u+rwx var 2>/dev/null; rm -rf var .pytest_cache .ruff_cache .hypothesis .import_linter_cache
