"""One memory in which a program's buffers and temporaries lie: who is there when, where, and whether that is so."""
