"""Transformers' Trainer as enforce.json plans (docs/integrations.md): torchrun --nproc-per-node 2 THIS_FILE."""

from ddltool.runtime.integrations import HookedTrainerMixin  # isort: skip  # first: declares torchvision's ops
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class PlannedTrainer(HookedTrainerMixin, Trainer):
    """The Trainer, with planned batches."""


config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
texts = [{"input_ids": [i % 50, (i * 7) % 50, 3], "labels": [i % 50, (i * 7) % 50, 3]} for i in range(400)]
arguments = TrainingArguments("out", use_cpu=True, num_train_epochs=2, gradient_accumulation_steps=2, save_steps=3)
trainer = PlannedTrainer(LlamaForCausalLM(config), arguments, train_dataset=texts, enforcement="enforce.json")
trainer.train()
