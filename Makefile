# `make demo` and `make test` set up everything they need in .venv and models/.
PY ?= python3
# Of every editable installation, and of no use here.
export PYTHONWARNINGS := ignore:Editable installation
VENV := .venv
BIN := $(VENV)/bin
TARGET := models/smollm2-135m-instruct
# The same with the GGUF's own 4-bit weights, and upcycled to a mixture of experts.
FOUR_BITS := $(TARGET)-4bit
MIXTURE := $(TARGET)-8x
PROTOS := $(wildcard protos/tandem/v1/*.proto)
# What `make figures` draws.
RESULTS ?= benchmarks/results
SOURCES := tandem gateway verifier_service drafter_service draft_training tests benchmarks tools

.PHONY: setup model model-4bit demo demo-ep8 peers lossless test test-fast lint types protos check-protos bench verify-cost \
  figures deploy-test images observe-test metrics-doc dashboard-test clean

setup: $(VENV)/.installed
model: $(TARGET)/config.json

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[worker,convert,dev]'
	$(BIN)/python -m pip install -q --no-deps 'dflash==0.1.0'
	touch $@

$(TARGET)/config.json: | setup
	$(BIN)/tandem models prepare --output $(TARGET)

$(FOUR_BITS)/config.json: | setup
	$(BIN)/tandem models prepare --weights 4bit --output $(FOUR_BITS)

model-4bit: $(FOUR_BITS)/config.json

demo: setup model
	$(BIN)/tandem demo --config configs/demo.yaml

$(MIXTURE)/config.json: | model
	$(BIN)/tandem models prepare --upcycle-experts 8 --output $(MIXTURE)

demo-ep8: setup $(MIXTURE)/config.json
	$(BIN)/python -m benchmarks.demo_ep8 --config configs/demo-ep8.yaml --dense $(TARGET)

# Beside llama.cpp on the same GGUF; building llama.cpp takes some minutes.
peers: setup model-4bit
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[peers]'
	$(BIN)/tandem bench --against llama.cpp --config configs/demo-4bit.yaml --modes off,auto --json bench-peers.json

bench: setup model
	$(BIN)/tandem bench --config configs/demo.yaml --concurrency 1,2,4,8,16,32 \
	  --prompts 24 --max-tokens 64 --json bench.json

verify-cost: setup model
	$(BIN)/python -m benchmarks.verify_cost --config configs/demo.yaml --json bench-verify-cost.json

figures: setup
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[figures]'
	$(BIN)/python -m benchmarks.figures --bench $(RESULTS)/bench-modes-cpu.json --verify-cost $(RESULTS)/verify-cost-cpu.json \
	  --draft-eval $(RESULTS)/draft-eval-demo.json --replay $(RESULTS)/replay-cpu.json --output docs/figures

lossless: setup model
	$(BIN)/python -m benchmarks.lossless --json bench-lossless.json

test: setup model lint types check-protos
	$(BIN)/python -m pytest

test-fast: setup model
	$(BIN)/python -m pytest -m 'not slow'

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: setup
	$(BIN)/mypy

protos: setup
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=. --mypy_grpc_out=. $(PROTOS)

# Protos are linted, compatible with the last release, and the committed stubs are what they generate.
check-protos: setup
	$(BIN)/buf lint
	$(BIN)/buf format -d --exit-code > /dev/null
	$(BIN)/buf breaking --against protos/baseline.binpb
	rm -rf build/stubs && mkdir -p build/stubs
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=build/stubs --grpc_python_out=build/stubs \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=build/stubs --mypy_grpc_out=build/stubs $(PROTOS)
	diff -r -x '__pycache__' -x '__init__.py' build/stubs/tandem/v1 tandem/v1

clean:
	rm -rf $(VENV) $(TARGET) $(FOUR_BITS) $(MIXTURE) build .mypy_cache .ruff_cache .pytest_cache

# The manifests, without a cluster: rendered, validated, compared with the code.
deploy-test: setup
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[deploy]'
	$(BIN)/python -m pytest tests/deploy

# Both images are built and run, as root on Debian. BASE_IMAGE: unset takes the published one, or makes one where no
# registry answers. TORCH_INDEX_URL: where pip takes torch from.
images: setup model
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[deploy]'
	$(BIN)/python -m tools.images --base-image '$(BASE_IMAGE)' --torch-index-url '$(TORCH_INDEX_URL)'

# docs/metrics.md, the dashboards and the operator's rules, from the code and k8s/observability/rules.
metrics-doc: setup
	$(BIN)/python -m tools.metrics_catalogue
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.prometheus_rule

# Rules, dashboards and configs against a real Prometheus that scrapes the demo stack under load. Debian's packages.
observe-test: setup model
	{ command -v prometheus && command -v promtool && command -v amtool; } > /dev/null || { test "$$(id -u)" = 0 || \
	  { echo "observe-test: install prometheus and prometheus-alertmanager, or run it as root" >&2; exit 1; }; \
	  apt-get update -q && apt-get install -qy --no-install-recommends prometheus prometheus-alertmanager; }
	$(BIN)/python -m pytest tests/observe

# The dashboard in Debian's Chromium over the demo stack; draws docs/figures/dashboard.png.
dashboard-test: setup model
	{ command -v chromium && command -v chromedriver; } > /dev/null || { test "$$(id -u)" = 0 || \
	  { echo "dashboard-test: install chromium and chromium-driver, or run it as root" >&2; exit 1; }; \
	  apt-get update -q && apt-get install -qy --no-install-recommends chromium chromium-driver; }
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest tests/dashboard
