"""Learns from what has arrived. The only folder with torch and DeepSpeed.

- `main`: wires the role; `loop`: the training loop. `config`, `algorithm_config`, `surrogate_config`: its settings.
- `trajectory`, `units`: what is trained. `intake/`: from the broker to units. `update/`: from units to new weights.
- `replay/`: the replay table. `publisher`: new versions out. `algorithms/`: pure functions of tensors.
- `checkpoint`, `lineage`, `run_files`: what outlives the process. `metrics`, `totals`, `nonfinite`: what is reported.
- `retrain/`: training again from a journal. `warmstart`: a small model to begin with.
"""
