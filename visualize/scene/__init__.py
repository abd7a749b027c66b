"""What is drawn: boxes of modules, folded, and what flows between them."""
