# `make demo` and `make test` are all that a fresh clone needs; each makes $(VENV) first.
# PYTHON=/path/to/python3 chooses the interpreter, ARGS=... is passed on.
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint format bench docs wheel clean

help:
	@echo "make demo    tune one attention problem, export it, run it from PyTorch, compare"
	@echo "make test    run the tests"
	@echo "make lint    check style and types"
	@echo "make format  apply the style"
	@echo "make bench   measure the speed table of this machine"
	@echo "make docs    make the pages and pictures of docs/ from the committed logs and rows"
	@echo "make wheel   build wheel and sdist into dist/"
	@echo "make clean   remove $(VENV) and everything built"

$(INSTALLED): pyproject.toml constraints.txt .ci/venv
	@.ci/venv "$(VENV)"
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/fa2tvm demo $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(INSTALLED)
	@$(BIN)/fa2tvm bench $(ARGS)

docs: $(INSTALLED)
	@$(BIN)/fa2tvm viz -o docs/visualizer.html
	@if command -v chromium >/dev/null; then chromium --headless --no-sandbox --disable-gpu \
	  --hide-scrollbars --window-size=1280,980 --screenshot=docs/visualizer.png \
	  "file://$(CURDIR)/docs/visualizer.html#step=12&lang=en"; fi
	@$(BIN)/fa2tvm report tune tuning_logs -o docs/tuning.html
	@$(BIN)/fa2tvm report bench benchmarks -o docs/comparison.html

wheel: $(INSTALLED)
	@$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf "$(VENV)" build dist demo_output .mypy_cache .pytest_cache .ruff_cache .hypothesis
