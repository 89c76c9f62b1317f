ONE_ALGORITHM = (
    ("calculator", "cispo", "doors", "planted_mistakes", "sft", "smollm2", "spell_backward"),
    ("fapo-judge", "fapo-rule"),
)
"""Groups of recipes whose learner step is equal as shipped. They differ in their tasks and in who gives a reward;
docs/recipes/README.md explains why. A test computes the gradient of all recipes and fails if two are equal that are
not in one group here."""
