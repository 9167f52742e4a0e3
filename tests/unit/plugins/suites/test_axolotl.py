"""Axolotl's files become recipes: its defaults where nothing is said, and refusals where it would be another job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.plugins.suites.axolotl_templates import text_of
from tests.support.axolotl import BARE, FULL, ROWS
from tests.support.marked import marked
from tests.unit.plugins.suites.conftest import Converted

ACTION = "from-axolotl"
TEXTS = {"datasets": [{**ROWS, "type": "alpaca"}]}
CASTS = {"attn_implementation": "flash_attention_2"}
PACKED = {"sample_packing": True, "flash_attention": True}


def test_adapters_by_its_defaults(converted: Converted) -> None:
    found = converted(ACTION, {**BARE, "special_tokens": {"pad_token": "<|end_of_text|>"}, "tf32": True})
    assert found.recipe == {
        "stage": "lora", "source": "Axolotl x.yaml",
        "model": {"family": "llama", "weights": "NousResearch/Meta-Llama-3-8B-Instruct", "preset": "llama-3-8b"},
        "data": {
            "train": "hf:org/rows?split=train", "columns": {"messages": "messages"}, "max_length": 512,
            "chat_template": text_of("llama3", BARE["base_model"], []), "end_of_answer": "token_in_text",
            "ignore_columns": ["*"],
        },
        "engine": {"precision": "bf16"}, "launch": {"num_devices": 1},
        "train": {
            "num_epochs": 1, "global_batch_size": 1, "micro_batch_size": 1, "learning_rate": 2e-5,
            "lr_schedule": "cosine", "warmup_steps": 10, "warmup_from_zero": True,
        },
        "lora": {"rank": 8, "alpha": 16.0}, "checkpoint": {"save_steps": 500},
        "device": "gpu", "seed": 42, "output_dir": "runs/x",
    }  # fmt: skip


def test_modules_that_are_trained_in_full(converted: Converted) -> None:
    modules = ["embed_tokens", "lm_head"]
    found = converted(
        ACTION, {**BARE, "bf16": False, "lora_modules_to_save": modules, "peft_ensure_weight_tying": True}
    )
    assert found.recipe["lora"]["modules_to_save"] == modules
    assert found.recipe["lora"]["ensure_weight_tying"] is True
    of_llama_3 = {**BARE, "base_model": "meta-llama/Llama-3.1-8B-Instruct", "peft_ensure_weight_tying": True}
    found = converted(ACTION, {**of_llama_3, "special_tokens": {"pad_token": "<|finetune_right_pad_id|>"}})
    assert "modules_to_save" not in found.recipe["lora"]
    assert "ensure_weight_tying" not in found.recipe["lora"]


def test_whole_models(converted: Converted) -> None:
    values = {**FULL, "bf16": False, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 3,
              "lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1, "optimizer": "adamw_torch_fused",
              "gradient_checkpointing": True, "fsdp_config": {"fsdp_version": 2}}  # fmt: skip
    recipe = converted(ACTION, values, num_devices=2).recipe
    assert (recipe["stage"], recipe["parallel"]) == ("sft", {"sharding": "stage3"})
    assert recipe["engine"] == {"precision": "fp32", "recompute": "full"}
    assert recipe["train"]["global_batch_size"] == 16
    assert (recipe["train"]["num_epochs"], recipe["train"]["min_lr_ratio"]) == (3, 0.1)
    zero = converted(ACTION, {**FULL, "deepspeed": "deepspeed_configs/zero2.json"}, num_devices=2).recipe
    assert (zero["engine"]["precision"], zero["parallel"]) == ("bf16", {"sharding": "stage2"})
    assert "master_weights" not in zero["train"]


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ({"bf16": True}, "bf16"),
        ({"bf16": "auto"}, "bf16"),
        ({"bf16": None, "bfloat16": True}, "bf16"),
        ({"bf16": False}, "fp32"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": None}, "fp32"),
    ],
)
def test_flags_choose_the_precision(words: dict[str, Any], precision: str, converted: Converted) -> None:
    assert converted(ACTION, {**BARE, **words}).recipe["engine"]["precision"] == precision


@pytest.mark.parametrize(
    ("words", "keeps"),
    [
        ({"attn_implementation": "flash_attention_2"}, False),
        ({"flash_attention": True}, False),
        ({"fsdp_config": {"reshard_after_forward": True}, "fsdp_version": 2}, False),
        # accelerate makes the parameters float32
        ({"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_use_orig_params": False}}, True),
        ({"fsdp_config": {"offload_params": False}, "fsdp_version": 1}, True),
        ({"deepspeed": "deepspeed_configs/zero1.json"}, True),
    ],
)
def test_masters_of_whole_models_in_16_bits(words: dict[str, Any], keeps: bool, converted: Converted) -> None:
    recipe = converted(ACTION, {**FULL, "optimizer": "adamw_torch_fused", **words}, num_devices=2).recipe
    assert recipe["engine"]["precision"] == "bf16"
    assert recipe["train"].get("master_weights", True) is keeps


def test_states_in_8_bits_without_masters(converted: Converted) -> None:
    values = {**FULL, "attn_implementation": "flash_attention_2", "optimizer": "paged_adamw_8bit"}
    train = converted(ACTION, values).recipe["train"]
    assert (train["master_weights"], train["optimizer"]) == (False, "adamw_8bit")


def test_data_sets_become_the_section_data(converted: Converted) -> None:
    def data(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values}).recipe["data"]

    turns = {"path": "talks.jsonl", "type": "chat_template", "field_messages": "talk",
             "message_property_mappings": {"role": "from", "content": "value"}}  # fmt: skip
    assert data(datasets=[turns])["columns"] == {"conversations": "talk"}
    older = {**ROWS, "message_field_role": "from", "message_field_content": "value", "name": "en", "split": "a"}
    assert data(datasets=[older])["train"] == "hf:org/rows?split=a&config=en"
    several = data(datasets=[ROWS, {**ROWS, "path": "two.jsonl"}])
    assert (several["train"], several["mix"]) == ("hf:org/rows?split=train", {"two.jsonl": None})
    qwen = {"base_model": "Qwen/Qwen2.5-7B-Instruct", "eot_tokens": ["<|im_end|>"]}
    for name, ours in (("chatml", "chatml"), ("qwen_25", "qwen2.5")):
        assert data(**qwen, chat_template=name)["chat_template"] == text_of(ours, qwen["base_model"], [])
    held = {"test_datasets": [{**ROWS, "split": "test"}]}
    assert "eval" not in data(**held)
    recipe = converted(ACTION, {**BARE, **held, "evals_per_epoch": 1, "saves_per_epoch": 1}).recipe
    assert (recipe["data"]["eval"], recipe["train"]["eval_steps"]) == ("hf:org/rows?split=test", "epoch")
    assert recipe["checkpoint"]["save_steps"] == "epoch"


@pytest.mark.parametrize(
    ("model", "template"),
    [
        ("Qwen/Qwen2.5-7B", None),
        ("meta-llama/Llama-3.1-8B", None),
        ("org/some-llama", "chatml"),
    ],
)
def test_ends_of_answers_that_are_not_supervised(model: str, template: str | None, converted: Converted) -> None:
    """Axolotl supervises the end-of-sequence token where the template ends an answer with it, and nothing else."""
    with pytest.raises(UserError, match=r"chat_template = .*: ends answers with .* it is not supervised there"):
        converted(ACTION, {**BARE, "base_model": model, "chat_template": template})


def test_conversations_that_are_held_out(converted: Converted) -> None:
    """Rows are as long here as there, because what a template writes after the last answer stays."""
    of_model = {"base_model": "Qwen/Qwen2.5-7B-Instruct", "special_tokens": None}
    of_others = {"base_model": "HuggingFaceTB/SmolLM3-3B", "special_tokens": None}
    for values in ({"chat_template": "llama3"}, of_model, of_others):
        data = converted(ACTION, {**BARE, **values, "val_set_size": 0.05}).recipe["data"]
        assert (data["holdout"], data["choice"], data["end_of_answer"]) == (0.05, "axolotl", "token_in_text")


def test_an_embedding_that_has_enough_rows(converted: Converted) -> None:
    key = "resize_token_embeddings_to_32x"
    found = converted(ACTION, {**BARE, key: True})
    assert (key, True, "the embedding has 128256 rows, a multiple of 32") in found.left_out
    with pytest.raises(UserError, match=f"{key} = True: may add rows to the embedding"):
        converted(ACTION, {**BARE, "base_model": "org/llama-x", "chat_template": "llama3", key: True})


def test_matrices_of_gpt_2_have_joined_adapters(converted: Converted) -> None:
    values = {**BARE, **TEXTS, "base_model": "cerebras/Cerebras-GPT-1.3B", "lora_target_linear": None}
    with pytest.raises(UserError, match=r"lora_target_modules = .*c_attn is one for queries, keys and values"):
        converted(ACTION, {**values, "lora_target_modules": ["c_attn", "c_proj"]})


def test_answers_that_axolotl_finds_elsewhere_are_refused(converted: Converted) -> None:
    """It looks for what differs from [[dummy_message]] in its place."""
    text = converted(ACTION, {**BARE, "base_model": "Qwen/Qwen2.5-7B", "chat_template": "chatml"}).recipe["data"]
    for answer in ("[[1]", "[1, [2]]"):
        with pytest.raises(UserError, match=r"no answer that begins with \[\[ or ends with \]\]"):
            marked(text["chat_template"], ("user", "Hi"), ("assistant", answer))
    with pytest.raises(UserError, match="no answer that begins with a line break"):
        marked(text["chat_template"], ("user", "Hi"), ("assistant", " \nHello."))


def test_texts_of_templates_of_base_models(converted: Converted) -> None:
    """As Axolotl's ChatTemplateStrategy: the content of answers, and their end where `eot_tokens` has it."""
    base = {**BARE, "base_model": "Qwen/Qwen2.5-7B", "chat_template": "qwen_25"}
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "2+2?"), ("assistant", "4")]
    system = "{system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.}\n"
    text = converted(ACTION, base).recipe["data"]["chat_template"]
    assert marked(text, *turns) == (
        f"{system}{{user\nHi}}\n{{assistant\n[Hello.]}}\n{{user\n2+2?}}\n{{assistant\n[4]}}\n"
    )
    assert marked(text, ("system", ""), *turns[:2]) == "{system\n}\n{user\nHi}\n{assistant\n[Hello.]}\n"
    named = converted(ACTION, {**base, "chat_template": "chatml", "eot_tokens": ["<|im_end|>"]})
    assert marked(named.recipe["data"]["chat_template"], *turns[:2]) == "{user\nHi}\n{assistant\n[Hello.}]\n"


