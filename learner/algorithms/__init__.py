"""Pure functions of tensors, one topic per file, each with its formula and source. Without base classes or registries.

From rewards to a loss: `advantages` and `values` say how good a token was, `ratios` how far policies are apart and what
corrects it, `surrogates`, `penalties` and `entropy` what a token's objective is, `regularisers` what is added, and
`tokens` how losses of tokens become one number. `replay` chooses what is trained again.
"""
