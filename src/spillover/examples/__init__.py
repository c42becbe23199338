"""Data that ships with the package: what `spill example` writes and what `spill run MODEL sample` answers."""
