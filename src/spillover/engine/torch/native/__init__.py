"""Compiled CPU kernels: passes of tokens whose results do not depend on their company."""