def test_rows_of_alpaca_without_those_that_are_held_out(converted: Converted) -> None:
    recipe = converted(ACTION, {**BARE, **TEXTS, "val_set_size": 0.05, "sequence_len": 1024}).recipe
    assert recipe["data"] == {
        "train": "hf:org/rows?split=train", "holdout": 0.05, "choice": "axolotl", "text_template": "alpaca",
        "answer_tokens": "apart", "max_length": 1024, "ignore_columns": ["*"],
    }  # fmt: skip
    assert "eval_steps" not in recipe["train"]
    number = converted(ACTION, {**BARE, **TEXTS, "val_set_size": 20, "eval_steps": 50}).recipe
    assert (number["data"]["holdout"], number["train"]["eval_steps"]) == (20, 50)


def test_a_pack_has_the_tokens_of_a_micro_batch(converted: Converted) -> None:
    values = {**BARE, **TEXTS, "sample_packing": True, "attn_implementation": "flash_attention_2",
              "sequence_len": 1024, "gradient_accumulation_steps": 4}  # fmt: skip
    one = converted(ACTION, values, num_devices=2).recipe
    assert (one["data"]["packing"], one["data"]["drop_last"], "pack_length" in one["data"]) == (
        "first_fit",
        True,
        False,
    )
    assert (one["train"]["micro_batch_size"], one["train"]["global_batch_size"]) == (1, 8)
    two = converted(ACTION, {**values, "micro_batch_size": 2}, num_devices=2)
    assert two.recipe["data"] == {**one["data"], "pack_length": 2048}
    assert (two.recipe["train"]["micro_batch_size"], two.recipe["train"]["global_batch_size"]) == (1, 8)
    assert any("which is what micro_batch_size 2 of Axolotl makes" in note for note in two.notes)
    masked = converted(ACTION, {**values, "attn_implementation": "sdpa", "micro_batch_size": 2}).recipe
    assert ("pack_length" in masked["data"], masked["train"]["micro_batch_size"]) == (False, 2)


