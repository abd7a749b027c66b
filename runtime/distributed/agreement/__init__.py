"""What ranks must agree on: the list, and where each is looked at.

| what | when it is compared | by |
| --- | --- | --- |
| the plan: mesh, model, loss, constants, optimizer, each op | ``parallelize``, a form planned anew | :mod:`.subjects` |
| the call: what it runs, mode, shapes, dtypes, wishes for gradients | every call | its form's words |
| how inputs are passed: whole, or in parts | every call | ``Passed`` |
| whole inputs and rates, a sample of their elements | every call, on CPU ranks | :mod:`.samples` |
| inputs that several ranks pass alike, each element | calls 1, 2, 4, 8, ... | ``checksum`` |
| what was done to parameters: backwards, steps, writes, loads | every call | :mod:`.acts` |
| what several ranks hold of parameters and buffers, a sample | calls 1, 2, 4, 8, ..., after a load | :mod:`.samples` |

Where ranks differ all of them raise, with what each side says (:mod:`.differences`), and nothing was run.
"""
