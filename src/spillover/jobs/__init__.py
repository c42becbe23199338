"""Jobs: work cut into quanta, each of which may be the last one that this process does.

Submodules load what they need: `spillover.jobs.tune` and `spillover.jobs.run` bring an engine along,
`spillover.jobs.data` and `spillover.jobs.runs` do not.
"""
