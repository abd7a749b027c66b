"""Python state that a model's code reads beside inputs and parameters, by its bytecode."""