def test_batches_and_warmup(converted: Converted) -> None:
    def train(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values}).recipe["train"]

    assert train(batch_size=8, micro_batch_size=2)["global_batch_size"] == 8
    assert train(batch_size=8, gradient_accumulation_steps=3)["global_batch_size"] == 3
    assert train(warmup_steps=1)["warmup_steps"] == 2
    ratio = train(warmup_steps=None, warmup_ratio=0.1)
    assert (ratio["warmup_ratio"], ratio["warmup_rounding"]) == (0.1, "axolotl")


def test_evaluations_and_the_watchdog(converted: Converted) -> None:
    values = {**BARE, **TEXTS, "val_set_size": 0.1, "evals_per_epoch": 4, "num_epochs": 2, "logging_steps": 1,
              "loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 2}  # fmt: skip
    train = converted(ACTION, values).recipe["train"]
    assert (train["eval_steps"], train["loss_watchdog"]) == (0.125, {"threshold": 5.0, "patience": 2})
    once = converted(ACTION, {**values, "evals_per_epoch": 1, "num_epochs": 1, "loss_watchdog_patience": None}).recipe
    assert (once["train"]["eval_steps"], once["train"]["loss_watchdog"]) == ("epoch", {"threshold": 5.0})


@pytest.mark.parametrize(
    ("values", "chooses"),
    [
        ({"saves_per_epoch": 1, "evals_per_epoch": 4, "num_epochs": 4}, True),
        ({"saves_per_epoch": 1, "evals_per_epoch": 4, "num_epochs": 1}, False),  # saves after the epoch only
        ({"saves_per_epoch": 4, "evals_per_epoch": 2, "num_epochs": 2}, False),
        ({"save_steps": 100, "eval_steps": 50}, True),
        ({"save_steps": 100, "eval_steps": 50, "load_best_model_at_end": False}, False),
        ({"save_steps": 100, "eval_steps": 30}, False),
    ],
)
def test_the_best_checkpoint_is_chosen_unless_intervals_differ(
    values: dict[str, Any], chooses: bool, converted: Converted
) -> None:
    recipe = converted(ACTION, {**BARE, **TEXTS, "val_set_size": 0.1, **values}).recipe
    assert ("best_metric" in recipe["checkpoint"]) == chooses


def test_special_tokens_that_the_tokenizer_has(converted: Converted) -> None:
    llama = {"special_tokens": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}}
    assert converted(ACTION, {**BARE, **llama, "base_model": "NousResearch/Llama-2-7b-hf"}).recipe
    with pytest.raises(UserError, match="special_tokens = bos_token, eos_token, unk_token"):
        converted(ACTION, {**BARE, **llama})


