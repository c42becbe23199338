"""``spill serve``: a model behind the OpenAI API, and batches of its requests that survive the server.

One thread owns the model (`loop`); requests come in over HTTP (`server`, `calls`, `replies`), batches are
`spillover.jobs` runs whose rows share its passes (`lane`, `batches`).
"""
