"""One memory in which a program's buffers and temporaries lie: who is there when, at which place, and whether that is so."""
