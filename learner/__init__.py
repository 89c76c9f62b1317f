"""The learner role: trains on what the broker delivers. The only folder with torch and DeepSpeed.

- `main`: wires the role; `loop`: the training loop, by the `schedule`; `trainer`: one step of it, with `interfaces` to
  the rest. `evaluate_only`: the role of `offbeat eval`, which trains nothing. `process/`: what both do to start and to
  end.
- `config`: the settings. `settings/`: the tables inside them.
- `trajectory`, `units`: the data that is trained. `segments`: joins segments to trajectories. `branches`: the
  conversations of a trajectory. `intake/`: turns the broker's messages into units.
- `families/`: groups that ask for further groups.
- `credit/`: from rewards to the values that are compared, and the comparisons.
- `update/`: turns units into new weights. `algorithms/`: pure functions of tensors.
- `model/`: adapters of low rank, and the choice of experts. `gpu`: takes the GPU of a rank.
- `replay/`: the replay table. `publishing/`: brings new versions to the generators.
- `checkpoints/`: checkpoints, and where a process starts. `run_files`: places of the files that outlive it.
- `metrics`, `charts`, `totals`: what is reported. `gauges/`: declares each metric. `samples/`: what the model wrote.
- `errors`: the exceptions.
- `retrain/`: training again from a journal. `warmstart`: makes a small model to begin with.
"""
