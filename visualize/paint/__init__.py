"""How it is drawn: SVG."""
