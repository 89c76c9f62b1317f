"""Tries a run file before anything starts: folder, model, environment, chat template, adapters, memory.

- `examine`: the entry point. `trial`: tries the environment. `follow_ups`: tries the chat template.
- `suite_facts`: compares the settings with what the environment says of itself. `prompt_room`: prompts with the room.
- `model_limits`: longest sequence, attention heads and experts of the model.
- `route_bytes`: compares the experts that travel with tokens with what the broker keeps and delivers.
- `adapters`: tries LoRA on the model. `memory`, `gpu_memory`: estimate what the run will take.
- `room`: compares versions, checkpoints and requests with the room for them.
- `notes`: compares the words of a family's note with the room for them.
- `gpu_trial`: tries the GPUs. `decided`: decides what the run file leaves to them.
"""
