"""Programs with turns: which nodes are done once for each turn, in which order, and the same written out."""
