"""``shardfx demo``."""
