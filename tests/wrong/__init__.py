"""What a verifier must refuse beside damage to the calls of ranks.

Passes that change a plan, wrong rules, programs that are none, and damage on one rank of many: each a row of data;
:mod:`.questions` has them all.
"""
