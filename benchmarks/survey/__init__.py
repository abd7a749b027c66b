"""The models of the survey (``python -m benchmarks.model_survey``), a file or more for each library."""
