"""The run files that come with Offbeat: jobs, and methods that extend them. `offbeat recipes` lists them.

Every TOML file here is a whole run file. docs/recipes/ has a page for each method.
"""
