"""When ranks run which tasks of their programs: simulated from the costs of calls, and labels for what is measured."""