def test_adapters_become_the_section_lora(converted: Converted) -> None:
    def lora(**values: Any) -> Any:
        return converted(ACTION, {**BARE, **values}).recipe["lora"]

    named = {"lora_target_linear": None, "lora_target_modules": ["q_proj", "v_proj"]}
    assert lora(**named)["target_modules"] == ["q_proj", "v_proj"]
    assert lora(peft_use_rslora=True, lora_dropout=0.1)["rslora"] is True
    assert lora(peft_use_dora=True)["method"] == "dora"
    assert lora(loraplus_lr_ratio=16)["lora_plus_ratio"] == 16.0
    single = {"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}
    assert lora(**single)["base_dtype"] == "nf4"
    assert "base_double_quant" not in lora(**single)
    assert lora(load_in_4bit=True)["base_double_quant"] is True  # as in its own default


def test_adapters_are_on_the_matrices_that_peft_finds(converted: Converted) -> None:
    """GLM-4 has gate and up in one matrix there."""
    glm = {**BARE, **TEXTS, "base_model": "THUDM/GLM-4-9B-0414", "lora_target_linear": None}
    glm["lora_target_modules"] = ["gate_proj", "up_proj", "down_proj", "q_proj"]
    found = converted(ACTION, glm)
    assert found.recipe["lora"]["target_modules"] == ["down_proj", "q_proj"]
    assert any("without gate_proj, up_proj" in note for note in found.notes)
    for named in (["gate_up_proj"], ["up_proj"], ["all-linear"]):
        with pytest.raises(UserError, match="lora_target_modules"):
            converted(ACTION, {**glm, "lora_target_modules": named})
    with pytest.raises(UserError, match="with double quantisation the scales of gate_up_proj have one mean there"):
        converted(ACTION, {**glm, "load_in_4bit": True})


def test_the_template_of_a_gemma_ends_answers_with_another_token(converted: Converted) -> None:
    with pytest.raises(UserError, match="another token than the end-of-sequence token of google/gemma-2-2b-it"):
        converted(ACTION, {**BARE, "base_model": "google/gemma-2-2b-it"})


@pytest.mark.parametrize("optimizer", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_adamw_of_bitsandbytes_with_states_in_8_bits(optimizer: str, converted: Converted) -> None:
    found = converted("from-axolotl", {**BARE, "optimizer": optimizer, "weight_decay": 0.1})
    assert found.recipe["train"]["optimizer"] == "adamw_8bit"


def test_paged_adamw_without_decay_is_adamw(converted: Converted) -> None:
    found = converted("from-axolotl", {**BARE, "optimizer": "paged_adamw_32bit"})
    assert "optimizer" not in found.recipe["train"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (FULL, "attn_implementation = None: without flash attention, embeddings and norms are float32"),
        ({**FULL, "attn_implementation": "sdpa"}, "attn_implementation = sdpa: without flash attention"),
        ({**FULL, **CASTS, "bf16": False, "fp16": True}, "fp16 = True: trains parameters in fp16 without deepspeed"),
        ({**FULL, **CASTS, "optimizer": "adamw_torch"}, "optimizer = adamw_torch: rounds parameters in 16 bits after"),
        ({**FULL, **CASTS, "optimizer": "paged_adamw_32bit"}, "optimizer = paged_adamw_32bit: keeps float32 moments"),
        ({**FULL, **CASTS, "optimizer": "adamw_apex_fused"}, "optimizer = adamw_apex_fused: train.optimizer has"),
        ({**FULL, "fsdp_config": {"fsdp_version": 2}}, "the version of FSDP, on which master weights depend"),
        (
            {**BARE, "base_model": "deepseek-ai/DeepSeek-V2-Lite", "trust_remote_code": True},
            "trust_remote_code = True: is for code of the weights, which may add a load-balancing loss",
        ),
        ({**BARE, "float16": True}, "float16 = True: has no loss scale for parameters in fp16"),
        ({**BARE, "load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit = True: is given with 4 bits"),
        (
            {
                **BARE,
                "load_in_8bit": True,
                "base_model": "Qwen/Qwen1.5-MoE-A2.7B",
                "lora_target_linear": None,
                "lora_target_modules": ["q_proj"],
            },
            "load_in_8bit = True: which matrices of experts are in 8 bits",
        ),
        ({**BARE, "optimizer": "adamw_torch_8bit"}, "optimizer = adamw_torch_8bit: train.optimizer has adamw"),
        (
            {**BARE, "optimizer": "adamw_bnb_8bit", "fsdp": ["full_shard"]},
            "optimizer = adamw_bnb_8bit: DeepSpeed, FSDP",
        ),
        (
            {**BARE, "optimizer": "adamw_bnb_8bit", "deepspeed": "deepspeed_configs/zero2.json"},
            "optimizer = adamw_bnb_8bit: DeepSpeed, FSDP",
        ),
        ({**BARE, "optimizer": "paged_adamw_32bit", "weight_decay": 0.1}, "optimizer = paged_adamw_32bit: its weight"),
        ({**BARE, "warmup_steps": None}, "warmup_steps = not given"),
        (
            {**BARE, "datasets": [{"path": "a", "type": "alpaca:chat"}]},
            "datasets = a, type alpaca:chat: uses its own prompt format; supported are chat_template and alpaca",
        ),
        ({**BARE, "datasets": [ROWS, {"path": "a", "type": "alpaca"}]}, "data.text_template is the same for all"),
        ({**BARE, "datasets": [ROWS, ROWS]}, "data.mix has each file once"),
        ({**BARE, "datasets": [{**ROWS, "roles_to_train": ["all"]}]}, "org/rows, roles_to_train"),
        ({**BARE, "datasets": [{**ROWS, "shards": 4}]}, "org/rows, shards"),
        ({**BARE, "datasets": [{**ROWS, "message_field_role": "who"}]}, "org/rows, who/content"),
        ({**BARE, "datasets": [{**ROWS, "chat_template": "gemma"}]}, "chat_template = gemma"),
        (
            {**BARE, "datasets": [ROWS, {**ROWS, "path": "b", "field_messages": "c"}]},
            "data.columns is the same for all",
        ),
        (
            {**BARE, "datasets": [ROWS, {**ROWS, "path": "b", "chat_template": "chatml"}]},
            "data.chat_template is the same for",
        ),
        ({**BARE, "datasets": ["a"]}, "expected a mapping {key: value}"),
        ({**BARE, "datasets": None}, "has no datasets"),
        ({**BARE, "test_datasets": [ROWS, ROWS]}, "sets of data.eval have"),
        ({**BARE, "loss_watchdog_threshold": 5}, "looks at the mean loss of the recorded steps"),
        ({**BARE, **TEXTS, "val_set_size": 1}, "val_set_size = 1: leaves no row for training"),
        ({**BARE, **TEXTS, "val_set_size": 0.1, "test_datasets": [ROWS]}, "and test_datasets are both given"),
        ({**BARE, **PACKED, "datasets": [ROWS, {**ROWS, "path": "b"}]}, "packs rows of several data sets together"),
        ({**BARE, **PACKED, "dataloader_drop_last": True}, "it leaves out the last step of each epoch"),
        ({**BARE, **PACKED, "sample_packing_bin_size": 100}, "a pack has at most 200 rows"),
        ({**BARE, **PACKED, "sample_packing_eff_est": 0.9}, "estimates the number of steps"),
        ({**BARE, **PACKED, "sample_packing_sequentially": True}, "packs are filled with rows in random order"),
        ({**BARE, "dataset_exact_deduplication": True}, "equal rows are all used"),
        ({**BARE, "skip_prepare_dataset": True}, "rows longer than data.max_length are dropped"),
        ({**BARE, "tokenizer_use_mistral_common": True}, "those of the package mistral-common"),
        ({**BARE, "tokenizer_legacy": False}, "tokens are those of tokenizer.json"),
        ({**BARE, "sample_packing": True}, "without flash attention tokens attend"),
        ({**BARE, "eot_tokens": ["<end>"]}, "eot_tokens = <end>"),
        ({**BARE, "special_tokens": {"eos_token": "x"}}, "special_tokens = eos_token"),
        ({**BARE, "special_tokens": {"pad_token": "<pad>"}}, "special_tokens = pad_token <pad>"),
        # a token of Llama 3.1
        (
            {**BARE, "special_tokens": {"pad_token": "<|finetune_right_pad_id|>"}},
            "may not have gets a row of the embedding",
        ),
        ({**BARE, "lora_modules_to_save": ["embed_tokens", "lm_head"]}, "are trained in 16 bits"),
        (
            {**BARE, "bf16": False, "lora_modules_to_save": ["norm"]},
            "lora.modules_to_save has embed_tokens and lm_head",
        ),
        ({**BARE, "plugins": ["a.b.MyPlugin"]}, "plugins = "),
        ({**BARE, "lora_r": None}, "has an adapter, but no lora_r"),
        ({**BARE, "lora_target_linear": None}, "lora_target_modules = not given"),
        ({**BARE, "adapter": "llama-adapter"}, "adapter = llama-adapter"),
        ({**BARE, "context_parallel_size": 2}, "context_parallel_size = 2"),
        ({**BARE, "learning_rate": "fast"}, "learning_rate is 'fast'; expected a number"),
        ({**BARE, "learning_rat": 1}, "learning_rat = 1: is not known"),
        ({**BARE, "rl": "dpo"}, "llmsuite recipe new --stage dpo"),
        ({**BARE, "rl": "ebft"}, "there is no such stage"),
        ({**BARE, "reward_model": True}, "llmsuite recipe new --stage rm"),
        ({**BARE, "pretraining_dataset": [{"path": "a"}]}, "it trains on each text separately"),
    ],
)
def test_what_has_no_counterpart_is_refused(values: dict[str, Any], message: str, converted: Converted) -> None:
    with pytest.raises(UserError, match=message):
        converted(ACTION, values)


def test_files_that_are_here(converted: Converted, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    assert converted(ACTION, {**BARE, "datasets": [{**ROWS, "path": "rows"}]}).recipe["data"]["train"] == "rows"
