"""Random small models, meshes, hints and passes: the result equals one device's, or a ``shardfx.Error`` is raised.

    python -m tests.fuzz --cases 2000 --seed 0         seeds of failures, why cases were refused, cases a second
    python -m tests.fuzz --only 1234                   one case, as a script that runs alone

- :mod:`.grammar`: the layers, as text
- :mod:`.case`: a case as data, drawn from a seed, and written as a script
- :mod:`.check`: a case, run
"""
