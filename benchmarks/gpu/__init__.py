"""What one GPU reaches with Offbeat, each figure beside a bare loop that does only what has to be done.

- `program`: runs the steps, each in a process of its own, and writes the table and the JSON file.
- `setting`: device, sizes and clocks; `figures`: figures, and how they are shown.
- `models`: random models and batches of the sizes that are measured.
- `ceilings`: the fastest products and copies of this machine.
- `learner_step`: a learner step and a plain PyTorch loop. `attention`: torch's kernels beside each other.
- `gradient_sums`: errors of gradients that are summed in float32 and in bfloat16.
- `publish`: weights out of the learner. `load`: weights into an engine.
- `generation`: our generator's engine and a bare AsyncLLM, and the gap of their log-probabilities to the learner's.
- `update_cost`: tokens that a new version costs. `system`: broker, generator and actors, and a bare AsyncLLM.
- `training`: whole runs, asynchronous and in lockstep.
"""
