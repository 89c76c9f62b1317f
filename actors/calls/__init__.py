"""Tool calls in answers, in the form in which the model's chat template writes them.

- `written`: a call as the template writes it, by which readers are tried.
- `library`: the readers of the package renderers.
- `reading`: which reader reads the template's calls, and answers in a form that every environment knows.
"""
