"""`offbeat view`: shows runs in a browser.

Readers take a run folder's files to plain data and write nothing. Models turn that data into what a page shows; they
are pure. The server and the export hand the models' results to the page in `assets`, which is plain JavaScript.
docs/adr/0024-a-page-beside-the-run.md says why it is made so.
"""
