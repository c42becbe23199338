.PHONY: check test
check:
	ruff check .
	ruff format --check .
	mypy
	python -m pytest -q -m "not slow"

test:
	python -m pytest
