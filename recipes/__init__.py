"""The run files that come with Offbeat. `offbeat recipes` lists them, and every command takes them by name.

- `spell_backward`, `calculator`, `smollm2`: jobs.
- `methods/`: methods; `methods/credit/` has those of rewards and comparisons, `methods/objectives/` further objectives,
  `methods/families/` those whose groups ask for further groups.
  `method = "bapo"` takes one into any job. As run files they extend a job that shows them.

A method file has its settings in `[learner]`, and those of the job that shows it in `[demo]`. The pages of
docs/recipes/ have a section for each method.
"""

ONE_ALGORITHM = (
    ("calculator", "cispo", "decoupled-ppo", "smollm2", "spell_backward"),
    ("fapo-judge", "fapo-rule"),
)
"""Groups of recipes whose learner step is equal as shipped. They differ in their tasks and in parts that do not
act; docs/recipes/README.md explains why. A test computes the gradient of all recipes and fails if two are equal
that are not in one group here."""

BOUNDS_NEVER_ACT = (
    "calculator", "decoupled-ppo", "gspo", "hapo", "icepop", "ipa", "minirl", "ppo", "smollm2", "spell_backward",
    "tppo",
)  # fmt: skip
"""Recipes whose surrogate has bounds that never act as shipped, with one step per batch. Without the bounds the
gradient is equal."""
