"""Actors run environments; generators sample tokens (`generator/`). An actor never imports the generator.

`actor` is the process that plays leased tasks. An `episode` is one of them: `play_steps` and `play_requests` are its
two ways of playing, `render` and `chat_template` turn messages into tokens, and `segments` cuts what was sampled.
`uplink` and `generator_client` are its sides towards the broker and the generators.
"""
