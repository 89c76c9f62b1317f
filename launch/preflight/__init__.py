"""Tries a run file before anything starts: folder, model, environment, chat template, adapters, memory.

- `examine`: the entry point. `trial`: tries the environment. `follow_ups`: tries the chat template.
- `model_limits`: longest sequence and attention heads of the model.
- `adapters`: tries LoRA on the model. `memory`: estimates what the run will take.
"""
