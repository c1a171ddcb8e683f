# Figures. `bench-archives` is for the machine that has a package registry, `bench` and `bench-kernels` for the
# one that has a GPU, `bench-report` for either. benchmark/routed_experts/README.md says how they go together.
BENCH := benchmark/routed_experts
BENCH_HOST ?= build/bench-host
BENCH_RESULTS ?= $(BENCH)/results
BENCH_PYTHON ?= python3
BENCH_ARGS ?=
BENCH_PLACES = --trees $(BENCH_HOST)/trees --site $(BENCH_HOST)/site

.PHONY: bench-archives bench bench-kernels bench-graphs bench-ranks bench-report
bench-archives: branch ## build/bench/*.tar.xz: all that a GPU host without a registry needs
	@PYTHON='$(PYTHON)' $(BENCH)/prepare.sh

bench: ## on a GPU host: every figure, then the tables and the picture; BENCH_ARGS="--budget 540" to split it
	@$(BENCH)/unpack.sh build/bench $(BENCH_HOST)
	@$(BENCH_PYTHON) $(BENCH)/serving.py $(BENCH_PLACES) --time-scheduler \
	    --results $(BENCH_RESULTS)/serving.json $(BENCH_ARGS)
	@$(MAKE) --no-print-directory bench-kernels bench-graphs
	@$(MAKE) --no-print-directory bench-report BENCH_REPORT_PYTHON=$(BENCH_PYTHON)

bench-kernels: ## on a GPU host: how the kernels' cost grows
	@$(BENCH)/unpack.sh build/bench $(BENCH_HOST)
	@$(BENCH_PYTHON) $(BENCH)/kernels.py $(BENCH_PLACES) --results $(BENCH_RESULTS)/kernels.json

bench-graphs: ## on a GPU host: GPU time that the flag adds to a decode step
	@$(BENCH)/unpack.sh build/bench $(BENCH_HOST)
	@$(BENCH_PYTHON) $(BENCH)/graph_pairs.py $(BENCH_PLACES) --results $(BENCH_RESULTS)/gpu/graph_pairs.json

TP ?= 4
bench-ranks: ## on a host of TP GPUs: the releases' own table
	@$(BENCH)/unpack.sh build/bench $(BENCH_HOST)
	@$(BENCH_PYTHON) $(BENCH)/serving.py $(BENCH_PLACES) --tp $(TP) --sessions published --batches 64 \
	    --results $(BENCH_RESULTS)/tp$(TP)/serving.json $(BENCH_ARGS)
	@$(MAKE) --no-print-directory bench-report BENCH_REPORT_PYTHON=$(BENCH_PYTHON)

BENCH_REPORT_PYTHON ?= .venv/bin/python
bench-report: ## tables into the READMEs and results/figures.png, from results/*.json
	@$(BENCH_REPORT_PYTHON) $(BENCH)/report.py --results $(BENCH_RESULTS) --into README.md $(BENCH)/README.md
