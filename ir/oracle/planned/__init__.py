"""The rules of a plan, put to the oracle: each distinct op, arguments and strategy is executed in small."""
