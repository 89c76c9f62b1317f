"""The run file: `sections` has its types, `load` reads it, `rules`, `method_rules`, `replay_rules`, `ratio_rules`,
`credit_rules`, `family_rules`, `generator_rules` and `answer_rules` reject mistakes.

- `described`: what the config.json of a model says, and the lengths that follow from it.
- `method`: what a method brings into a job, `method = "bapo"`. `method_effect`: its settings without effect.
- `objectives`: what the rules of methods ask: the objectives in turn, and what an advantage compares.
- `shipped`, `recipes`: the run files that come with Offbeat. `keys_folder`: finds or makes a run's keys.
"""
